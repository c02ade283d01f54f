"""Call what may never return, with a deadline: a server, a library, or a function of the user."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

_LOOK_SECONDS = 0.1

_Value = TypeVar("_Value")


class DeadlineExceededError(Exception):
    """A call has not returned in time."""


class StopRequestedError(Exception):
    """The run was asked to stop during a call."""


def call_within(
    seconds: float, call: Callable[[], _Value], *, name: str, is_to_stop: Callable[[], bool] = lambda: False
) -> _Value:
    """Return what a call returns, and raise what it raises. A daemon thread runs it, and keeps it if it takes too long.

    Args:
        seconds: the longest that the call may take. Many libraries limit only each read, so a slow sender has no limit.
        call: the function to call.
        name: of the thread.
        is_to_stop: asked ten times a second; True ends the waiting.

    Raises:
        DeadlineExceededError: the call has not returned.
        StopRequestedError: `is_to_stop` returned True.
    """
    outcome: Future[_Value] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # the caller gets it, SystemExit too
            outcome.set_exception(error)

    ends = time.monotonic() + seconds
    Thread(target=run, name=name, daemon=True).start()
    while not wait([outcome], timeout=min(_LOOK_SECONDS, max(0.0, ends - time.monotonic()))).done:
        if is_to_stop():
            raise StopRequestedError
        if time.monotonic() >= ends:
            raise DeadlineExceededError
    return outcome.result()
