"""fp16: the loss scale, overflows that cost no batch, and models that cannot be trained in it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from finetune import build_base_model, load_config
from finetune.errors import ConfigError, RunFailedError
from finetune.training import loss_scale, training_run
from finetune.training.loss_scale import LossScale
from tests.tiny_training import break_at, contents, curve, losses, record, words_for
from tests.training.test_trainer import train

TOO_LARGE = 2**34
"""The gradients of these runs overflow with it, and with its first halves."""


def words_of(inputs, run):
    own = ["lora.r=2", "optim.learning_rate=1e-2", "training.precision=fp16", "training.max_steps=5"]
    return [*words_for(inputs, run), *own]


@pytest.fixture
def words(inputs, tmp_path):
    return words_of(inputs, tmp_path / "run")


@pytest.fixture(scope="module")
def in_fp32(inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp("fp32") / "run"
    train([*words_of(inputs, run), "training.precision=fp32"])
    return run


@pytest.fixture
def starts_too_large(monkeypatch):
    monkeypatch.setattr(LossScale.__new__, "__defaults__", (TOO_LARGE, 0, 0))


def state(run, step):
    return json.loads((run / f"checkpoints/step-{step:06}/state.json").read_text())


def test_a_scale_grows_slowly_and_shrinks_at_once():
    scale = LossScale(4, 1998)
    assert scale.after_step() == (4, 1999, 0)
    assert scale.after_step().after_step() == (8, 0, 0)
    assert scale.after_overflow() == (2, 0, 1)
    assert LossScale(1, 5, 3).after_overflow() == (1, 0, 4)
    assert LossScale(loss_scale._LARGEST_SCALE, 1999).after_step().value == loss_scale._LARGEST_SCALE


def test_the_base_is_in_fp16_and_the_curve_is_near_that_of_fp32(words, in_fp32, tmp_path):
    ended = train(words)
    assert losses(tmp_path / "run") == pytest.approx(losses(in_fp32), rel=2e-3)
    assert losses(tmp_path / "run") != losses(in_fp32)
    types = {weight.requires_grad: weight.dtype for weight in ended.trainer.model.parameters()}
    assert types == {True: torch.float32, False: torch.float16}
    assert record(tmp_path / "run")["precision"] == "fp16"
    steps = curve(tmp_path / "run")
    shrunk = [number for number, step in enumerate(steps) if "overflows" in step]
    assert steps[0]["loss_scale"] == 2**16 >> steps[0].get("overflows", 0)
    assert state(tmp_path / "run", 5)["loss_scale"] == steps[-1]["loss_scale"]
    assert state(tmp_path / "run", 5)["steps_at_loss_scale"] == 5 - max(shrunk, default=0)


def test_a_step_that_overflows_is_computed_again_and_no_batch_is_lost(words, in_fp32, tmp_path, starts_too_large):
    train(words)
    first, *others = curve(tmp_path / "run")
    assert first["overflows"] > 0
    assert first["loss_scale"] == TOO_LARGE >> first["overflows"]
    assert not any("skipped" in step for step in curve(tmp_path / "run"))
    counted = first["overflows"] + sum(step.get("overflows", 0) for step in others)
    assert record(tmp_path / "run")["result"]["num_overflows"] == state(tmp_path / "run", 5)["num_overflows"] == counted
    assert record(tmp_path / "run")["result"]["num_skipped_steps"] == 0
    assert (
        f"step 1 overflows in fp16: computed again with loss scale {TOO_LARGE // 2}"
        in (tmp_path / "run/log.txt").read_text()
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(in_fp32), rel=2e-3)


@pytest.mark.slow
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(words, tmp_path, starts_too_large, monkeypatch):
    words = [*words, "lora.dropout=0.1", "checkpoint.save_every=1"]
    train([*words, f"output_dir={tmp_path / 'whole'}"])
    with monkeypatch.context() as patch:
        break_at(patch, 4, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(words)
    train([*words, "resume=auto"])
    assert contents(tmp_path / "run/checkpoints/step-000005") == contents(tmp_path / "whole/checkpoints/step-000005")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_a_gradient_that_overflows_without_a_scale_is_not_finite(words, monkeypatch):
    monkeypatch.setattr(LossScale.__new__, "__defaults__", (1, 0, 0))

    def overflowing(*args, **keys):
        (weight, *_) = [weight for weight in args[1].parameters() if weight.requires_grad]
        handle = weight.register_hook(lambda gradient: gradient * float("inf"))
        try:
            return whole(*args, **keys)
        finally:
            handle.remove()

    whole = training_run.train_step
    monkeypatch.setattr(training_run, "train_step", overflowing)
    with pytest.raises(RunFailedError, match="the gradient norm"):
        train(words)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_model_whose_activations_overflow_is_refused_with_the_module_before_step_1(words, inputs, tmp_path, kernels):
    base = build_base_model(load_config(words, task="finetune_lora").model)
    base.model.layers[1].mlp.down_proj.weight.data.mul_(1e8)
    base.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(inputs / "base" / name, tmp_path / "base")
    large = [*words, f"model.path={tmp_path / 'base'}", f"training.kernels={kernels}"]
    with pytest.raises(ConfigError, match=r"the output of model\.layers\.1\.mlp\.down_proj.* is larger than 65504"):
        train(large)
    assert not (tmp_path / "run/checkpoints").exists()
    train([*large, "training.precision=fp32", f"output_dir={tmp_path / 'fp32'}"])
