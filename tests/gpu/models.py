"""Small models with the heads of Phi: CUDA's kernels know no heads as narrow as those of the tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Cohere2Config, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from finetune.config.schema import LoraSection
from finetune.distributed.device import Precision, convert_weights
from finetune.model.lora import add_lora
from tests.tiny import tiny_tokenizer
from tests.tiny_models import SIZES, WINDOW, build_tiny, tiny_phi3_config, tiny_phi_config
from tests.tiny_runs import MODEL_VOCABULARY, write_rows

_COMMON = {"intermediate_size": 160, "max_position_embeddings": 512, "initializer_range": 0.06}
LONGROPE_BOUNDARY = 40
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 48 for i in range(48)],
    "long_factor": [2.0 + i / 12 for i in range(48)],
    "original_max_position_embeddings": LONGROPE_BOUNDARY,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "phi-2": tiny_phi_config(**_COMMON, hidden_size=320, num_attention_heads=4),
    "phi-3": tiny_phi3_config(
        **_COMMON, hidden_size=192, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False
    ),
    "phi-4": tiny_phi3_config(
        **_COMMON, hidden_size=512, num_attention_heads=4, num_key_value_heads=1, sliding_window=None
    ),
    "phi-4-mini": tiny_phi3_config(
        **_COMMON,
        hidden_size=384,
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=None,
        rope_parameters=_LONGROPE,
        original_max_position_embeddings=LONGROPE_BOUNDARY,
    ),
    "llama": LlamaConfig(**{**SIZES, **_COMMON, "hidden_size": 256, "num_key_value_heads": 2}, attention_bias=True),
    "qwen3": Qwen3Config(
        **{**SIZES, **_COMMON, **WINDOW, "hidden_size": 256, "num_key_value_heads": 2},
        head_dim=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma-3": Gemma3TextConfig(
        **{**SIZES, **_COMMON, "hidden_size": 256, "num_key_value_heads": 1, "initializer_range": 0.02},
        head_dim=256,
        sliding_window=5,
        query_pre_attn_scalar=200,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "cohere2": Cohere2Config(
        **{**SIZES, **_COMMON, "hidden_size": 256, "num_key_value_heads": 2},
        sliding_window=5,
        logit_scale=0.5,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
"""Heads of 80, 96, 128, 128, 64, 128, 256 and 64. Some share keys; phi-3 has a window of 5 tokens, and qwen3, gemma-3
and cohere2 have one in their first layers; phi-4-mini has LongRoPE; gemma-3 scales its scores."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")


def placed(family: str, precision: Precision, device: torch.device, *, method: str = "lora", **lora: Any) -> Any:
    """A model as a run places it; its adapter does something, since its B is not zero."""
    model: Any = build_tiny(FAMILIES[family])
    if method == "lora":
        model = add_lora(model, LoraSection(r=4, **lora))
        torch.manual_seed(1)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.1)
    convert_weights(model, precision, device)
    return model.to(device).train()  # buffers too


def write_inputs(folder: Path) -> Path:
    """A base in `base/` and rows in `rows/`, for whole runs."""
    sizes = {**_COMMON, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = tiny_phi3_config(**sizes, vocab_size=MODEL_VOCABULARY, eos_token_id=320)
    build_tiny(config).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    write_rows(folder / "rows")
    return folder
