"""Root-mean-square norm with statistics in fp32. It keeps its input and one number per row for the backward pass."""

from __future__ import annotations

from typing import Any

import torch

from finetune.engine.fused import fused
from finetune.engine.products import wide_type


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `weight * (x / rms(x))` over the last dimension, rounded where the Llama family rounds.

    Args:
        x: (rows, features), or (rows, heads, features).
        weight: (features,), frozen or trained.
        eps: added to the mean square.
    """
    if not torch.is_grad_enabled():
        return normalized_with_statistics(x, weight, eps)[0]
    result: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return result


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y, inverse_rms = normalized_with_statistics(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight, inverse_rms = ctx.saved_tensors
        dx = input_gradient(dy, x, weight, inverse_rms)[0] if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(dy, x, inverse_rms).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


@fused(launches=1)
def normalized_with_statistics(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the forward pass, and the inverse root mean square of each row, (rows, 1), in fp32 or better."""
    inverse_rms: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide_type(x))
    inverse_rms = inverse_rms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return _normalized(x, weight, inverse_rms), inverse_rms


@fused(launches=1)
def normalized(x: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Compute the forward pass, given the statistics."""
    return _normalized(x, weight, inverse_rms)


def _normalized(x: torch.Tensor, weight: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    return (x * inverse_rms).to(x.dtype).mul_(weight)


@fused(launches=1)
def input_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    inverse_rms: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `r * g - x * r³ * mean(g * x) + residual`, and the forward pass once more.

    Here `g = weight * dy`, and r is the inverse root mean square.
    """
    g = dy.to(wide_type(x)) * weight
    mean = (g * x).mean(-1, keepdim=True)
    dx = g.mul_(inverse_rms).addcmul_(x, mean.mul_(inverse_rms**3), value=-1).to(x.dtype)
    return dx if residual is None else dx.add_(residual), _normalized(x, weight, inverse_rms)


def weight_gradient(dy: torch.Tensor, x: torch.Tensor, inverse_rms: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weight, (features,), in fp32 or better."""
    gradient: torch.Tensor = (x * inverse_rms).mul_(dy).flatten(0, -2).sum(0)
    return gradient
