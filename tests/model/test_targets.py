"""Targets by inspection, in models of several families."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import (
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
)

from finetune.config.schema import LoraSection
from finetune.data.batches import pad
from finetune.engine.loss import cross_entropy_per_target
from finetune.model.lora import add_lora
from finetune.model.targets import linear_layers, resolve_targets
from tests.tiny_models import SIZES, build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config

GATED = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
GQA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[PreTrainedConfig, list[str]]] = {
    "phi": (tiny_phi_config(), ["dense", "fc1", "fc2", "k_proj", "q_proj", "v_proj"]),
    "phi3": (tiny_phi3_config(), ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]),
    "llama": (LlamaConfig(**GQA), GATED),
    "gpt2": (GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64), ["c_attn", "c_fc", "c_proj"]),
    "gpt_neox": (GPTNeoXConfig(**SIZES), ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]),
    "opt": (
        OPTConfig(vocab_size=64, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                  word_embed_proj_dim=16, max_position_embeddings=64),
        ["fc1", "fc2", "k_proj", "out_proj", "q_proj", "v_proj"],
    ),
    "mixtral": (
        MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=2),
        ["k_proj", "o_proj", "q_proj", "v_proj"],
    ),
    "falcon": (
        FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2),
        ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_causal_model_is_adapted_in_all_linear_layers_but_the_head_and_trains(kind: str) -> None:
    config, expected = FAMILIES[kind]
    base = build_tiny(config)
    assert resolve_targets(base, "auto") == expected
    head = base.get_output_embeddings()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = add_lora(base, LoraSection(r=2))
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert sorted(adapted) == sorted(f"base_model.model.{name}" for name in _names_before(linear_layers(base)))
    assert model.get_output_embeddings() is head
    cross_entropy_per_target(model, pad(list(tiny_examples(3)))).sum().backward()
    untrained = [n for n, p in model.named_parameters() if "lora_B" in n and (p.grad is None or not p.grad.any())]
    assert not untrained


def _names_before(names: list[str]) -> set[str]:
    """PEFT puts the layer that it wraps under `base_layer`, beside its own matrices."""
    return {name.removesuffix(".base_layer") for name in names if ".lora_" not in name}


def test_a_name_that_the_head_bears_too_is_given_in_full() -> None:
    base = build_tiny(LlamaConfig(**GQA))
    base.model.layers[0].mlp.lm_head = torch.nn.Linear(16, 16)
    targets = resolve_targets(base, ["lm_head"])
    assert targets == ["model.layers.0.mlp.lm_head"]
