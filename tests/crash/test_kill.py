"""Killed by SIGKILL at any operation or any time, a run ends with the bytes of the uninterrupted one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.runs import IS_FULL, Nursery, assert_same_end, explained

RANDOM_KILLS = 50 if IS_FULL else 5
EVERY = 1 if IS_FULL else 37


def damaged_and_complete(whole: Path, nursery: Nursery) -> Path:
    """A complete run whose newest checkpoint is damaged: the restart saves over a folder and publishes over one."""
    nursery.put(whole)
    (nursery.run / "checkpoints" / "step-000006" / "state.json").write_bytes(b"torn")
    (nursery.run / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    return nursery.keep("damaged")


@pytest.mark.parametrize("begins", ["anew", "over what is there"])
def test_killed_at_any_operation(nursery: Nursery, whole: Path, tried: Callable[[str], None], begins: str) -> None:
    before = None if begins == "anew" else damaged_and_complete(whole, nursery)
    nursery.put(before)
    listed = nursery.folder / "operations.txt"
    assert_same_end(nursery.train(operations=listed), nursery.run, whole)
    operations = listed.read_text().splitlines()
    # A prime step, and the first points of all: the share that is tried differs from save to save.
    points = sorted({*range(1, len(operations) + 2, EVERY), len(operations)})
    assert len(operations) > 150

    killed = 0
    for point in points:
        nursery.put(before)
        ended = nursery.train(kill_at=point)
        if point > len(operations):
            assert ended.status == 0, ended.screen
            continue
        what = f"killed before operation {point}: {operations[point - 1]}"
        assert ended.status == -signal.SIGKILL, f"{what}\n{ended.screen}"
        killed += 1
        again = nursery.train()
        assert again.resumed_from >= ended.committed, f"{what}\n{again.screen}"
        with explained(what):
            assert_same_end(again, nursery.run, whole)
    tried(f"killed at {killed} of {len(operations)} operations on files, none lost")


def test_killed_at_random_times(nursery: Nursery, tried: Callable[[str], None]) -> None:
    words = [
        "training.max_steps=300" if IS_FULL else "training.max_steps=60",
        "checkpoint.save_every=3",
        "validation.validate_every=5",
        "checkpoint.keep=2",
    ]
    nursery.put(None)
    begun = time.monotonic()
    assert nursery.train(*words).status == 0
    seconds = time.monotonic() - begun
    whole = nursery.keep("long")
    rng = random.Random(4)
    kills = runs = 0
    nursery.put(None)
    committed = 0
    while kills < RANDOM_KILLS:
        pid, screen = nursery.start(*words)
        time.sleep(rng.uniform(0, 0.25 * seconds))
        os.kill(pid, signal.SIGKILL)
        ended = nursery.end(pid, screen)
        assert ended.status in (0, -signal.SIGKILL), ended.screen
        if "Starting training" in ended.screen:
            assert ended.resumed_from >= committed, ended.screen
        committed = max(committed, ended.committed)
        kills += ended.status != 0
        if ended.status == 0:
            assert_same_end(ended, nursery.run, whole)
            nursery.put(None)
            committed, runs = 0, runs + 1
    last = nursery.train(*words)
    assert last.resumed_from >= committed
    assert_same_end(last, nursery.run, whole)
    shutil.rmtree(whole)
    tried(f"killed {kills} times at random in {runs + 1} runs, none lost")
