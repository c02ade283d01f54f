"""Whole runs on the device: each method's first steps, a run that breaks and goes on, and what its adapter answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from finetune import load_config
from finetune.replay.steps import LOSS_BOUNDS, replay_losses
from finetune.training.train import train
from tests import tiny_training
from tests.gpu.models import PRECISIONS, write_inputs
from tests.in_process import run_finetune
from tests.tiny_training import break_at, events, record, refuse_to_differ_after_a_break, words_for

OWN_FORWARD = "the model's own forward"
METHODS = {
    "lora": ["lora.r=4"],
    "rslora": ["lora.rslora=true"],
    "dora": ["lora.dora=true"],
    "pissa": ["lora.init=pissa", "optim.weight_decay=0"],
    "lora+": ["optim.lora_plus_ratio=4"],
    "some layers": ["lora.target_modules=[o_proj,down_proj]"],
    "new tokens": ["lora.new_tokens=['<|crate|>']"],
    "full": ["training.method=full", "optim.learning_rate=1e-3"],
    "checkpointing": ["training.gradient_checkpointing=true"],
    OWN_FORWARD: ["training.kernels=reference"],
    "workers": ["training.num_workers=1", "training.pin_memory=true"],
    "preferences": ["task=finetune_preferences", "optim.warmup_steps=0"],
}
CALLED = {"dora", "new tokens"}
"""Those with layers that the engine calls as PEFT made them: a fallback. There is no other."""
RANDOM = {"dropout": ["lora.dropout=0.3"], "neftune": ["training.neftune_alpha=5"]}
"""Those that draw numbers, and other ones on each kind of device."""
TOLERANCES = {
    **{("cpu", "fp32"): 1e-5, ("cuda", "fp32"): 1e-4},
    **{("cpu", "bf16"): 2e-2, ("cuda", "bf16"): 2e-2, ("cpu", "fp16"): 4e-3, ("cuda", "fp16"): 4e-3},
}


@pytest.fixture(scope="module")
def inputs(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    rows = [
        {"prompt": f"{number}: please send three crates of oranges", "chosen": "yes to Porto", "rejected": "no"}
        for number in range(20)
    ]
    (folder / "pairs").mkdir()
    for split, part in (("train", rows[:16]), ("validation", rows[16:])):
        (folder / "pairs" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def words_on(device: str | torch.device, precision: str, inputs: Path, run: Path) -> list[str]:
    own = [f"training.device={device}", f"training.precision={precision}", "lora.r=4", "optim.learning_rate=1e-2"]
    return [*words_for(inputs, run), *own]


def losses_of(run: Path) -> list[float]:
    """Of the steps and the validations."""
    return [event["loss"] for event in (*events(run, "step"), *events(run, "validation"))]


def two_steps(words: list[str], run: Path) -> list[float]:
    """The losses of two steps, and of the validation after them."""
    train(load_config([*words, "training.max_steps=2", f"output_dir={run}"]))
    losses = losses_of(run)
    assert len(losses) == 3
    return losses


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", METHODS)
def test_two_steps_are_those_of_the_models_own_forward_on_the_cpu(
    method: str, precision: str, device: torch.device, inputs: Path, tmp_path: Path
) -> None:
    rows = [f"data.path={inputs / 'pairs'}"] if method == "preferences" else []
    run, reference = tmp_path / "run", tmp_path / "reference"
    ours = two_steps([*words_on(device, precision, inputs, run), *METHODS[method], *rows], run)
    own_forward = [*METHODS[method], *rows, "training.kernels=reference"]
    theirs = two_steps([*words_on("cpu", "fp32", inputs, reference), *own_forward], reference)
    assert ours == pytest.approx(theirs, rel=TOLERANCES[device.type, precision])
    assert len(set(theirs)) == 3, "a step changes the loss"
    assert f"device {device}, {precision}, world of 1" in (run / "log.txt").read_text()
    taken = [fallback["what"] for fallback in record(run)["fallbacks"]]
    assert taken == ["training.kernels"] * (method in CALLED)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", RANDOM)
def test_what_is_drawn_is_drawn_again_with_the_same_seed(
    method: str, precision: str, device: torch.device, inputs: Path, tmp_path: Path
) -> None:
    runs = {"plain": [], "drawn": RANDOM[method], "again": RANDOM[method], "other": [*RANDOM[method], "seed=5"]}
    plain, drawn, again, other = (
        two_steps([*words_on(device, precision, inputs, tmp_path / name), *words], tmp_path / name)
        for name, words in runs.items()
    )
    assert again == pytest.approx(drawn, rel=TOLERANCES[device.type, precision])
    assert drawn[:2] != pytest.approx(plain[:2], rel=1e-3)
    assert drawn[:2] != pytest.approx(other[:2], rel=1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_that_breaks_ends_with_the_bytes_of_the_whole_one_if_deterministic(
    precision: str, device: torch.device, inputs: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    words = [*words_on(device, precision, inputs, whole), "training.deterministic=true", "lora.dropout=0.1"]
    tiny_training.train(words)
    refuse_to_differ_after_a_break(words, whole, tmp_path / "broken")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_that_breaks_ends_close_to_the_whole_one(
    precision: str, device: torch.device, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding, as docs/checkpoints.md says, because CUDA adds in another order in each run."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    tiny_training.train(words_on(device, precision, inputs, whole))
    words = words_on(device, precision, inputs, broken)
    with monkeypatch.context() as patch:
        break_at(patch, 3)
        with pytest.raises(RuntimeError, match="power cut"):
            tiny_training.train(words)
    tiny_training.train(words)
    assert "resumed from step=2" in (broken / "log.txt").read_text()
    assert losses_of(broken) == pytest.approx(losses_of(whole), rel=1e-4 if precision == "fp32" else 1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_learning_from_rewards_is_computed_again_from_its_rollouts(
    precision: str, device: torch.device, inputs: Path, tmp_path: Path
) -> None:
    """Two steps on each rollout, so that the second one has a ratio to the weights that generated the answers."""
    run = tmp_path / "run"
    words = [*words_on(device, precision, inputs, run), "task=finetune_grpo", "optim.learning_rate=1e-2"]
    words += ["reward.functions=regex", "reward.pattern=[^aet]*", "grpo.num_iterations=2", "optim.warmup_steps=0"]
    words += ["rollout.num_generations=4", "rollout.max_completion_length=8"]
    train(load_config(words))
    steps = events(run, "step")
    assert len({step["reward"] for step in steps}) > 1
    assert steps[0]["clipped"] == 0
    assert sum(step["grad_norm"] for step in steps) > 0
    again = replay_losses(run, 4)
    assert again.device == device.type
    assert (again.mismatches, again.bound) == ([], LOSS_BOUNDS[precision])


def test_the_shipped_model_trains_and_answers(device: torch.device, tmp_path: Path) -> None:
    """`finetune train quickstart` in miniature, in the precision of the device, and the commands on what it made."""
    run = tmp_path / "run"
    few = ["data.max_rows=24", "training.max_steps=3", "testing.max_new_tokens=8", f"data.cache_dir={tmp_path}"]
    on = f"training.device={device}"
    done = run_finetune("train", "quickstart", *few, on, f"output_dir={run}")
    assert done.returncode == 0, done.stdout
    assert events(run, "test")[-1]["loss"] > 0
    asked = run_finetune("generate", run, "Two pens for Ada", "--json", "--max-new-tokens", "8")
    assert asked.returncode == 0, asked.stdout
    assert json.loads(asked.answer)["num_tokens"] > 0
