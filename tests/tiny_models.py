"""Tiny random models and rows, equal in every run."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from finetune.data.encoded import EncodedExamples

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # large enough for the loss to depend on the context
}
PHI3_SIZES = {
    **SIZES,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}


def tiny_phi3_config(**changes: Any) -> Phi3Config:
    """Like Phi-4-mini: grouped heads, partial rotary, tied embeddings; its sliding window is shorter than the rows."""
    return Phi3Config(**{**PHI3_SIZES, **changes})


def tiny_phi_config(**changes: Any) -> PhiConfig:
    """Like Phi-2: biases everywhere, the head included, and partial rotary."""
    return PhiConfig(**{**SIZES, "partial_rotary_factor": 0.5, **changes})


def tiny_gemma2_config(**changes: Any) -> Gemma2Config:
    """A model that caps its logits in its own forward."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 4, "final_logit_softcapping": 2.0, "sliding_window": 5}
    return Gemma2Config(**{**sizes, **changes})


WIDE_HEADS = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
"""Heads that are together wider than the hidden states."""
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
LLAMA_KIN: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, attention_bias=True, sliding_window=5),
    "mistral": MistralConfig(**WIDE_HEADS, sliding_window=5),
    "qwen2": Qwen2Config(
        **{**SIZES, **WINDOW, "num_hidden_layers": 3},
        num_key_value_heads=2,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(**WIDE_HEADS, **WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "smollm3": SmolLM3Config(
        **{**SIZES, **WINDOW, "num_hidden_layers": 3}, num_key_value_heads=2, no_rope_layer_interval=2
    ),
}
"""Models with layers like Llama's. All name a window that is shorter than the rows: Llama itself has none all the same,
Mistral in all layers, Qwen2 in the last, Qwen3 in the first, SmolLM3 in that without rotation."""
_LAYERS: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_TWO_ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
VARIANTS: dict[str, PretrainedConfig] = {
    "seed_oss": SeedOssConfig(**WIDE_HEADS, attention_dropout=0.0, residual_dropout=0.0),
    "ministral": MinistralConfig(**WIDE_HEADS, **_LAYERS),
    "ministral3": Ministral3Config(
        **WIDE_HEADS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "gemma": GemmaConfig(**WIDE_HEADS, hidden_act="gelu_pytorch_tanh"),
    "gemma3_text": Gemma3TextConfig(**WIDE_HEADS, **_LAYERS, query_pre_attn_scalar=3, rope_parameters=_TWO_ROTATIONS),
    "granite": GraniteConfig(
        **SIZES,
        num_key_value_heads=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=1.5,
    ),
    "olmo2": Olmo2Config(**SIZES, num_key_value_heads=2),
    "olmo3": Olmo3Config(**SIZES, **_LAYERS, num_key_value_heads=2, rope_parameters=_TWO_ROTATIONS),
    "exaone4": Exaone4Config(**WIDE_HEADS, **_LAYERS),
    "cohere": CohereConfig(**SIZES, num_key_value_heads=2, logit_scale=0.5),
    "cohere2": Cohere2Config(**SIZES, **_LAYERS, num_key_value_heads=2, logit_scale=0.5),
}
"""Models whose layers differ from Llama's: in their norms, activation, factors, rotation, or order of parts."""


def build_tiny(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model with seeded random weights, biases and norms included."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.config.use_cache = False
    return model.to(dtype)


def tiny_examples(num_rows: int, *, seed: int = 0, shortest: int = 4, longest: int = 20) -> EncodedExamples:
    """Rows of random tokens; about half of the tokens behind the first are targets, in each row at least one."""
    rng = random.Random(seed)
    rows = []
    for _ in range(num_rows):
        length = rng.randint(shortest, longest)
        is_target = [False, *(rng.random() < 0.5 for _ in range(length - 2)), True]
        rows.append(([rng.randrange(3, VOCABULARY) for _ in range(length)], is_target))
    return EncodedExamples.from_rows(rows, end_id=2)
