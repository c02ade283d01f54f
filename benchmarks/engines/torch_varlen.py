"""torch's own varlen attention for the models of transformers: no padding, no mask, and nothing to download."""

from __future__ import annotations

import inspect
from typing import Any

import torch

NAME = "torch_varlen"
"""As transformers knows it, once `register` was called."""


def register() -> None:
    """Let `attn_implementation` name `attend`. transformers makes no mask for it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each row of a micro-batch whose rows stand one after the other.

    Args:
        module: the layer; not used.
        query: (1, heads, tokens, head size).
        key: (1, key heads, tokens, head size).
        value: like `key`.
        attention_mask: None.
        how: from the model and the collator: `scaling`, `sliding_window`, `cu_seq_lens_q` (where each row begins, and
            the number of tokens) and `max_length_q`.

    Returns:
        (1, tokens, heads, head size), and no weights.

    Raises:
        ValueError: the collator does not say where rows begin, or the model has a sliding window.
    """
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = how.get("cu_seq_lens_q"), how.get("max_length_q")
    if edges is None or longest is None or attention_mask is not None or how.get("sliding_window") is not None:
        raise ValueError("this attention is for flattened rows (padding_free), without a sliding window")
    q, k, v = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    # Older versions of torch have no such option, and pass shared key heads on to the kernel, which knows them.
    shares_keys = k.shape[1] != q.shape[1] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if shares_keys else {}
    out: Any = varlen_attn(
        q, k, v, edges, edges, longest, longest, scale=how["scaling"], window_size=(-1, 0), **options
    )
    return out[None], None
