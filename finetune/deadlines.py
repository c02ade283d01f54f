"""End the waiting for a call that may never return: of a server, a library or a user's function."""

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
    """Return what a call returns, and raise what it raises. A daemon thread runs it, even after the deadline.

    `is_to_stop` is asked ten times a second; True ends the waiting. Many libraries limit only the time of each read, so
    a slow sender has no limit there.

    Raises:
        DeadlineExceededError: the call has not returned after so many seconds.
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
