"""SIGTERM and Ctrl-C: a run that is told to end says so in its folder and leaves in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar, NoReturn


class Terminated(SystemExit):
    """SIGTERM: from a user, from the scheduler, or from the launcher once another rank has ended."""

    exit_code: ClassVar[int] = 128 + signal.SIGTERM

    def __init__(self) -> None:
        super().__init__(self.exit_code)

    def __str__(self) -> str:
        return "by SIGTERM"


@contextmanager
def termination_raises() -> Iterator[None]:
    """A block in which SIGTERM raises `Terminated` in the main thread, unless the program has other plans for it."""
    if not _is_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A block in which SIGTERM and Ctrl-C are passed over: the process is on its way out already.

    Under a launcher they come twice: from the terminal, and from the launcher that heard it too.
    """
    if not _is_main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
