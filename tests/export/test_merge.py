"""The arithmetic of a merge: every kind of adapter, tied embeddings, and the types weights are stored in."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from finetune.errors import ModelError, RunFailedError
from finetune.export.merge import _type_to_store, cast_weights, is_tied, merge_adapter, refuse_far
from finetune.export.plain_reload import logits_in_fp32
from finetune.export.vectors import compare_logits, relative_by_position
from tests.export.finished_runs import TARGETS, add_drawn_adapter, build_base
from tests.tiny_models import build_tiny, tiny_phi3_config

PROMPTS = [[5, 9, 200, 31], [7, 64, 64, 300, 12, 8]]
EVERY_LAYER = TARGETS["phi3"]
ADAPTERS = {
    "lora": ("phi3", {}),
    "lora on layers with biases": ("phi", {}),
    "rslora": ("phi3", {"use_rslora": True}),
    "dora": ("phi3", {"use_dora": True}),
    "other ranks for some layers": ("phi3", {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 1}}),
    "trained tokens": ("phi3", {"trainable_token_indices": {"embed_tokens": [330, 331]}}),
    "trained embeddings, tied": ("phi3", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "lora on tied embeddings": (
        "phi3",
        {"target_modules": [*EVERY_LAYER, "embed_tokens"], "ensure_weight_tying": True},
    ),
    "no linear layer": ("phi3", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
}
UNTIED_BY_PEFT = {"lora on tied embeddings", "no linear layer"}
"""On 16-bit bases peft 0.21 widens the two ends' updates each on its own: from then on they train apart."""
AGAINST_EACH_OTHER = {
    "lora on the head": {"target_modules": [*EVERY_LAYER, "lm_head"]},
    "lora on the embeddings": {"target_modules": [*EVERY_LAYER, "embed_tokens"]},
    "a trained head": {"modules_to_save": ["lm_head"]},
}


def merge_and_compare(model, dtype=None):
    """The merged model, its difference from the adapter, and how much the adapter did."""
    tuned = logits_in_fp32(model, PROMPTS)
    with model.disable_adapter():
        base = logits_in_fp32(model, PROMPTS)
    merged = merge_adapter(model, dtype)
    return merged, compare_logits(logits_in_fp32(merged, PROMPTS), tuned, base)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_model_answers_as_base_and_adapter_do(name, dtype):
    kind, settings = ADAPTERS[name]
    model = add_drawn_adapter(build_base(kind, dtype), kind, **settings)
    was_tied = kind == "phi3"
    merged, difference = merge_and_compare(model, dtype)
    assert type(merged).__module__.startswith("transformers.")
    assert difference.lost is not None, "the adapter did something"
    assert difference.lost < (1e-4 if dtype == torch.float32 else 0.2)
    assert difference.relative < (1e-5 if dtype == torch.float32 else 5e-2)
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    if dtype == torch.float32 or name not in UNTIED_BY_PEFT:
        assert is_tied(merged) is was_tied
    assert merged.config.tie_word_embeddings is is_tied(merged)
    assert not [key for key in merged.state_dict() if "lora" in key or "base_layer" in key or "original_module" in key]


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying.*:UserWarning")
@pytest.mark.parametrize("name", AGAINST_EACH_OTHER)
def test_embeddings_that_an_adapter_took_apart_are_kept_apart_and_it_is_said(name, caplog):
    """Merged into the one tensor that both are, an update of the one would change the other as well."""
    model = add_drawn_adapter(build_base(), **AGAINST_EACH_OTHER[name])
    with caplog.at_level(logging.WARNING, "finetune"):
        merged, difference = merge_and_compare(model)
    assert difference.relative < 1e-5
    assert not is_tied(merged)
    assert merged.config.tie_word_embeddings is False
    assert "keeps both" in caplog.text


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_weights_are_rounded_once_to_the_type_they_are_stored_in(dtype, most):
    model = add_drawn_adapter(build_base(dtype=dtype))
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    scaling = layer.scaling["default"]
    update = scaling * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    exact = layer.base_layer.weight.double() + update
    merged, difference = merge_and_compare(model)
    stored = merged.model.layers[1].mlp.down_proj.weight
    assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    # Sums in fp32 may fall on the other side of the middle between two neighbours, but no further.
    assert ((stored.double() - exact).abs() <= 0.501 * torch.finfo(dtype).eps * exact.abs()).all()
    assert 0 < difference.relative < most


def test_a_layer_that_the_adapter_leaves_alone_keeps_its_bits():
    base = build_base(dtype=torch.bfloat16)
    before = base.model.layers[0].mlp.down_proj.weight.clone()
    merged = merge_adapter(add_drawn_adapter(base, target_modules=["o_proj"]))
    assert torch.equal(merged.model.layers[0].mlp.down_proj.weight, before)


def test_widened_weights_keep_what_rounding_would_lose():
    """An update far below a step of bfloat16: in the base's type it is gone, in fp32 it is there."""
    small = [add_drawn_adapter(build_base(dtype=torch.bfloat16), scale=0.001, target_modules=["o_proj"]) for _ in "ab"]
    _, rounded = merge_and_compare(small[0])
    merged, wide = merge_and_compare(small[1], torch.float32)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.float32}
    assert rounded.lost > 0.5
    assert wide.lost < 1e-2
    with pytest.raises(RunFailedError, match="takes away most of what the adapter learned"):
        refuse_far(rounded, "bfloat16")
    refuse_far(wide, "float32")


def test_a_weight_out_of_range_is_refused_by_name():
    model = build_base(dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6
    with pytest.raises(RunFailedError, match=r"layers\.1\.mlp\.down_proj\.weight is not finite as float16.*--dtype"):
        cast_weights(model, torch.float16)


def test_an_adapter_that_diverged_is_refused():
    model = add_drawn_adapter(build_base())
    with torch.no_grad():
        model.base_model.model.model.layers[0].mlp.down_proj.lora_B["default"].weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"cannot be merged.*through peft"):
        merge_adapter(model)
    narrow = add_drawn_adapter(build_base(dtype=torch.float16))
    with torch.no_grad():
        narrow.base_model.model.model.layers[0].mlp.down_proj.lora_B["default"].weight[0] = 1e9
    with pytest.raises(RunFailedError, match=r"down_proj\.weight is not finite as float16 after the merge"):
        merge_adapter(narrow)


def test_the_type_to_store_is_the_base_s_and_not_that_of_a_large_adapter():
    assert _type_to_store(add_drawn_adapter(build_base(dtype=torch.bfloat16), r=512), None) == torch.bfloat16


def test_a_difference_past_the_bound_is_refused_with_figures():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    near, far = compare_logits(logits + 1e-6 * logits, logits, None), compare_logits(logits.flip(0), logits, None)
    refuse_far(near, "float32")
    refuse_far(far, "float32", most=3.0)
    with pytest.raises(RunFailedError, match=r"relative difference of at most 0\.125 .* bfloat16"):
        refuse_far(far, "bfloat16")
    assert far.lost is None
    assert far.same_greedy < 1.0
    with pytest.raises(RunFailedError, match="does not answer like base and adapter"):
        refuse_far(compare_logits(logits * math.nan, logits, None), "bfloat16")
    one_row = logits.clone()
    one_row[2, one_row[2].topk(2).indices[1]] = one_row[2].min() - 3.0  # now the least likely token
    found = compare_logits(one_row, logits, None)
    assert (found.same_greedy, found.num_positions) == (1.0, 6)
    assert found.most_relative == float(relative_by_position(one_row, logits)[2]) > 0


def test_a_shift_of_all_logits_of_a_position_is_no_difference():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    difference = compare_logits(logits + 3.0, logits, None)
    assert difference.relative < 1e-6
    assert difference.max_abs == pytest.approx(3.0, abs=1e-5)


def test_narrow_weights_are_computed_with_in_fp32_and_left_as_they_were():
    model = build_tiny(tiny_phi3_config(vocab_size=336), dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ours = logits_in_fp32(model, PROMPTS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert is_tied(model)
    wide = model.float()
    theirs = torch.cat([wide(torch.tensor([ids])).logits[0] for ids in PROMPTS])
    assert torch.allclose(ours, theirs, atol=1e-6)
