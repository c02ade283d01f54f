"""One folder is written by one run at a time; a lock of the dead blocks nobody."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.crash.runs import Nursery, assert_same_end
from tests.launches import wait_until

pytestmark = pytest.mark.slow

LONG = ["training.max_steps=2000"]


def wait_for(text: str, screen: Path) -> None:
    wait_until(lambda: screen.exists() and text in screen.read_text(), f"{text!r} in {screen}", 60)


def test_runs_that_start_at_once_take_turns(nursery: Nursery, whole: Path) -> None:
    nursery.put(None)
    started = [nursery.start() for _ in range(4)]
    ended = [nursery.end(each) for each in started]
    for each in ended:
        assert_same_end(each, nursery.run, whole)
    # The first trains, the others find a complete run.
    assert sorted(each.resumed_from for each in ended) == [0, 6, 6, 6]


def test_a_restart_waits_for_a_dying_run_and_goes_on(nursery: Nursery, whole: Path) -> None:
    nursery.put(None)
    started = nursery.start(*LONG)
    [dying] = started.pids
    wait_for("committed step=4", started.screen)
    os.kill(dying, signal.SIGSTOP)
    waiting = nursery.start(*LONG)
    # A lock tells who holds it.
    wait_for(f"process {dying} on {socket.gethostname()} since 20", waiting.screen)
    before = (nursery.run / "metrics.jsonl").read_bytes()
    time.sleep(0.5)
    assert (nursery.run / "metrics.jsonl").read_bytes() == before
    os.kill(dying, signal.SIGKILL)
    ended = nursery.end(started)
    assert ended.status == -signal.SIGKILL
    wait_for("resumed from step=", waiting.screen)
    os.kill(waiting.pids[0], signal.SIGKILL)
    assert nursery.end(waiting).resumed_from >= ended.committed
