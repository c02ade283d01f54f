"""SIGTERM, SIGUSR1, SIGHUP and Ctrl-C: a run that is told to stop ends after its step; told twice, it ends at once."""

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
"""SIGHUP: the terminal is gone. `nohup` makes a process ignore it, and we leave it ignored."""
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal that the kernel sends to this process when the thread that made it is gone."""
_ONE_REQUEST_SECONDS = 1.0
"""A signal comes twice where the terminal or the scheduler and the launcher both send it."""


class Terminated(SystemExit):
    """SIGTERM: from a user, from the scheduler, or from the launcher once another rank has ended."""

    exit_code: ClassVar[int] = 128 + signal.SIGTERM

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(self.exit_code)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"by {self.signal.name}"


class _Told:
    """The signal that this process has received; signals belong to the process."""

    pid = 0
    """The process that listens; a forked child inherits its handlers."""
    waits_for_step = False
    by: signal.Signals | None = None
    at = 0.0


@contextmanager
def stops_after_step() -> Iterator[None]:
    """A block in which the first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C is only noted, for `told_to_stop`.

    A second SIGTERM or Ctrl-C, more than a second later, raises `Terminated` or KeyboardInterrupt in the main thread.
    Signals that the program handles itself are left alone.
    """
    with stop_signals_go_to(_note):
        _Told.pid, _Told.waits_for_step, _Told.by = os.getpid(), True, None
        try:
            yield
        finally:
            _Told.pid, _Told.waits_for_step, _Told.by = 0, False, None


@contextmanager
def stop_signals_go_to(
    handler: Callable[[int, FrameType | None], object], signals: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """A block with a handler for those signals that the program does not handle itself. In the main thread only."""
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
    """A block in which SIGTERM raises `Terminated` in the main thread, unless the program handles it itself."""
    return stop_signals_go_to(_raise, (signal.SIGTERM,))


def told_to_stop() -> signal.Signals | None:
    """The signal that told this process to stop after its step; None: it goes on."""
    return _Told.by if _Told.pid == os.getpid() else None


def no_step_is_left() -> None:
    """Training is over: from here on the first signal raises, as only the second did before."""
    _Told.waits_for_step = False


def leave_signals_to_parent(*_: object) -> None:
    """Ignore stop signals, and end with the parent: for a process that only works for its parent.

    Signals are sent to the whole group, and torch itself looks only every 5 s whether the parent is still there. Takes
    the arguments of torch's `worker_init_fn`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block that stop signals do not interrupt: this process is on its way out already.

    Under a launcher they come twice: from the terminal, and from the launcher that received them too.
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
    """Redirect standard streams whose terminal is gone to nowhere: a line that nobody sees must not end a run."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")  # takes nothing, and fails where the terminal has hung up
        except OSError as error:
            if error.errno == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _acknowledge(number: int) -> None:
    """Answer Ctrl-C at once. Python's streams may be in the middle of a line, so the text does not go through them."""
    if number == signal.SIGINT:
        with suppress(OSError):
            os.write(2, b"\nfinetune: stops after this step and its checkpoint; press Ctrl-C again to stop at once\n")


def _in_child(number: int) -> None:
    """A fork of the process that listens leaves the decision to its parent, and obeys only SIGTERM from it."""
    if number == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
