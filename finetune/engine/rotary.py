"""Rotary position embeddings on the heads of a fused projection. The backward pass rotates by the negative angle."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from finetune.engine.fused import fused


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
    if not torch.is_grad_enabled():
        return tuple(_split_and_rotated(projected, cos, sin, heads, num_rotated))
    groups: tuple[torch.Tensor, ...] = _SplitHeads.apply(projected, cos, sin, heads, num_rotated)  # type: ignore[no-untyped-call]
    return groups


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: list[int], num_rotated: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.num_rotated = num_rotated
        return tuple(_split_and_rotated(projected, cos, sin, heads, num_rotated))

    @staticmethod
    def backward(ctx: Any, *d_groups: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotated_back_and_joined(list(d_groups), cos, sin, ctx.num_rotated), None, None, None, None


def _split_without_out(
    projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: list[int], num_rotated: int
) -> list[torch.Tensor]:
    """Compute `_split_and_rotated` by whole tensors, since torch.compile cannot write into a view."""
    x = projected.view(projected.shape[0], sum(heads), -1)
    turn = _turns(x, cos, sin)
    groups = torch.split(x, heads, dim=1)
    return [_turned(group, *turn) if index < num_rotated else group.clone() for index, group in enumerate(groups)]


def _join_without_out(
    d_groups: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, num_rotated: int
) -> torch.Tensor:
    """Compute `_rotated_back_and_joined` by whole tensors."""
    turn = _turns(d_groups[0], cos, sin, back=True)
    turned = [_turned(group, *turn) if index < num_rotated else group for index, group in enumerate(d_groups)]
    return torch.cat(turned, dim=1).flatten(1)


def _turns(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, back: bool = False
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return half of rotary_dim, and the factors of each element, of that half further right and of that half left."""
    half, rest = cos.shape[-1] // 2, x.shape[-1] - cos.shape[-1]
    right, left = -sin[:, :half], sin[:, half:]
    if back:
        right, left = left, right
    own = functional.pad(cos, (0, rest), value=1.0)
    right, left = functional.pad(right, (0, half + rest)), functional.pad(left, (half, rest))
    return half, own.unsqueeze(1), right.unsqueeze(1), left.unsqueeze(1)


def _turned(
    x: torch.Tensor, half: int, own: torch.Tensor, of_right: torch.Tensor, of_left: torch.Tensor
) -> torch.Tensor:
    """Compute `_rotate` with the factors of `_turns`."""
    right, left = functional.pad(x[..., half:], (0, half)), functional.pad(x[..., :-half], (half, 0))
    return x * own + right * of_right + left * of_left


@fused(launches=3, compiled=_split_without_out)
def _split_and_rotated(
    projected: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: list[int], num_rotated: int
) -> list[torch.Tensor]:
    """Compute the forward pass."""
    x = projected.view(len(projected), sum(heads), projected.shape[1] // sum(heads))
    groups = [x.new_empty(len(x), count, x.shape[-1]) for count in heads]
    for index, (source, group) in enumerate(zip(torch.split(x, heads, dim=1), groups, strict=True)):
        if index < num_rotated:
            _rotate(source, cos, sin, group)
        else:
            group.copy_(source)
    return groups


@fused(launches=3, compiled=_join_without_out)
def _rotated_back_and_joined(
    d_groups: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, num_rotated: int
) -> torch.Tensor:
    """Compute the backward pass."""
    heads = [group.shape[1] for group in d_groups]
    first = d_groups[0]
    gradient = first.new_empty(len(first), sum(heads), first.shape[-1])
    for index, (target, group) in enumerate(zip(torch.split(gradient, heads, dim=1), d_groups, strict=True)):
        if index < num_rotated:
            _rotate(group, cos, sin, target, back=True)
        else:
            target.copy_(group)
    return gradient.flatten(1)


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
