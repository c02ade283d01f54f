"""One folder is written by one run at a time; a lock of the dead blocks nobody."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.crash.runs import Nursery, assert_same_end
from tests.launches import wait_until

pytestmark = pytest.mark.slow

LONG = ["training.max_steps=2000"]


def wait_for(text: str, screen: Path) -> None:
    wait_until(lambda: screen.exists() and text in screen.read_text(), f"{text!r} in {screen}", 60)


def test_of_runs_that_start_at_once_one_trains_and_the_others_are_refused_or_find_it_complete(
    nursery: Nursery, whole: Path
) -> None:
    nursery.put(None)
    started = [nursery.start() for _ in range(4)]
    ended = [nursery.end(each) for each in started]
    refused = [each for each in ended if each.status == 2]
    assert all("is being written by process" in each.screen for each in refused)
    complete = [each for each in ended if each not in refused]
    for each in complete:
        assert_same_end(each, nursery.run, whole)
    assert sorted(each.resumed_from for each in complete) == [0, *[6] * (len(complete) - 1)]


def test_a_second_run_is_refused_while_the_first_lives_and_goes_on_once_it_is_dead(
    nursery: Nursery, whole: Path
) -> None:
    nursery.put(None)
    started = nursery.start(*LONG)
    [first] = started.pids
    wait_for("committed step=4", started.screen)
    os.kill(first, signal.SIGSTOP)
    before = (nursery.run / "metrics.jsonl").read_bytes()
    refused = nursery.train(*LONG)
    assert refused.status == 2
    # A lock tells who holds it.
    assert f"process {first} on {socket.gethostname()} since 20" in refused.screen
    assert (nursery.run / "metrics.jsonl").read_bytes() == before
    os.kill(first, signal.SIGKILL)
    ended = nursery.end(started)
    assert ended.status == -signal.SIGKILL
    again = nursery.start(*LONG)
    wait_for("resumed from step=", again.screen)
    os.kill(again.pids[0], signal.SIGKILL)
    assert nursery.end(again).resumed_from >= ended.committed
