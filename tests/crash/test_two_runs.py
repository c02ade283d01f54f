"""One folder is written by one run at a time; a lock of the dead blocks nobody."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.crash import IS_FULL
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


@pytest.mark.skipif(not IS_FULL, reason="waits for 30 seconds; FINETUNE_FULL_SWEEP=1 runs it")
def test_a_restart_names_who_does_not_die(nursery: Nursery) -> None:
    nursery.put(None)
    started = nursery.start(*LONG)
    [pid] = started.pids
    wait_for("committed step=4", started.screen)
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    ended = nursery.train(*LONG)
    assert 29 < time.monotonic() - begun < 50
    os.kill(pid, signal.SIGKILL)
    nursery.end(started)
    assert ended.status == 2
    assert "Traceback" not in ended.screen
    assert f"process {pid} on {socket.gethostname()} since 20" in ended.screen
    assert "after 30 s" in ended.screen


@pytest.mark.parametrize("holder", [{"host": "elsewhere", "pid": 1, "started": "2020-01-01"}, {}, "noise"])
def test_the_lock_of_a_dead_process_does_not_block(nursery: Nursery, whole: Path, holder: object) -> None:
    nursery.put(None)
    nursery.run.mkdir()
    (nursery.run / ".lock").write_text(json.dumps(holder))
    ended = nursery.train()
    assert "waiting for" not in ended.screen
    assert_same_end(ended, nursery.run, whole)
