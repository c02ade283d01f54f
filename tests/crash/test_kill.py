"""Killed by SIGKILL at any operation or any time, a run ends with the bytes of the uninterrupted one."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash import IS_FULL, STRIDE
from tests.crash.runs import DATA_WORKERS, Nursery, assert_same_end, explained

pytestmark = pytest.mark.slow

EVERY = {1: STRIDE, 2: 5 * STRIDE}
"""By number of ranks, in a full sweep."""
POINTS = {1: 3, 2: 1}
"""By number of ranks, otherwise."""
RANDOM_KILLS = {1: 50, 2: 15, 4: 10} if IS_FULL else {1: 2, 4: 1}
STEPS = {1: 300, 2: 150, 4: 100} if IS_FULL else {1: 30, 2: 18, 4: 12}
SHARDED = ["training.method=full", "parallel.sharding=fsdp2", "optim.learning_rate=1e-3"]
"""All ranks gather what rank 0 saves."""
ONE_EACH = ["training.batch_size=1"]
"""A micro-batch for each of four ranks."""


def damaged_and_complete(whole: Path, nursery: Nursery) -> Path:
    """A complete run whose newest checkpoint is damaged: the restart saves over a folder and publishes over one."""
    nursery.put(whole)
    (nursery.run / "checkpoints" / "step-000006" / "state.json").write_bytes(b"torn")
    (nursery.run / "adapter" / "adapter_model.safetensors").write_bytes(b"torn")
    return nursery.keep("damaged")


@pytest.mark.parametrize(
    ("ranks", "begins", "words"),
    [(1, "anew", DATA_WORKERS), (1, "over what is there", []), (2, "anew", []), (2, "anew", SHARDED)],
    ids=["1-anew", "1-over what is there", "2-anew", "2-sharded"],
)
def test_killed_at_any_operation(
    nursery: Nursery, tried: Callable[..., None], ranks: int, begins: str, words: list[str]
) -> None:
    """Of rank 0, which writes; the others see by themselves that it is gone."""
    whole = nursery.whole(*words, ranks=ranks)
    before = None if begins == "anew" else damaged_and_complete(whole, nursery)
    nursery.put(before)
    listed = nursery.folder / "operations.txt"
    assert_same_end(nursery.train(*words, ranks=ranks, operations=listed), nursery.run, whole)
    operations = listed.read_text().splitlines()
    total = len(operations)
    assert total > 150
    # Those of saves are among them, whichever thread saves.
    assert any("fsync checkpoints/.tmp-step-000006" in operation for operation in operations), operations

    killed = 0
    sample = random.Random(f"{ranks} {begins} {words}").sample(range(1, total + 1), POINTS[ranks])
    points = [*range(1, total, EVERY[ranks]), total] if IS_FULL else sample
    for point in points:
        nursery.put(before)
        ended = nursery.train(*words, ranks=ranks, kill_at=point)
        with explained(f"before operation {point}:\n{ended.screen}\n"):
            # What threads do at the same time comes in no fixed order, nor, perhaps, in a fixed number.
            assert ended.statuses[0] in (-signal.SIGKILL, 0)
            assert "hung" not in ended.statuses
            killed += ended.statuses[0] != 0
            again = nursery.train(*words, ranks=ranks)
            assert again.resumed_from >= ended.committed, again.screen
            assert_same_end(again, nursery.run, whole)
    assert killed >= 0.9 * len(points)
    tried(f"killed at {killed} of {total} operations on files", kill_points=killed, resumes=len(points))


@pytest.mark.parametrize("ranks", RANDOM_KILLS)
def test_killed_at_random_times(nursery: Nursery, tried: Callable[..., None], ranks: int) -> None:
    """A random one of the ranks, started again and again until the run is complete; then the next run."""
    words = [
        *(f"training.max_steps={STEPS[ranks]}", "checkpoint.save_every=3", "checkpoint.save_total_limit=2"),
        *("validation.validate_every=10", *DATA_WORKERS, *(ONE_EACH if ranks > 2 else [])),
    ]
    begun = time.monotonic()
    whole = nursery.whole(*words, ranks=ranks)
    seconds = time.monotonic() - begun
    rng = random.Random(ranks)
    kills = runs = committed = 0
    slowest = 0.0
    while kills < RANDOM_KILLS[ranks]:
        started = nursery.start(*words, ranks=ranks)
        time.sleep(rng.uniform(0, 0.5 * seconds))
        victim = rng.randrange(ranks)
        os.kill(started.pids[victim], signal.SIGKILL)
        ended = nursery.end(started)
        assert ended.statuses[victim] in (0, -signal.SIGKILL), ended.screen
        assert "hung" not in ended.statuses, ended.screen
        if re.search("Starting (distributed )?training", ended.screen):
            assert ended.resumed_from >= committed, ended.screen
        committed = max(committed, ended.committed)
        kills += ended.statuses[victim] != 0
        slowest = max(slowest, ended.seconds)
        if ended.status == 0:
            assert_same_end(ended, nursery.run, whole)
            nursery.put(None)
            committed, runs = 0, runs + 1
    last = nursery.train(*words, ranks=ranks)
    assert last.resumed_from >= committed
    assert_same_end(last, nursery.run, whole)
    gone = f"; the other ranks were gone within {slowest:.1f} s" if ranks > 1 else ""
    tried(f"killed {kills} times at random in {runs + 1} runs{gone}", random_kills=kills, resumes=runs + 1)
