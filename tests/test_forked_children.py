"""SIGTERM ends a child that a function of the user's forks, whatever the child does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

import finetune.forked_children  # noqa: F401
from finetune.signals import STOP_SIGNALS, raise_at_once, stop_signals_go_to, stops_after_step

pytestmark = [pytest.mark.process, pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")]


def status_of_child(body: Callable[[], bool], number: int = 0) -> int:
    """Fork a child, send it a signal at once, and return its exit code, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if body() else 1)
        finally:
            os._exit(70)
    if number:
        os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def waits_in_a_call_that_runs_no_handler() -> bool:
    signal.alarm(5)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(STOP_SIGNALS) - {signal.SIGTERM})
    signal.sigwait({signal.SIGUSR1})
    return True


@pytest.mark.parametrize("handling", [stops_after_step, lambda: stop_signals_go_to(raise_at_once)])
def test_a_child_has_the_default_and_its_parent_keeps_the_handler(handling: Callable[[], AbstractContextManager[None]]):
    with handling():
        handler, mask = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert callable(handler)
        assert (
            status_of_child(
                lambda: (
                    signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
                    and callable(signal.getsignal(signal.SIGINT))
                    and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
                )
            )
            == 0
        )
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_a_signal_right_after_the_fork_is_not_lost():
    with stops_after_step():
        ends = {status_of_child(waits_in_a_call_that_runs_no_handler, signal.SIGTERM) for _ in range(20)}
    assert ends == {-signal.SIGTERM}


def test_a_handler_of_the_program_stays():
    before = signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        assert status_of_child(lambda: signal.getsignal(signal.SIGTERM) is handler) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
