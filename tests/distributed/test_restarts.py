"""`torchrun --max_restarts` with `resume=auto`: a rank is killed, all start again, and the bytes are the same."""

import itertools
import json
import os
import signal

import pytest
import torch

from finetune.config.compose import load_config
from finetune.distributed.launch import launch
from finetune.training.train import build_trainer
from tests.curves import Case, run_and_report
from tests.distributed.test_sharding import assert_same_bytes
from tests.launches import LAUNCHERS

TORCHRUN, OPTIONS = LAUNCHERS["torchrun"][:3], LAUNCHERS["torchrun"][3:]
NUM_PASSES = 6
"""Two of each of the first two steps, one of the third, which has fewer rows: the sixth is in step 4."""
CASE = Case(2, words=("parallel.sharding=fsdp2",))


def train_and_be_killed_once(words: list[str]) -> None:
    """Kill rank 1 in its fourth step, in the first attempt, where rank 0 waits for its weights."""
    config = load_config(words, task="finetune_lora")
    with launch(config) as runtime:
        trainer = build_trainer(runtime, config)
        if runtime.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            backward, passes = runtime.placement.backward, itertools.count(1)

            def killed(loss: torch.Tensor, *, is_last: bool) -> None:
                if next(passes) == NUM_PASSES:
                    os.kill(os.getpid(), signal.SIGKILL)
                backward(loss, is_last=is_last)

            runtime.placement.backward = killed  # type: ignore[method-assign]
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        trainer.run_training(train_loader, val_loader)
        trainer.run_test(test_loader)


@pytest.mark.slow
@pytest.mark.warm
def test_a_restarted_world_ends_with_the_bytes_of_one_that_was_not_killed(tmp_path):
    words = ("checkpoint.save_every=1", "resume=auto", "testing.metrics=[]")
    recipe = [f"{__name__}:train_and_be_killed_once"]
    folders = {}
    for name, restarts in (("whole", ()), ("killed", ("--max_restarts", "1"))):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        command = [*TORCHRUN, *restarts, *OPTIONS]
        run_and_report(command, folders[name], [CASE], *words, recipe=recipe if restarts else ())
    whole, killed = (folder / CASE.name for folder in folders.values())
    assert_same_bytes(whole, killed)
    starts = json.loads((killed / "run.json").read_text())["starts"]
    assert len(starts) == 2
