"""The gated feed-forward part of a decoder layer as one function.

It computes `h + down(act(gate) * up)`, where gate and up are projections of `rms_norm(h)`, in chunks of tokens,
so that the values between two matrix products stay in the cache. It keeps only h and the output of the first product,
since norm and activation are cheaper to recompute than to keep. Some models have no norm here, or add h later.
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
_GELU = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}
"""torch's argument `approximate` for each GELU, by the name that transformers gives the activation."""
ACTIVATIONS = ("silu", *_GELU)
"""The activations of a gate, by their names in transformers."""


def gated_mlp(
    h: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    gate_up: Sequence[Linear],
    down: Linear,
    chunk_rows: int | None = None,
    *,
    activation: str = "silu",
    adds_input: bool = True,
) -> torch.Tensor:
    """Compute the gated feed-forward part, and add it to the residual stream.

    Args:
        h: (tokens, hidden).
        weight: (hidden,), of the preceding norm; None if there is none.
        eps: of the preceding norm.
        gate_up: one layer with the gate's columns left and the other columns right, or two layers.
        down: the projection back to (tokens, hidden).
        chunk_rows: rows of a chunk; None: `CHUNK_ROWS` of the device.
        activation: of the gate, one of `ACTIVATIONS`.
        adds_input: whether h is added to the result.
    """
    chunk_rows = chunk_rows or CHUNK_ROWS.get(h.device.type, CHUNK_ROWS["cuda"])
    form = _Form(eps, activation, adds_input, chunk_rows)
    if not torch.is_grad_enabled():
        return _joined([chunk.output for chunk in _forward(h, weight, form, gate_up, down)])
    result: torch.Tensor = _GatedMlp.apply(h, weight, form, *flatten([down, *gate_up]))  # type: ignore[no-untyped-call]
    return result


class _Form(NamedTuple):
    """The arguments of `gated_mlp` that are not tensors."""

    eps: float
    activation: str
    adds_input: bool
    chunk_rows: int


class _Chunk(NamedTuple):
    """The result of the forward pass for some rows, and what the backward pass needs of it."""

    output: torch.Tensor
    gate_up: torch.Tensor
    inverse_rms: torch.Tensor | None


def _forward(
    h: torch.Tensor, weight: torch.Tensor | None, form: _Form, gate_up: Sequence[Linear], down: Linear
) -> Iterator[_Chunk]:
    (folded_down,), folded = fold_adapters([down], h), fold_adapters(gate_up, h)
    for rows in _chunks(h, form.chunk_rows):
        x, inverse_rms = h[rows], None
        if weight is not None:
            x, inverse_rms = norm.normalized_with_statistics(x, weight, form.eps)
        hidden = apply_linears(x, folded, rows)
        residual = h[rows] if form.adds_input else None
        gated = _gated(hidden, form.activation)
        yield _Chunk(apply_linears(gated, [folded_down], rows, residual=residual), hidden, inverse_rms)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor | None, form: _Form, *parts: Any) -> torch.Tensor:
        layers = unflatten(parts)
        ctx.form = form
        down, *gate_up = layers
        outputs, hidden, statistics = zip(*_forward(h, weight, form, gate_up, down), strict=True)
        save_for_backward(ctx, layers, h, weight, None if weight is None else _joined(statistics), *hidden)
        return _joined(outputs)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        layers, (h, weight, inverse_rms, *hidden) = saved(ctx)
        down, *gate_up = layers
        wants_h, wants_weight, _, *needs_gradient = ctx.needs_input_grad
        down_gradients = LinearGradients([down], needs_gradient[:PARTS], h)
        gate_up_gradients = LinearGradients(gate_up, needs_gradient[PARTS:], h)
        dweight, dh = None, []
        for rows, gate_up_rows in zip(_chunks(h, ctx.form.chunk_rows), hidden, strict=True):
            d_gated = down_gradients.propagate(dy[rows], rows)
            d_hidden, gated = _gated_gradient(gate_up_rows, d_gated, ctx.form.activation)
            down_gradients.add(dy[rows], gated, rows)
            dx = gate_up_gradients.propagate(d_hidden, rows)
            residual = dy[rows] if ctx.form.adds_input else None
            if weight is None:
                dh_rows, x = dx if residual is None else dx + residual, h[rows]
            else:
                dh_rows, x = norm.input_gradient(dx, h[rows], weight, inverse_rms[rows], residual)
            gate_up_gradients.add(d_hidden, x, rows)
            dh.append(dh_rows)
            if wants_weight:
                chunk_dweight = norm.weight_gradient(dx, h[rows], inverse_rms[rows])
                dweight = chunk_dweight if dweight is None else dweight.add_(chunk_dweight)
        return (
            _joined(dh) if wants_h else None,
            None if dweight is None else dweight.to(weight.dtype),
            None,
            *down_gradients.flatten(),
            *gate_up_gradients.flatten(),
        )


def activated(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """Apply one of `ACTIVATIONS`."""
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate=_GELU[activation])


@fused(launches=1)
def _gated(gate_up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """Compute `act(gate) * up` from (rows, 2 * features), with the gate left, to (rows, features)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activated(gate, activation).mul_(up)


def _gated_gradient_without_out(
    gate_up: torch.Tensor, dy: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `_gated_gradient` by whole tensors, since torch.compile cannot write into a view."""
    gate, up = gate_up.chunk(2, dim=-1)
    act = activated(gate, activation)
    if activation == "silu":
        d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    else:
        d_gate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=_GELU[activation])
    return torch.cat([d_gate, dy * act], dim=-1), act * up


@fused(launches=1, compiled=_gated_gradient_without_out)
def _gated_gradient(gate_up: torch.Tensor, dy: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of `gate_up`, and once more what `_gated` computes."""
    gate, up = gate_up.chunk(2, dim=-1)
    act = activated(gate, activation)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, dim=-1)
    torch.mul(dy, act, out=d_up)
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
    else:
        torch.ops.aten.gelu_backward.grad_input(dy * up, gate, approximate=_GELU[activation], grad_input=d_gate)
    return d_gate_up, act.mul_(up)


def _joined(chunks: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def _chunks(h: torch.Tensor, num_rows: int) -> Iterator[slice]:
    """Return one or more chunks; without rows, an empty one."""
    return (slice(start, start + num_rows) for start in range(0, max(1, len(h)), num_rows))
