"""Rotary position embeddings on the heads of a fused projection. The backward pass rotates by the negative angle."""

from __future__ import annotations

from typing import Any

import torch


def split_heads(
    projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: list[int], num_rotated: int
) -> tuple[torch.Tensor, ...]:
    """Split a projection into groups of heads and rotate the first groups.

    Args:
        projected: (tokens, sum(heads) * head_dim).
        cos: (tokens, rotary_dim); the part of head_dim beyond rotary_dim is not rotated.
        sin: like cos.
        heads: the number of heads in each group, for example queries, keys, values.
        num_rotated: the number of groups to rotate, from the left.

    Returns:
        For each group (tokens, heads, head_dim), contiguous.
    """
    groups: tuple[torch.Tensor, ...] = _SplitHeads.apply(projected, cos, sin, heads, num_rotated)  # type: ignore[no-untyped-call]
    return groups


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: list[int],
        num_rotated: int,
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.num_rotated = heads, num_rotated
        x = projected.view(len(projected), sum(heads), projected.shape[1] // sum(heads))
        groups = tuple(x.new_empty(len(x), count, x.shape[-1]) for count in heads)
        for index, (source, group) in enumerate(zip(torch.split(x, heads, dim=1), groups, strict=True)):
            if index < num_rotated:
                _rotate(source, cos, sin, group)
            else:
                group.copy_(source)
        return groups

    @staticmethod
    def backward(ctx: Any, *d_groups: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        first = d_groups[0]
        gradient = first.new_empty(len(first), sum(ctx.heads), first.shape[-1])
        for index, (target, group) in enumerate(zip(torch.split(gradient, ctx.heads, dim=1), d_groups, strict=True)):
            if index < ctx.num_rotated:
                _rotate(group, cos, sin, target, back=True)
            else:
                target.copy_(group)
        return gradient.flatten(1), None, None, None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor, *, back: bool = False) -> None:
    """Rotate the pairs (x[i], x[i + rotary_dim / 2]) of each head, or back."""
    half = cos.shape[-1] // 2
    (cos1, cos2), (sin1, sin2) = (torch.split(angle.unsqueeze(1), half, dim=-1) for angle in (cos, sin))
    (x1, x2, rest), (out1, out2, out_rest) = (tensor.tensor_split((half, 2 * half), dim=-1) for tensor in (x, out))
    out_rest.copy_(rest)
    torch.mul(x1, cos1, out=out1)
    torch.mul(x2, cos2, out=out2)
    if back:
        out1.addcmul_(x2, sin2)
        out2.addcmul_(x1, sin1, value=-1)
    else:
        out1.addcmul_(x2, sin1, value=-1)
        out2.addcmul_(x1, sin2)
