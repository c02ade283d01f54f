"""A signal that asks a command to stop is not lost, whatever Python does when it comes."""

from __future__ import annotations

import os
import signal
import time

import pytest

from finetune.signals import Terminated, raise_at_once, stop_signals_go_to


class SignalledWhileRemoved:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0)  # the handler is called before this function ends


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_in_a_del_method_stops_the_command(number, raised):
    before = signal.getsignal(number)
    with stop_signals_go_to(raise_at_once):
        SignalledWhileRemoved(number)
        with pytest.raises(raised):
            time.sleep(10)
    assert signal.getsignal(number) is before
