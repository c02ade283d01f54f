"""Schedule-free optimizers: the weights that are trained, and those that are measured, saved and published."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.schema import OptimSection
from finetune.errors import ConfigError
from finetune.runs.checkpoint_loading import load_optimizer
from finetune.runs.optimizer_file import encode_optimizer
from finetune.training.optim import averaged_weights, build_optimizer, resolve_optimizer, restore_trained_weights
from tests.in_process import run_finetune
from tests.tiny_training import (
    adapter_tensors,
    curve,
    refuse_to_differ_after_a_break,
    train,
    words_for,
    write_inputs,
)

pytestmark = [pytest.mark.needs("schedulefree")]
NAMES = ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"]


def built(name, model, **keys):
    return build_optimizer(model, OptimSection(optimizer=f"schedulefree.{name}", schedule="constant", **keys))


def take_steps(model, optimizer, first, last):
    """Steps whose gradients depend on the number of the step alone."""
    for step in range(first, last + 1):
        drawn = torch.Generator().manual_seed(step)
        for weight in model.parameters():
            weight.grad = torch.randn(weight.shape, generator=drawn)
        optimizer.step()


def layer():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


@pytest.mark.parametrize("name", NAMES)
def test_measuring_in_between_changes_no_bit_and_gives_the_weights_of_the_library(name):
    import schedulefree

    plain, ours = layer(), layer()
    alone = getattr(schedulefree, name)(plain.parameters(), lr=0.1)
    alone.train()
    take_steps(plain, alone, 1, 12)
    optimizer = built(name, ours, learning_rate=0.1)
    take_steps(ours, optimizer, 1, 8)  # in its first ones RAdam only gathers the squares of gradients
    trained = ours.weight.clone()
    with averaged_weights(optimizer):
        assert not torch.equal(ours.weight, trained)
    assert torch.equal(ours.weight, trained)
    take_steps(ours, optimizer, 9, 12)
    assert torch.equal(ours.weight, plain.weight)
    alone.eval()
    with averaged_weights(optimizer):
        assert torch.equal(ours.weight, plain.weight)
        assert torch.equal(ours.bias, plain.bias)


def test_weights_that_no_step_has_updated_are_not_measured_in_silence(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    model = layer()
    optimizer = built("RAdamScheduleFree", model, learning_rate=0.1)
    with averaged_weights(optimizer):  # before the first step
        assert caplog.messages == []
    for first, last, warned in ((1, 4, True), (5, 5, False)):
        take_steps(model, optimizer, first, last)
        caplog.clear()
        with averaged_weights(optimizer):
            assert torch.equal(model.weight, layer().weight) == warned
        assert ["has not updated the weights yet" in message for message in caplog.messages] == [True] * warned


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on_with_the_same_bits(name, tmp_path):
    whole, again = layer(), layer()
    optimizer = built(name, whole, learning_rate=0.1)
    take_steps(whole, optimizer, 1, 8)
    with averaged_weights(optimizer):
        weights = {key: value.clone() for key, value in whole.state_dict().items()}
        (content,) = encode_optimizer(whole, optimizer).items()
        (tmp_path / content[0]).write_bytes(b"".join(map(bytes, content[1])))
    take_steps(whole, optimizer, 9, 12)
    resumed = built(name, again, learning_rate=0.1)
    again.load_state_dict(weights)
    load_optimizer(again, resumed, tmp_path)
    restore_trained_weights(resumed)
    take_steps(again, resumed, 9, 12)
    assert torch.equal(again.weight, whole.weight)
    assert torch.equal(again.bias, whole.bias)


def test_a_run_publishes_the_measured_weights_and_after_a_break_has_the_bytes_of_the_whole_one(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    own = ["optim.optimizer=schedulefree.AdamWScheduleFree", "optim.schedule=constant", "optim.learning_rate=1e-2"]
    words = [*words_for(inputs, tmp_path), *own, "optim.warmup_steps=2", "lora.r=4", "validation.validate_every=2"]
    whole = tmp_path / "whole"
    train([*words, f"output_dir={whole}", "testing.num_samples=2"])
    refuse_to_differ_after_a_break(words, whole, tmp_path / "broken")
    (last,) = whole.glob("checkpoints/step-000004")
    state = load_file(last / "optimizer.safetensors")
    name = next(key.removeprefix("z/") for key in state if key.startswith("z/") and "lora_B" in key)
    published = adapter_tensors(whole)[name.replace(".default.weight", ".weight")]
    assert not torch.equal(published, state[f"y/{name}"])
    torch.testing.assert_close(published, state[f"y/{name}"].lerp(state[f"z/{name}"], 1 - 1 / 0.9))
    assert len(curve(whole)) == 4
    told = json.loads(run_finetune("evaluate", whole, "--split", "validation", "--json").answer.splitlines()[-1])
    result = json.loads((whole / "run.json").read_text())["result"]
    assert told["tuned"]["loss"] == pytest.approx(result["best_loss"], rel=1e-6), (
        "validations measure what is published"
    )


def test_a_rate_that_falls_and_classes_with_a_closure_are_refused():
    with pytest.raises(ConfigError, match=r"needs a learning rate that does not fall, .* Set optim\.schedule=constant"):
        build_optimizer(layer(), OptimSection(optimizer="schedulefree.AdamWScheduleFree"))
    with pytest.raises(ConfigError, match="needs a closure"):
        resolve_optimizer("schedulefree.AdamWScheduleFreeClosure")
