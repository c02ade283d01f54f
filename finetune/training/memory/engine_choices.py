"""Make the engine compute on tensors without data as it would on a device of another type."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from finetune.engine.attention import attend_in_blocks, attention, prepare_blocks
from finetune.engine.attention_cuda import attend_in_runs, prepare_varlen
from finetune.engine.layout import Layout
from finetune.engine.loss import Choices
from finetune.engine.loss_head import CHUNK_BYTES
from finetune.engine.mlp import CHUNK_ROWS


def choices_on(device_type: str, dtype: torch.dtype) -> Choices:
    """Make the engine compute as on this type of device: chunks of its size, attention with its memory.

    GPUs that compute in fp16 for want of bf16 have no flash attention either.
    """
    if device_type == "cpu":
        return Choices(attention=_cpu_attention)
    attention = partial(_gpu_attention, is_flash=dtype == torch.bfloat16)
    return Choices(
        attention=attention,
        mlp_chunk_rows=CHUNK_ROWS[device_type],
        logits_chunk_bytes=CHUNK_BYTES[device_type],
        offload=partial(
            torch.autograd.graph.saved_tensors_hooks,
            lambda tensor: (tensor.shape, tensor.dtype),
            lambda kept: torch.empty(kept[0], dtype=kept[1]),
        ),
    )


def _cpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    queries: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute only the block of queries that needs most memory.

    An operation on fake tensors takes as long as a real one, and a layer has many blocks. The memory of other blocks is
    free again, except for one number per query and head, which is less than the error of the forecast.
    """
    if not len(q):
        return attention(q, k, v, layout, queries=queries, window=window, scale=scale)
    blocks = layout.prepared(prepare_blocks, queries, window)
    heaviest = max(blocks, key=lambda block: block.last - block.first + sum(end - start for start, end in block.keys))
    return attend_in_blocks(q, k, v, [heaviest], scale or 1.0)


def _gpu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    queries: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    is_flash: bool,
) -> torch.Tensor:
    """Allocate the tensors of flash attention or of memory-efficient attention, and compute nothing."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _FusedAttention.apply(q, k, v, is_flash)  # type: ignore[no-untyped-call]
        return out

    return attend_in_runs(q, k, v, layout.prepared(prepare_varlen, queries, window), attend)


class _FusedAttention(torch.autograd.Function):
    """Keep the inputs, the output and a number for each query and head, as FlashAttention does (arXiv:2307.08691)."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_flash: bool) -> torch.Tensor:
        copies = [] if is_flash else _copies_for_each_head(q, k)
        out = torch.empty(q.shape, dtype=q.dtype)
        ctx.is_flash = is_flash
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[1], len(q), dtype=torch.float32))
        del copies
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, _, sums = ctx.saved_tensors
        inside = [torch.empty_like(sums), *_copies_for_each_head(q, k)]  # dk and dv are made for each head first
        if ctx.is_flash:
            inside.append(torch.empty(q.shape, dtype=torch.float32))  # sums of dq
        else:
            inside += _copies_for_each_head(q, k)
        gradients = torch.empty(q.shape, dtype=q.dtype), torch.empty_like(k), torch.empty_like(v)
        del inside
        return *gradients, None


def _copies_for_each_head(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
    """Allocate keys and values, or their gradients, for each head of q, where heads share them."""
    shares = k.shape[1] != q.shape[1]
    return [torch.empty(len(k), q.shape[1], q.shape[2], dtype=k.dtype) for _ in "kv"] if shares else []
