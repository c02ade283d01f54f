"""Handle SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: the first ends a run after its step, a second one at once."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import ClassVar, NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""SIGHUP means that the terminal is gone. Under `nohup` it is ignored, and stays so."""
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: choose the signal that the kernel sends to this process when its parent thread ends."""
_CTRL_C_DOES = ("finetune: stops after this step and its checkpoint;", "press Ctrl-C again to stop at once")
_ONE_REQUEST_SECONDS = 1.0
"""The same signal may come twice: from the terminal or the scheduler, and from the launcher."""
_RAISED_AGAIN_SECONDS = 0.05


class Terminated(SystemExit):
    """SIGTERM from a user, from the scheduler, or from the launcher once another rank has ended."""

    exit_code: ClassVar[int] = 128 + signal.SIGTERM

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(self.exit_code)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"by {self.signal.name}"


class _Told:
    """The stop signal that this process has received: state of the process, like its handlers."""

    pid = 0
    """The process that handles signals; a forked child inherits its handlers, but not this role."""
    waits_for_step = False
    is_shown = False
    """A live view shows that the run stops."""
    by: signal.Signals | None = None
    at = 0.0


@contextmanager
def stops_after_step() -> Iterator[None]:
    """Only record the first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C inside, for `told_to_stop`.

    A second SIGTERM or Ctrl-C, more than a second later, raises `Terminated` or KeyboardInterrupt in the main thread.
    Signals that the program handles itself are left alone.
    """
    with stop_signals_go_to(_note), _dropped_interrupts_are_raised_again():
        _Told.pid, _Told.waits_for_step, _Told.by = os.getpid(), True, None
        try:
            yield
        finally:
            _Told.pid, _Told.waits_for_step, _Told.by = 0, False, None


@contextmanager
def _dropped_interrupts_are_raised_again() -> Iterator[None]:
    """Send a signal once more when Python has dropped its exception, which was raised inside a `__del__`.

    The imports of a run call thousands of them, so a second Ctrl-C would have no effect if it came in one.
    """
    before = sys.unraisablehook

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        dropped = unraisable.exc_value
        if not isinstance(dropped, KeyboardInterrupt | Terminated):
            before(unraisable)
            return
        number = dropped.signal if isinstance(dropped, Terminated) else signal.SIGINT
        timer = threading.Timer(_RAISED_AGAIN_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def stop_signals_go_to(
    handler: Callable[[int, FrameType | None], object], signals: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Set a handler inside for the signals that the program does not handle itself. In the main thread only."""
    before = {number: signal.getsignal(number) for number in signals}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    mine = [number for number in signals if before[number] in defaults] if _is_main_thread() else []
    for number in mine:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])


def termination_raises() -> AbstractContextManager[None]:
    """Make SIGTERM raise `Terminated` in the main thread inside, unless the program handles it itself."""
    return stop_signals_go_to(_raise, (signal.SIGTERM,))


def told_to_stop() -> signal.Signals | None:
    """Return the signal that told this process to stop after its step, or None."""
    return _Told.by if _Told.pid == os.getpid() else None


@contextmanager
def ctrl_c_is_shown() -> Iterator[None]:
    """Leave it to a live view to show `ctrl_c_to_show` inside: text from elsewhere would tear the view."""
    _Told.is_shown = True
    try:
        yield
    finally:
        _Told.is_shown = False


def ctrl_c_to_show() -> Sequence[str]:
    """Return the lines that confirm a first Ctrl-C, for a live view; none before it, and none once the view ends."""
    return _CTRL_C_DOES if _Told.is_shown and told_to_stop() == signal.SIGINT else ()


def no_step_is_left() -> None:
    """Declare that training is over: from here on the first signal raises, as only a second one did before."""
    _Told.waits_for_step = False


@contextmanager
def stop_signals_are_noted() -> Iterator[None]:
    """After `no_step_is_left`, only record a first signal inside once more: a phase looks for it by itself."""
    _Told.waits_for_step, before = True, _Told.waits_for_step
    try:
        yield
    finally:
        _Told.waits_for_step = before


def leave_signals_to_parent(*_: object) -> None:
    """Ignore stop signals and end with the parent, in a process that only works for its parent.

    Signals reach the whole process group, and torch checks for the parent only every 5 s. Accepts the arguments of
    torch's `worker_init_fn`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore stop signals inside, while the process is ending.

    Under a launcher they come twice: from the terminal, and from the launcher, which received them too.
    """
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _note(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _Told.pid:
        _in_child(number)
        return
    if number == signal.SIGHUP:
        give_up_dead_screens()
    now = time.monotonic()
    is_first = _Told.by is None
    if is_first:
        _Told.by, _Told.at = signal.Signals(number), now
    if _Told.waits_for_step and is_first:
        _acknowledge(number)
    elif is_first or (now - _Told.at > _ONE_REQUEST_SECONDS and number in (signal.SIGTERM, signal.SIGINT)):
        _raise(number, frame)


def give_up_dead_screens() -> None:
    """Redirect standard streams without a terminal to /dev/null, so that writing to them does not end a run."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")  # takes nothing, and fails where the terminal has hung up
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _acknowledge(number: int) -> None:
    """Confirm Ctrl-C at once. The text bypasses Python's streams, which may be in the middle of a line."""
    if number == signal.SIGINT and not _Told.is_shown:
        with suppress(OSError):
            os.write(2, "\n".join(("", *_CTRL_C_DOES, "")).encode())


def _in_child(number: int) -> None:
    """Obey only SIGTERM in a forked child, whose parent decides about the other signals."""
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
