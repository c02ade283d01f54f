"""The gated feed-forward part of a decoder layer as one function.

It computes `h + down(silu(gate) * up)`, where gate and up are projections of `rms_norm(h)`, in chunks of tokens,
so that the values between two matrix products stay in the cache. It keeps only h and the output of the first product,
since norm and activation are cheaper to recompute than to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from finetune.engine import norm
from finetune.engine.fused import fused
from finetune.engine.linear import (
    PARTS,
    Linear,
    LinearGradients,
    apply_linears,
    flatten,
    fold_adapters,
    save_for_backward,
    saved,
    unflatten,
)

CHUNK_ROWS = {"cpu": 512, "cuda": 8192}
"""Rows of a chunk by device type: enough for fast matrix products, and few enough for the cache of a CPU."""


def gated_mlp(
    h: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gate_up: Sequence[Linear],
    down: Linear,
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Add the gated feed-forward part to the residual stream.

    Args:
        h: (tokens, hidden).
        weight: (hidden,), of the preceding norm.
        eps: of the preceding norm.
        gate_up: one layer with the gate's columns left and the other columns right, or two layers.
        down: the projection back to (tokens, hidden).
        chunk_rows: rows of a chunk; None: `CHUNK_ROWS` of the device.
    """
    chunk_rows = chunk_rows or CHUNK_ROWS.get(h.device.type, CHUNK_ROWS["cuda"])
    if not torch.is_grad_enabled():
        return _joined([chunk.output for chunk in _forward(h, weight, eps, gate_up, down, chunk_rows)])
    result: torch.Tensor = _GatedMlp.apply(h, weight, eps, chunk_rows, *flatten([down, *gate_up]))  # type: ignore[no-untyped-call]
    return result


class _Chunk(NamedTuple):
    """The result of the forward pass for some rows, and what the backward pass needs of it."""

    output: torch.Tensor
    gate_up: torch.Tensor
    inverse_rms: torch.Tensor


def _forward(
    h: torch.Tensor, weight: torch.Tensor, eps: float, gate_up: Sequence[Linear], down: Linear, chunk_rows: int
) -> Iterator[_Chunk]:
    (folded_down,), folded = fold_adapters([down], h), fold_adapters(gate_up, h)
    for rows in _chunks(h, chunk_rows):
        x, inverse_rms = norm.normalized_with_statistics(h[rows], weight, eps)
        hidden = apply_linears(x, folded, rows)
        yield _Chunk(apply_linears(_gated(hidden), [folded_down], rows, residual=h[rows]), hidden, inverse_rms)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, weight: torch.Tensor, eps: float, chunk_rows: int, *parts: Any
    ) -> torch.Tensor:
        layers = unflatten(parts)
        ctx.chunk_rows = chunk_rows
        down, *gate_up = layers
        outputs, hidden, statistics = zip(*_forward(h, weight, eps, gate_up, down, chunk_rows), strict=True)
        save_for_backward(ctx, layers, h, weight, _joined(statistics), *hidden)
        return _joined(outputs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        layers, (h, weight, inverse_rms, *hidden) = saved(ctx)
        down, *gate_up = layers
        wants_h, wants_weight, _, _, *needs_gradient = ctx.needs_input_grad
        down_gradients = LinearGradients([down], needs_gradient[:PARTS], h)
        gate_up_gradients = LinearGradients(gate_up, needs_gradient[PARTS:], h)
        dweight, dh = None, []
        for rows, gate_up_rows in zip(_chunks(h, ctx.chunk_rows), hidden, strict=True):
            d_gated = down_gradients.propagate(dy[rows], rows)
            d_hidden, gated = _gated_gradient(gate_up_rows, d_gated)
            down_gradients.add(dy[rows], gated, rows)
            dx = gate_up_gradients.propagate(d_hidden, rows)
            dh_rows, x = norm.input_gradient(dx, h[rows], weight, inverse_rms[rows], dy[rows])
            gate_up_gradients.add(d_hidden, x, rows)
            dh.append(dh_rows)
            if wants_weight:
                chunk_dweight = norm.weight_gradient(dx, h[rows], inverse_rms[rows])
                dweight = chunk_dweight if dweight is None else dweight.add_(chunk_dweight)
        return (
            _joined(dh) if wants_h else None,
            None if dweight is None else dweight.to(weight.dtype),
            None,
            None,
            *down_gradients.flatten(),
            *gate_up_gradients.flatten(),
        )


@fused(launches=1)
def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `silu(gate) * up` from (rows, 2 * features), with the gate left, to (rows, features)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _gated_gradient_without_out(gate_up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_gated_gradient` by whole tensors, since torch.compile cannot write into a view."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = functional.silu(gate)
    return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * silu], dim=-1), silu * up


@fused(launches=1, compiled=_gated_gradient_without_out)
def _gated_gradient(gate_up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of `gate_up`, and once more what `_gated` computes."""
    gate, up = gate_up.chunk(2, dim=-1)
    silu = functional.silu(gate)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, dim=-1)
    torch.mul(dy, silu, out=d_up)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
    return d_gate_up, silu.mul_(up)


def _joined(chunks: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def _chunks(h: torch.Tensor, num_rows: int) -> Iterator[slice]:
    """Return one or more chunks; without rows, an empty one."""
    return (slice(start, start + num_rows) for start in range(0, max(1, len(h)), num_rows))
