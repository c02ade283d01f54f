"""A second Ctrl-C ends a run wherever it comes."""

import os
import signal
import time

import pytest

from finetune.signals import received_stop_signal, stops_after_step


class InterruptedWhileDestroyed:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)


def interrupt_a_destructor_and_wait():
    InterruptedWhileDestroyed()
    time.sleep(10)


def test_an_interrupt_that_python_drops_in_a_destructor_is_raised_again():
    with stops_after_step():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.1)  # sooner, it would be the first one again, from a launcher
        assert received_stop_signal() == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            interrupt_a_destructor_and_wait()


def test_other_errors_in_destructors_are_shown_as_before(monkeypatch):
    shown = []
    monkeypatch.setattr("sys.unraisablehook", shown.append)

    class Broken:
        def __del__(self):
            raise ValueError("of the destructor")

    with stops_after_step():
        Broken()
    assert [str(each.exc_value) for each in shown] == ["of the destructor"]
