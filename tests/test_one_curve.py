"""One recipe, seed and global batch give one curve, whatever starts the processes and however they share rows."""

import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.launches import REPOSITORY, run_launched
from tests.tiny_runs import random_model_words, write_base, write_rows

pytestmark = pytest.mark.launch
NUM_STEPS = 6


class Run(NamedTuple):
    """What a run wrote."""

    record: dict
    losses: list[float]
    other_losses: list[float]
    num_targets: list[int]
    adapter: torch.Tensor


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "tokenizer")
    write_rows(folder / "rows")  # 18 rows: the third step of an epoch has 2, which are one micro-batch for one rank
    return folder


def run_recipe(inputs, name, launcher, *words):
    done = run_launched(
        launcher,
        [
            REPOSITORY / "recipes" / "finetune_lora.py",
            *random_model_words(inputs / "tokenizer"),
            f"data.path={inputs / 'rows'}",
            f"data.cache_dir={inputs / 'cache'}",
            f"output_dir={inputs / name}",
            "seed=3",
            "lora.r=4",
            "optim.learning_rate=1e-2",
            "training.device=cpu",
            "training.precision=fp32",
            "training.global_batch_size=8",
            f"training.max_steps={NUM_STEPS}",
            "testing.num_samples=0",
            *words,
        ],
    )
    assert done.returncode == 0, done.stdout
    return read_run(inputs / name)


def read_run(folder):
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    tensors = load_file(folder / "checkpoints" / f"step-{NUM_STEPS:06d}" / "adapter_model.safetensors")
    return Run(
        record=json.loads((folder / "run.json").read_text()),
        losses=[event["loss"] for event in steps],
        other_losses=[event["loss"] for event in events if event["event"] in ("validation", "test")],
        num_targets=[event["num_targets"] for event in steps],
        adapter=torch.cat([tensors[name].double().flatten() for name in sorted(tensors)]),
    )


@pytest.fixture(scope="module")
def alone(inputs):
    run = run_recipe(inputs, "alone", "python", "training.batch_size=3")
    assert (run.record["world_size"], run.record["backend"]) == (1, "none")
    assert len(run.losses) == NUM_STEPS
    assert len(run.other_losses) == 4
    assert run.losses[3] < run.losses[0] - 0.05, "a run that learns nothing proves nothing"
    return run


def assert_one_curve(run, expected):
    assert run.num_targets == expected.num_targets
    for ours, theirs in zip(run.losses + run.other_losses, expected.losses + expected.other_losses, strict=True):
        assert abs(ours - theirs) <= 1e-6 * max(1.0, abs(theirs))
    assert torch.linalg.norm(run.adapter - expected.adapter) <= 1e-5 * torch.linalg.norm(expected.adapter)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_like_one(inputs, alone, launcher):
    run = run_recipe(inputs, launcher, launcher, "training.batch_size=3")
    record = run.record
    assert (record["world_size"], record["launcher"], record["backend"]) == (2, launcher, "gloo")
    assert_one_curve(run, alone)


def test_another_split_into_micro_batches_trains_alike(inputs, alone):
    run = run_recipe(inputs, "split", "python", "training.batch_size=8", "training.max_tokens_per_microbatch=60")
    assert run.record["world_size"] == 1
    assert_one_curve(run, alone)
    assert run.losses != alone.losses, "the sums should have been taken in another order"
