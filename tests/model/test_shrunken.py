"""Tiny models of any class: of the same layers, and with weights that all matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, Phi3Config

from finetune.model.base import longrope_boundary
from finetune.model.shrunken import VOCABULARY, WINDOW, random_model, shrunken_config

KEPT = ("model_type", "tie_word_embeddings", "hidden_act", "attention_bias", "final_logit_softcapping")
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 24 + [1.5] * 24,
    "long_factor": [2.0] * 48,
}
LONG = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_parameters": LONGROPE}
CONFIGS = {
    "gemma3": AutoConfig.for_model("gemma3_text", num_attention_heads=4, num_key_value_heads=1, hidden_size=1152),
    "qwen3": AutoConfig.for_model("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8),
    "smollm3": AutoConfig.for_model("smollm3", sliding_window=4096, use_sliding_window=True),
    "ministral3": AutoConfig.for_model("ministral3"),
    "granite": AutoConfig.for_model("granite", attention_multiplier=1 / 128, logits_scaling=8.0, attention_bias=True),
    "longrope": Phi3Config(**LONG, num_key_value_heads=8),
    "longrope by type": AutoConfig.for_model(
        "gemma3_text",
        max_position_embeddings=131072,
        rope_parameters={
            "full_attention": {**LONGROPE, "original_max_position_embeddings": 4096},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3_moe": AutoConfig.for_model("qwen3_moe"),
    "gpt2": AutoConfig.for_model("gpt2"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shrunken_model_has_the_same_layers_and_each_weight_matters(name: str) -> None:
    real = CONFIGS[name]
    tiny: Any = shrunken_config(real)
    assert type(tiny) is type(real)
    for key in KEPT:
        assert getattr(tiny, key, None) == getattr(real, key, None), key
    for key in ("layer_types", "no_rope_layers"):
        assert set(getattr(tiny, key, None) or ()) == set(getattr(real, key, None) or ()), key
    assert is_wide(tiny) == is_wide(real)
    model = random_model(tiny)
    rows = torch.randint(3, VOCABULARY, (8, 4 * WINDOW), generator=torch.Generator().manual_seed(0))
    model(input_ids=rows, labels=rows).loss.backward()
    assert sum(weight.numel() for weight in model.parameters()) < 1e6
    no_gradient = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert no_gradient == []
    assert all(bool((weight != 1).all() and (weight != 0).all()) for weight in model.parameters())
    assert torch.equal(next(random_model(tiny).parameters()), next(model.parameters()))


def is_wide(config: Any) -> tuple[bool, bool]:
    """Whether the queries together are wider, and whether they are narrower, than the hidden states."""
    width = (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads) * (
        config.num_attention_heads
    )
    return width > config.hidden_size, width < config.hidden_size


def test_scales_windows_and_rotary_positions_are_shrunk_with_the_heads() -> None:
    tiny: dict[str, Any] = {name: shrunken_config(config) for name, config in CONFIGS.items()}
    assert tiny["granite"].attention_multiplier == 1 / 16
    assert tiny["granite"].logits_scaling == 8.0
    assert tiny["gemma3"].query_pre_attn_scalar == tiny["gemma3"].head_dim == 8
    assert tiny["gemma3"].rope_parameters == CONFIGS["gemma3"].rope_parameters
    assert tiny["gemma3"].sliding_window == WINDOW
    assert (tiny["longrope"].original_max_position_embeddings, tiny["longrope"].max_position_embeddings) == (16, 512)
    assert tiny["longrope"].rope_parameters["short_factor"] == [1.0] * 4 + [1.5] * 4
    near = shrunken_config(Phi3Config(**{**LONG, "max_position_embeddings": 8192}, num_key_value_heads=8))
    assert (near.max_position_embeddings, near.rope_parameters["factor"]) == (512, 2)
    by_type = tiny["longrope by type"]
    assert longrope_boundary(by_type) == 16
    assert by_type.max_position_embeddings == 512
    assert len(by_type.rope_parameters["full_attention"]["long_factor"]) == by_type.head_dim // 2
    assert tiny["ministral3"].rope_parameters["original_max_position_embeddings"] == 16
    assert tiny["ministral3"].rope_parameters["factor"] == 16.0
