"""Gone on with from the checkpoint of any step of an epoch, a run ends with the bytes of the uninterrupted one."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest

from finetune.runs.folder import RunFolder
from tests.crash import IS_FULL
from tests.crash.runs import DATA_WORKERS, Nursery, assert_same_end, explained

pytestmark = pytest.mark.slow

NUM_STEPS = 10
STEPS_PER_EPOCH = 4
WORDS = [
    *("training.global_batch_size=2", "training.batch_size=1", f"training.max_steps={NUM_STEPS}"),
    *("checkpoint.save_every=1", "checkpoint.save_total_limit=99", "validation.validate_every=3", *DATA_WORKERS),
]


@pytest.mark.parametrize("ranks", [1, 2] if IS_FULL else [1])
def test_resumed_at_every_step(nursery: Nursery, tried: Callable[..., None], ranks: int) -> None:
    whole = nursery.whole(*WORDS, ranks=ranks)
    assert RunFolder(whole).checkpoint_steps() == list(range(1, NUM_STEPS + 1))
    few = [3, 5] if ranks == 1 else [6]
    steps = range(NUM_STEPS + 1) if IS_FULL else few
    for step in steps:
        nursery.put(whole)
        shutil.rmtree(nursery.run / "adapter")
        for later in range(step + 1, NUM_STEPS + 1):
            shutil.rmtree(RunFolder(nursery.run).checkpoint(later))
        again = nursery.train(*WORDS, ranks=ranks)
        with explained(f"from step {step}:\n{again.screen}\n"):
            assert again.resumed_from == step
            assert f"{STEPS_PER_EPOCH} steps an epoch" in again.screen
            assert_same_end(again, nursery.run, whole)
    tried(f"from {len(steps)} of {NUM_STEPS + 1} steps, {STEPS_PER_EPOCH} to an epoch", resumes=len(steps))
