"""A base in fp8 (`model.frozen_precision=fp8`): runs, refusals, and the error that is measured before step 1."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import load_config
from finetune.cli.overrides import train_from_overrides
from finetune.diagnose.plan_devices import find_device, read_device
from finetune.diagnose.planner import make_plan
from finetune.distributed.device import convert_weights
from finetune.engine.adapted import Fp8Linear
from finetune.engine.supported import called_layers, unsupported_reason
from finetune.errors import ConfigError
from finetune.model.base import build_base_model, count_parameters
from finetune.model.quantized import refuse_where_fp8_is_impossible, round_frozen_layers
from finetune.training.low_precision import GRADIENT_LIMIT, LowPrecisionError, loss_limit
from finetune.training.memory.forecast import WHOLE, Weights, copy_without_data
from finetune.training.train import train as train_as_configured
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY, write_rows
from tests.tiny_training import losses, record, refuse_to_differ_after_a_break, train, words_for

SIZES = {
    "vocab_size": MODEL_VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "initializer_range": 0.05,
    "eos_token_id": 320,
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    build_tiny(tiny_phi3_config(**SIZES)).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    write_rows(folder / "rows")
    return folder


@pytest.fixture
def words(inputs, tmp_path):
    own = ["lora.r=4", "optim.learning_rate=1e-2", "training.precision=bf16", "model.frozen_precision=fp8"]
    return [*words_for(inputs, tmp_path / "run"), *own]


# --- runs ---------------------------------------------------------------------------------------------------------


def test_the_curve_is_near_that_of_bf16_and_the_error_is_recorded(words, tmp_path):
    trainer = train(words)
    run = tmp_path / "run"
    train([*words, "model.frozen_precision=auto", f"output_dir={tmp_path / 'bf16'}"])
    measured = LowPrecisionError(**record(run)["low_precision"])
    assert record(tmp_path / "bf16")["low_precision"] is None
    assert (measured.num_layers, measured.num_targets) == (8, 135), "4 layers in 2 decoder layers; all rows are short"
    assert measured.loss == pytest.approx(measured.base_loss, abs=measured.loss_limit)
    assert 0.005 < measured.gradient_error < measured.gradient_limit, "it is fp8, and no coarser"
    assert losses(run) == pytest.approx(losses(tmp_path / "bf16"), abs=measured.loss_limit)
    assert losses(run) != losses(tmp_path / "bf16")
    assert losses(run)[-1] < losses(run)[0]
    assert record(run)["fallbacks"] == []
    assert "8 frozen linear layers are in fp8: over 135 target tokens, the loss is" in (run / "log.txt").read_text()
    rounded = [module.weight for module in trainer.model.modules() if isinstance(module, Fp8Linear)]
    assert [weight.dtype for weight in rounded] == [torch.float8_e4m3fn] * 8
    assert {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad} == {torch.float32}
    others = {weight.dtype for name, weight in trainer.model.named_parameters() if "embed" in name or "norm" in name}
    assert others == {torch.bfloat16}


@pytest.mark.slow
def test_fp8_in_the_upper_half_of_the_layers_changes_less(words, tmp_path):
    words = [*words, "training.max_steps=1"]
    train(words)
    trainer = train([*words, "model.fp8_layers=upper_half", f"output_dir={tmp_path / 'half'}"])
    rounded = [name for name, module in trainer.model.named_modules() if isinstance(module, Fp8Linear)]
    assert len(rounded) == 4
    assert all("layers.1." in name for name in rounded)
    everything, half = (LowPrecisionError(**record(tmp_path / run)["low_precision"]) for run in ("run", "half"))
    assert (half.precision, half.num_layers) == ("fp8", 4)
    assert half.base_loss == everything.base_loss
    assert half.gradient_error < everything.gradient_error


@pytest.mark.slow
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(words, tmp_path):
    words, whole = [*words, "lora.dropout=0.1"], tmp_path / "whole"
    train([*words, f"output_dir={whole}"])
    refuse_to_differ_after_a_break(words, whole, tmp_path / "run")
    assert record(tmp_path / "run")["low_precision"] == record(whole)["low_precision"]
    with pytest.raises(Exception, match=r"model\.frozen_precision"):
        train([*words, "model.frozen_precision=auto"])


@pytest.mark.slow
def test_a_row_is_rounded_alone_whatever_rows_are_beside_it(words, tmp_path):
    """Its scale is that of its token, so the split into micro-batches changes no more than in bf16."""
    train([*words, "training.max_steps=1"])
    split = ["training.batch_size=8", "training.share_prefixes=false", "training.packing=false"]
    train([*words, "training.max_steps=1", *split, f"output_dir={tmp_path / 'other'}"])
    (ours,), (other,) = losses(tmp_path / "run"), losses(tmp_path / "other")
    assert ours == pytest.approx(other, rel=4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.slow
def test_preferences_train_on_fp8_and_their_reference_is_the_base_in_fp8(words, tmp_path):
    """An untrained adapter is its reference exactly, so the first loss is that of the paper: log 2."""
    (tmp_path / "rows").mkdir()
    for split, count in (("train", 8), ("validation", 2)):
        answers = {"chosen": "yes yes", "rejected": "no"}
        rows = [{"prompt": f"{split} {number}: three crates?", **answers} for number in range(count)]
        (tmp_path / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"data.path={tmp_path / 'rows'}", "task=finetune_preferences", "optim.warmup_steps=0"]
    train_from_overrides([*words, *own])
    assert losses(tmp_path / "run")[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    assert record(tmp_path / "run")["low_precision"]["num_targets"] > 8


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        (["training.method=full"], r"training\.method=full has no frozen weights"),
        (["lora.quantize=nf4"], r"lora\.quantize=nf4 keeps the base in 4 bits"),
        (["lora.dora=true"], r"lora\.dora=true computes with the base's weights"),
        (["parallel.sharding=fsdp2"], r"parallel\.sharding=fsdp2 does not shard weights in fp8"),
        (["training.kernels=reference"], r"training\.kernels=reference has no products in fp8"),
    ],
)
def test_what_fp8_does_not_go_with_is_refused_by_name(words, own, reason):
    config = load_config([*words, *own])
    with pytest.raises(ConfigError, match=rf"model\.frozen_precision=fp8 \(overrides\) is not possible.*{reason}"):
        refuse_where_fp8_is_impossible(config, precision="bf16", device=CPU)
    assert refuse_where_fp8_is_impossible(load_config(words), precision="bf16", device=CPU) is None


def test_another_precision_is_refused_before_anything_is_read(words):
    wanted = [*words, "model.path=nobody/has-this-model", "training.precision=fp32", "lora.dora=true"]
    with pytest.raises(ConfigError, match=r"lora\.dora=true.*; the run computes in fp32, and a base in fp8 needs"):
        train_as_configured(load_config(wanted))


def test_a_model_that_the_engine_does_not_compute_is_refused(words):
    with pytest.raises(ConfigError, match=r"fp8 .* needs the engine, which does not compute this model: .*noise"):
        train([*words, "training.neftune_alpha=5"])


def test_layers_of_other_sizes_stay_in_bf16_and_are_named(words, tmp_path):
    base = tmp_path / "narrow"
    build_tiny(tiny_phi3_config(**{**SIZES, "intermediate_size": 40})).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    words = [*words, f"model.path={base}", "training.max_steps=1"]
    train(words)
    assert record(tmp_path / "run")["low_precision"]["num_layers"] == 6, (
        "down_proj has 40 inputs, but gate_up_proj 80 outputs"
    )
    [taken] = record(tmp_path / "run")["fallbacks"]
    assert taken["what"] == "model.frozen_precision"
    assert taken["why"].endswith("not multiples of 16: layers.0.mlp.down_proj, layers.1.mlp.down_proj")
    with pytest.raises(ConfigError, match=r"wanted all frozen linear layers in fp8.*strict"):
        train([*words, "strict=true", f"output_dir={tmp_path / 'strict'}"])
    build_tiny(tiny_phi3_config(**{**SIZES, "hidden_size": 40})).save_pretrained(base)
    with pytest.raises(ConfigError, match="rounds nothing here: 8 linear layers have sizes or heads"):
        train([*words, f"output_dir={tmp_path / 'odd'}"])


def wide_weights(base: Path, folder: Path, factor: float) -> Path:
    """The same function in bf16: a column that meets only zeros is larger than the others by this factor."""
    shutil.copytree(base, folder)
    model = build_base_model(load_config([f"model.path={base}", "data=orders"]).model)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, projection in (
                (layer.input_layernorm, layer.self_attn.qkv_proj),
                (layer.post_attention_layernorm, layer.mlp.gate_up_proj),
            ):
                norm.weight[0] = 0
                projection.weight[:, 0] = factor * projection.weight.abs().max()
    model.save_pretrained(folder)
    return folder


def test_weights_that_span_more_than_fp8_holds_are_refused_before_step_1(words, inputs, tmp_path):
    """Beside the large column, the others are rounded to zero. e4m3 spans 2^18, and bf16 2^256."""
    own = [*words, f"model.path={wide_weights(inputs / 'base', tmp_path / 'base', 2.0**20)}", "training.max_steps=1"]
    with pytest.raises(ConfigError, match=r"this model too much: over 135 .*Set model\.frozen_precision=auto"):
        train(own)
    assert record(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_limits_refuse_each_alone_and_what_is_not_a_number():
    def is_accepted(**changes: float) -> bool:
        near: dict[str, Any] = {"precision": "fp8", "base_loss": 2.0, "loss": 2.1, "gradient_error": 0.1}
        return LowPrecisionError(
            num_layers=1, num_targets=9, loss_limit=loss_limit(2.0), **{**near, **changes}
        ).is_accepted

    assert is_accepted()
    assert is_accepted(loss=2.25, gradient_error=GRADIENT_LIMIT)
    assert not is_accepted(loss=2.2501)
    assert not is_accepted(loss=1.7499)
    assert not is_accepted(gradient_error=GRADIENT_LIMIT + 1e-6)
    assert not is_accepted(loss=math.nan)
    assert not is_accepted(gradient_error=math.nan)
    assert loss_limit(0.01) == 2**-3


# --- layers and plans ---------------------------------------------------------------------------------------------


def test_layers_are_rounded_the_same_every_time_and_the_engine_reads_them():
    def rounded(device: str = "cpu") -> Any:
        with torch.device(device):
            model = build_tiny(tiny_phi3_config(**SIZES)).requires_grad_(False)
        convert_weights(model, "bf16")
        assert len(round_frozen_layers(model).rounded) == 8
        return model

    one, other = rounded(), rounded()
    assert unsupported_reason(one) is None
    assert called_layers(one) == {}
    assert count_parameters(one) == count_parameters(build_tiny(tiny_phi3_config(**SIZES)).requires_grad_(False))
    pairs = [(a, b) for a, b in zip(one.modules(), other.modules(), strict=True) if isinstance(a, Fp8Linear)]
    assert len(pairs) == 8
    for a, b in pairs:
        assert torch.equal(a.weight.view(torch.uint8), b.weight.view(torch.uint8))
        assert torch.equal(a.row_scale, b.row_scale)
    assert Weights(copy_without_data(one)).held(WHOLE) == Weights(one).held(WHOLE)


@pytest.mark.slow
def test_a_plan_counts_a_byte_for_a_weight_and_four_for_an_output(words):
    words = [*words, "training.gradient_checkpointing=false"]
    wishes = {"auto": ["model.frozen_precision=auto"], "fp8": [], "half": ["model.fp8_layers=upper_half"]}
    device = read_device("H100 80GB")
    plans = {name: make_plan(load_config([*words, *own]), device) for name, own in wishes.items()}
    layers = 2 * [(128, 64), (64, 64), (96, 64), (64, 48)]
    saved = sum(out * inside - 4 * out for out, inside in layers)
    assert plans["auto"].peak.parts["weights"] - plans["fp8"].peak.parts["weights"] == saved
    assert plans["auto"].peak.parts["weights"] - plans["half"].peak.parts["weights"] == saved / 2
    assert plans["auto"].trainable_parameters == plans["fp8"].trainable_parameters
    assert plans["auto"].parameters == plans["fp8"].parameters
    with pytest.raises(ConfigError, match="the run computes in fp32"):
        make_plan(load_config([*words, "training.precision=auto"]), find_device("cpu"))
