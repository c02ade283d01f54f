"""Going on from an adapter that is there already, and keeping several beside each other."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune.config.schema import LoraSection
from finetune.errors import ModelError
from finetune.model.lora import add_lora
from tests.tiny_runs import write_base
from tests.tiny_training import (
    adapter_tensors,
    curve,
    logits_of,
    refuse_to_differ_after_a_break,
    train,
    words_for,
)

WORDS = ["task=finetune_lora", "lora.r=4", "lora.alpha=6", "optim.learning_rate=1e-2"]


@pytest.fixture(scope="module")
def first(inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp("first") / "run"
    return run, logits_of(train([*words_for(inputs, run), *WORDS]))


@pytest.fixture(scope="module")
def second(inputs, first, tmp_path_factory):
    run = tmp_path_factory.mktemp("second") / "run"
    words = [*words_for(inputs, run), *WORDS, f"lora.start_from={first[0]}"]
    return run, logits_of(train(words)), words


def base_of(inputs):
    return AutoModelForCausalLM.from_pretrained(inputs / "base")


def start(model, path, **keys):
    return add_lora(model, LoraSection(**{"r": 4, "alpha": 6.0, "start_from": str(path), **keys}))


def test_the_weights_are_those_of_the_adapter_and_it_is_said_what_was_read(inputs, first, caplog):
    model = base_of(inputs)
    with caplog.at_level("INFO", logger="finetune"):
        started = start(model, first[0])
    with torch.no_grad():
        assert torch.equal(started.eval()(input_ids=torch.tensor([list(range(5, 25))])).logits, first[1])
    assert f"starts from the adapter in {first[0] / 'adapter'}: 16 tensors" in caplog.text
    assert f"trained on {inputs / 'base'}" in caplog.text
    assert all(p.requires_grad for name, p in started.named_parameters() if "lora_" in name)


def test_layers_that_were_trained_whole_keep_their_fp32_on_a_base_in_16_bits(inputs, tmp_path):
    keys = {"r": 4, "alpha": 6.0, "modules_to_save": ["norm"]}
    trained = add_lora(base_of(inputs), LoraSection(**keys))
    whole = [name for name, _ in trained.named_parameters() if "norm.modules_to_save" in name]
    with torch.no_grad():
        for name in whole:
            trained.get_parameter(name).normal_()
    trained.save_pretrained(tmp_path)
    started = start(base_of(inputs).bfloat16(), tmp_path, **keys)
    assert whole
    for name in whole:
        assert torch.equal(started.get_parameter(name), trained.get_parameter(name)), name


def test_a_run_goes_on_from_the_adapter_of_another(first, second):
    """Its first step sees the rows that the first step of the other saw, and finds them learnt."""
    first_losses, second_losses = ([step["loss"] for step in curve(run)] for run in (first[0], second[0]))
    assert second_losses[0] < first_losses[0] - 0.05
    before, after = adapter_tensors(first[0]), adapter_tensors(second[0])
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(second, tmp_path):
    refuse_to_differ_after_a_break(second[2], second[0], tmp_path / "broken")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"r": 2}, r"it has lora\.r=4, lora\.alpha=6 and lora\.rslora=false, this run 2, 6 and false"),
        ({"rslora": True}, r"this run 4, 6 and true"),
        ({"dora": True}, r"it has lora\.dora=false, this run true"),
        (
            {"target_modules": ["o_proj"]},
            r"it adapts 8 layers \(.*, o_proj, .*\), this run 2 layers \(o_proj\)\. Only one of the two",
        ),
        (
            {"r": 2, "layers": [1]},
            r"this run 2, 6 and false; it adapts 8 .* this run 4 .* adapts \S*layers\.0\.\S*, for example: see lora",
        ),
        ({"modules_to_save": ["norm"]}, r"it has lora\.modules_to_save=\[\], this run \[norm\]\. Give"),
        ({"rank_pattern": {"o_proj": 3}}, r"its rank_pattern is empty, here \{'o_proj': 3\}"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_with_both_sides(inputs, first, keys, said):
    with pytest.raises(ModelError, match=said):
        start(base_of(inputs), first[0], **keys)


def test_an_adapter_of_another_base_is_refused_unless_it_is_said_to_be_the_same(inputs, first, tmp_path):
    write_base(tmp_path / "moved")
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    with pytest.raises(ModelError, match=rf"on {inputs / 'base'}, but the base here is {tmp_path / 'moved'}"):
        start(moved, first[0])
    moved = AutoModelForCausalLM.from_pretrained(tmp_path / "moved")
    started = start(moved, first[0], start_from_any_base=True)
    with torch.no_grad():
        assert torch.equal(started.eval()(input_ids=torch.tensor([list(range(5, 25))])).logits, first[1])


def test_what_holds_no_whole_adapter_is_refused(inputs, first, tmp_path):
    with pytest.raises(ModelError, match=r"holds no adapter: .*found: no such folder"):
        start(base_of(inputs), tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"found: .*config\.json"):
        start(base_of(inputs), inputs / "base")
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "adapter_config.json").write_text((first[0] / "adapter/adapter_config.json").read_text())
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        start(base_of(inputs), torn)
    (torn / "adapter_model.safetensors").write_bytes((first[0] / "adapter/adapter_model.safetensors").read_bytes())
    config = json.loads((torn / "adapter_config.json").read_text())
    (torn / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ModelError, match="its peft_type is IA3, not LORA"):
        start(base_of(inputs), torn)
    (torn / "adapter_config.json").write_text(json.dumps({**config, "trainable_token_indices": [3]}))
    with pytest.raises(ModelError, match=r"it trains the rows \[3\] of the embedding, this run None"):
        start(base_of(inputs), torn)
