"""The promises on a real model: two steps on four orders, computed in every way, from one whole run."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.launches import run_command, start_command
from tests.real.conftest import assert_same_curve, write_orders
from tests.rounding import relative_difference
from tests.tiny_training import events, losses

pytestmark = [pytest.mark.process, pytest.mark.warm]

NUM_ROWS, NUM_STEPS = 4, 2
"""Each step is an epoch, so step 1 has all rows."""
SPLIT = [f"training.batch_size={NUM_ROWS // 2}"]
ROUNDING = 49_152**0.5 * torch.finfo(torch.float32).eps
"""A sum of n terms in fp32 is off by about sqrt(n) roundings (Higham and Mary, A New Approach to Probabilistic Rounding
Error Analysis, 2019). The sum of a softmax over the vocabulary is in each loss and each gradient."""
ADAPTER = "adapter/adapter_model.safetensors"


class Runs:
    """Runs of the same rows; each is made when it is first asked for."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.rows = write_orders(folder / "rows", train=NUM_ROWS)
        self._made: set[str] = set()

    def command(self, name: str, *words: str) -> list[str]:
        return [
            *(sys.executable, "-m", "finetune", "train", "task=finetune_lora", "model=smollm2_135m"),
            *(f"model.path={self.model}", f"data.path={self.rows}", f"data.cache_dir={self.folder / 'cache'}"),
            *(f"training.batch_size={NUM_ROWS}", f"training.max_steps={NUM_STEPS}", "optim.learning_rate=1e-3"),
            *("checkpoint.save_every=1", f"output_dir={self.folder / name}", *words),
        ]

    def make(self, name: str, *words: str) -> Path:
        if name not in self._made:
            done = run_command(self.command(name, *words))
            assert done.returncode == 0, done.stdout
            self._made.add(name)
        return self.folder / name


@pytest.fixture(scope="module")
def runs(real_model, tmp_path_factory):
    return Runs(real_model, tmp_path_factory.mktemp("promises"))


@pytest.fixture(scope="module")
def whole(runs):
    """One process, one micro-batch in a step."""
    return runs.make("whole")


def assert_same_bytes(run: Path, other: Path) -> None:
    for name in (ADAPTER, f"checkpoints/step-{NUM_STEPS:06d}/optimizer.safetensors"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


def test_the_first_loss_is_the_cross_entropy_of_transformers(runs, whole):
    """The answers and their ends carry loss, in the rows as the model's own template renders them."""
    model = AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(runs.model)
    total, count = 0.0, 0
    for line in (runs.rows / "train.jsonl").read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        labels = torch.tensor([-100] * len(prompt) + ids[len(prompt) : end])
        with torch.no_grad():
            logits = model(torch.tensor([ids[:end]])).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits[:-1].double(), labels[1:], reduction="sum"))
        count += end - len(prompt)
    step = events(whole, "step")[0]
    assert step["num_targets"] == count
    print(f"loss {step['loss']:.7f}, transformers {total / count:.7f}")
    assert step["loss"] == pytest.approx(total / count, rel=ROUNDING)


def test_the_engine_computes_what_the_models_own_forward_does(runs):
    """With SGD, what B has learnt is a sum of gradients. Adam would enlarge the roundings of small ones."""
    sgd = ["optim.optimizer=torch.optim.SGD", "optim.learning_rate=0.1"]
    engine, reference = runs.make("engine", *sgd), runs.make("reference", *sgd, "training.kernels=reference")
    assert losses(engine) == pytest.approx(losses(reference), rel=ROUNDING)
    ones, others = (
        [value for name, value in sorted(load_file(run / ADAPTER).items()) if "lora_B" in name]
        for run in (engine, reference)
    )
    difference = relative_difference(ones, others)
    print(f"gradients differ by {difference:.1e}")
    assert difference <= ROUNDING


def test_two_processes_give_the_curve_of_one(runs, whole):
    """Promise 1."""
    assert_same_curve(runs.make("two", *SPLIT, "parallel.num_processes=2"), whole)


def test_sharded_weights_give_the_bytes_of_whole_ones(runs):
    two = runs.make("two", *SPLIT, "parallel.num_processes=2")
    assert_same_bytes(runs.make("sharded", *SPLIT, "parallel.num_processes=2", "parallel.sharding=fsdp2"), two)


def test_a_run_that_was_killed_ends_with_the_bytes_of_a_whole_one(runs, whole):
    command = runs.command("killed")
    with start_command(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "checkpoint committed step=1" in line:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert not (runs.folder / "killed/adapter").exists()
    done = run_command([*command, "resume=auto"])
    assert done.returncode == 0, done.stdout
    assert "resumed from step=" in done.stdout
    assert_same_bytes(runs.folder / "killed", whole)
    assert losses(runs.folder / "killed") == losses(whole)
