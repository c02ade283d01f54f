"""Compute a loss from the nats of each target token. Preferences and rewards have such losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from finetune.engine.layout import PackedMicrobatch
from finetune.engine.loss import BY_DEVICE, BeforeHead, Choices
from finetune.engine.products import in_float64, wide_type
from finetune.engine.reference import cross_entropy_of_padded

if TYPE_CHECKING:
    from finetune.engine.microbatch import Microbatch

Result = TypeVar("Result")


def function_of_nats(
    model: torch.nn.Module,
    microbatch: Microbatch,
    function: Callable[[torch.Tensor], tuple[torch.Tensor, Result]],
    choices: Choices = BY_DEVICE,
    *,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, Result]:
    """Compute a loss that is any function of the nats of target tokens.

    `function` takes the nats of each target, row after row, float64, (num_targets,), and returns the loss, a scalar,
    and anything else. Logits are divided by `temperature`. See `summed_cross_entropy` for the other arguments.

    Returns:
        The loss, with a gradient for the model, and what else `function` returned.
    """
    if not isinstance(microbatch, PackedMicrobatch):
        return function(in_float64(cross_entropy_of_padded(model, microbatch, temperature)))
    before = BeforeHead.of(model, microbatch, choices, temperature)
    # First compute the nats, then a weighted sum of them. Its weights are the derivatives of the function.
    nats = in_float64(before.nats()).requires_grad_()
    with torch.enable_grad():
        loss, others = function(nats)
        (weights,) = torch.autograd.grad(loss, nats)
    loss = loss.detach()
    if not before.hidden.requires_grad:
        return loss, others
    weighted = _weighted_nats(before, weights)
    return loss + (weighted - weighted.detach()), others


def _weighted_nats(before: BeforeHead, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of the nats of all targets, each times its weight, (num_targets,), with a gradient."""
    of_terms = torch.zeros(len(before.rows.labels), dtype=weights.dtype, device=weights.device)
    of_terms.index_add_(0, before.rows.target_term.to(weights.device), weights)
    return before.summed(of_terms.to(before.hidden.device, wide_type(before.hidden)))
