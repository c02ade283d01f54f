"""Handle SIGTERM, SIGUSR1, SIGHUP and Ctrl-C. The first ends a run after its step, a second one at once.

During set-up, before the first step, the first one ends a run in one process at once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import ClassVar, Literal

STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name)
)
"""Those that the system has. SIGHUP means that the terminal is gone; if `nohup` has made the process ignore it, it
stays ignored."""
_PR_SET_PDEATHSIG = 1
"""From linux/prctl.h: choose the signal that the kernel sends to this process when its parent thread ends."""
# Found now, because in a forked child the loader's lock may still be held by a thread that only the parent has.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_CTRL_C_DOES = ("finetune: stops after this step and its checkpoint;", "press Ctrl-C again to stop at once")
_ONE_REQUEST_SECONDS = 1.0
"""Signals within this time are one request: the terminal or scheduler sends a signal, and the launcher sends it too."""


class Terminated(SystemExit):
    """SIGTERM from a user, from the scheduler, or from the launcher once another rank has ended."""

    exit_code: ClassVar[int] = 128 + signal.SIGTERM

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(self.exit_code)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return f"by {self.signal.name}"


class _StopRequest:
    """The stop signal that this process has received. Like signal handlers, it is state of the process."""

    pid = 0
    """The process that handles signals. A forked child inherits the handlers, but must not use them."""
    phase: Literal["set-up", "steps", "over"] = "over"
    """In the steps, a first signal is only recorded. Otherwise it raises."""
    is_shown = False
    """Whether a live view confirms Ctrl-C."""
    received: signal.Signals | None = None
    at = 0.0
    raised_at = -_ONE_REQUEST_SECONDS


@contextmanager
def stops_after_step(*, sets_up: bool = False) -> Iterator[None]:
    """Within the block, only record the first SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, for `received_stop_signal`.

    A second SIGTERM or Ctrl-C, more than a second later, raises `Terminated` or KeyboardInterrupt in the main thread.
    With `sets_up`, the first signal before `begin_steps` raises too. Signals that the program handles itself are left
    alone.
    """
    with stop_signals_go_to(_note):
        _StopRequest.pid, _StopRequest.received = os.getpid(), None
        _StopRequest.phase = "set-up" if sets_up else "steps"
        try:
            yield
        finally:
            _StopRequest.pid, _StopRequest.phase, _StopRequest.received = 0, "over", None


@contextmanager
def stop_signals_go_to(
    handler: Callable[[int, FrameType | None], object], signals: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[None]:
    """Within the block, handle the signals that the program does not handle itself. In the main thread only."""
    defaults = (signal.SIG_DFL, signal.default_int_handler, raise_at_once)
    _StopRequest.raised_at = -_ONE_REQUEST_SECONDS
    is_main = threading.current_thread() is threading.main_thread()
    before = {each: signal.signal(each, handler) for each in signals if is_main and signal.getsignal(each) in defaults}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def received_stop_signal() -> signal.Signals | None:
    """Return the signal that asked this process to stop after its step, or None."""
    return _StopRequest.received if _StopRequest.pid == os.getpid() else None


@contextmanager
def ctrl_c_is_shown() -> Iterator[None]:
    """Within the block, a live view shows `ctrl_c_to_show`, because other text would break the view."""
    _StopRequest.is_shown = True
    try:
        yield
    finally:
        _StopRequest.is_shown = False


def ctrl_c_to_show() -> Sequence[str]:
    """Return the lines with which a live view confirms a first Ctrl-C. Empty before it, and without a live view."""
    return _CTRL_C_DOES if _StopRequest.is_shown and received_stop_signal() == signal.SIGINT else ()


def begin_steps() -> None:
    """Declare that the set-up is over. From here on, a first signal is only recorded. Before, it raised."""
    _StopRequest.phase = "steps"


def end_steps() -> None:
    """Declare that training is over. From here on, a first signal raises. Before, only a second one did."""
    _StopRequest.phase = "over"


def is_in_steps() -> bool:
    """Return whether this process is in the steps of a run. With several ranks, the set-up counts too."""
    return _StopRequest.phase == "steps" and _StopRequest.pid == os.getpid()


@contextmanager
def record_stop_signals() -> Iterator[None]:
    """Within the block, a first signal is only recorded, even after `end_steps`; see `received_stop_signal`."""
    before, _StopRequest.phase = _StopRequest.phase, "steps"
    try:
        yield
    finally:
        _StopRequest.phase = before


def was_stopped_in_set_up(error: BaseException) -> bool:
    """Return whether an error is the exception of a signal that came before `begin_steps`."""
    is_signal = isinstance(error, Terminated | KeyboardInterrupt)
    return is_signal and _StopRequest.phase == "set-up" and received_stop_signal() is not None


def leave_signals_to_parent(*_: object) -> None:
    """Ignore stop signals and end with the parent, in a process that only works for its parent.

    Signals reach the whole process group, and torch checks for the parent only every 5 s. Accepts the arguments of
    torch's `worker_init_fn`.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however it ends. Has effect on Linux only."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)


def raise_at_once(number: int, frame: FrameType | None) -> None:
    """End the command, and let it remove its temporary files. A second signal of one request changes nothing."""
    outer, now = frame, time.monotonic()
    while outer is not None and outer.f_code.co_name != "__del__":
        outer = outer.f_back
    if outer is not None:  # Python drops what `__del__` raises: send the signal again, after the time of one request
        again = threading.Timer(_ONE_REQUEST_SECONDS + 0.1, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
    elif number == signal.SIGINT or now - _StopRequest.raised_at > _ONE_REQUEST_SECONDS:
        _StopRequest.raised_at = now
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


@contextmanager
def ignore_stop_signals(*, for_good: bool = False) -> Iterator[None]:
    """Within the block, ignore stop signals, because the process is ending already.

    Under a launcher they come twice: from the terminal, and from the launcher, which passes them on. `for_good` ignores
    them after the block too. Otherwise, one in Python's own ending would print a traceback.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in () if for_good else before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _note(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _StopRequest.pid:  # a forked child obeys only SIGTERM; the parent decides about the others
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        return
    now = time.monotonic()
    is_first = _StopRequest.received is None
    if is_first:
        _StopRequest.received, _StopRequest.at = signal.Signals(number), now
    if _StopRequest.phase == "steps" and is_first:
        if number == signal.SIGINT and not _StopRequest.is_shown:
            with suppress(OSError):  # past Python's streams, which may be in the middle of a line
                os.write(2, "\n".join(("", *_CTRL_C_DOES, "")).encode())
    elif is_first or (now - _StopRequest.at > _ONE_REQUEST_SECONDS and number in (signal.SIGTERM, signal.SIGINT)):
        raise_at_once(number, frame)


def after_fork_in_child(function: Callable[[], object]) -> None:
    """Call a function in every child that this process forks. A system without `fork` has none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
