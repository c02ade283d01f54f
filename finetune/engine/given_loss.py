"""Compute a loss that is a function of logits and target tokens, which a script gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils.checkpoint import checkpoint

from finetune.engine.layout import PackedMicrobatch
from finetune.engine.loss import BY_DEVICE, Choices, before_head
from finetune.engine.loss_head import chunks
from finetune.engine.products import in_float64
from finetune.engine.reference import logits_of_padded
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.engine.microbatch import Microbatch


GivenLoss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Returns the summed loss of a chunk, given fp32 logits (n, vocabulary) and the target tokens (n,)."""
_TRIED_TARGETS = 6
_MOST_DIFFERENCE = 1e-3
"""Relative: far above the rounding of fp32, and far below the difference between a sum and a mean."""


def summed_given_loss(
    model: torch.nn.Module, microbatch: Microbatch, choices: Choices = BY_DEVICE, *, function: GivenLoss
) -> torch.Tensor:
    """Sum a given loss over the micro-batch's target tokens, as a float64 scalar with a gradient.

    The logits of a chunk are computed again in the backward pass, so that only one chunk is in memory. Without targets,
    the loss and its gradient are 0, and the function is not called. See `summed_cross_entropy` for the arguments before
    `function`.

    Raises:
        ConfigError: the function does not return a sum.
    """
    if isinstance(microbatch, PackedMicrobatch):
        hidden, head = before_head(model, microbatch, choices)
        of_target = microbatch.target_term.to(hidden.device)  # rows that begin alike share positions
        hidden, labels = hidden[of_target], microbatch.labels[of_target]

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias.to(rows.dtype)
            return torch.nn.functional.linear(rows, head.weight.to(rows.dtype), bias)

        num_logits = len(head.weight)
    else:
        hidden, labels = logits_of_padded(model, microbatch)

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            return rows

        num_logits = hidden.shape[1]

    def loss_of(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = logits_of(rows).float()
        # Without targets, a mean times the number of targets would be NaN.
        return _checked(function(logits, targets)) if len(targets) else logits.sum()

    total = in_float64(hidden.new_zeros(()))
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(hidden, num_logits, choices.logits_chunk_bytes):
            total = total + in_float64(checkpoint(loss_of, hidden[rows], labels[rows], use_reentrant=False))
    return total


def refuse_no_sum(
    function: GivenLoss, num_logits: int, device: torch.device, *, of_model: Iterable[torch.Tensor] = ()
) -> None:
    """Refuse a loss that is not the sum over its target tokens, or has no gradient, on a few random logits.

    The trainer divides by the number of target tokens of the whole global batch. If the function returned a mean, the
    loss would depend on how the batch is split. It trains the weights `of_model`, and no weights of the function.

    Raises:
        ConfigError: the loss of all targets differs from the sum of the losses of two parts, is not finite, or does
            not depend on the logits, or the function fails or has weights of its own that get a gradient.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_TRIED_TARGETS, num_logits, generator=generator).to(device)
    targets = torch.randint(num_logits, (_TRIED_TARGETS,), generator=generator).to(device)
    try:
        loss = _checked(function(logits.requires_grad_().clone(), targets))  # a copy may be changed in place
    except ConfigError:
        raise
    except Exception as error:  # it is the user's own code
        raise ConfigError(
            f"the loss function failed on {_TRIED_TARGETS} random targets: {error!r}. It is called as "
            "loss(logits, targets). Correct it."
        ) from error
    total = float(loss.detach())
    if not (loss.requires_grad and math.isfinite(total)):
        raise ConfigError(
            f"the loss function returns {total:.6g} for {_TRIED_TARGETS} random targets, which has "
            f"{'no gradient' if math.isfinite(total) else 'no finite value'}. It must return the sum over the targets, "
            "computed from the logits and not detached from them."
        )
    known = {id(logits), *map(id, of_model)}
    if own := [leaf for leaf in _leaves(loss) if id(leaf) not in known]:
        raise ConfigError(
            f"the loss function has weights of its own that require a gradient, such as one of shape "
            f"{tuple(own[0].shape)}. A run trains only the weights of its model, so they would stay as they are. Train "
            "them elsewhere and call requires_grad_(False) on them."
        )
    with torch.no_grad():
        parts = [float(_checked(function(logits[rows].clone(), targets[rows]))) for rows in (slice(2), slice(2, None))]
    if not abs(total - sum(parts)) <= _MOST_DIFFERENCE * max(1.0, abs(total)):
        raise ConfigError(
            f"the loss function returns {total:.6g} for {_TRIED_TARGETS} targets, but {sum(parts):.6g} for the same "
            "targets in two parts. It must return the sum over the targets that it is given, not their mean: use "
            'reduction="sum". The trainer divides by the number of targets of the whole global batch.'
        )


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that would get a gradient in the backward pass of a loss."""
    leaves: list[torch.Tensor] = []
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [earlier for earlier, _ in node.next_functions]
            leaves += [node.variable] if type(node).__name__ == "AccumulateGrad" else []
    return leaves


def _checked(loss: torch.Tensor) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(
            f"the loss function returned {shown}; expected a tensor with one value, the sum over the targets."
        )
    return loss.reshape(())
