"""Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290).

For a pair the loss is -log sigmoid(beta * margin), where margin is how much more the model prefers the chosen answer to
the rejected one than the reference does, in nats. The reference is the base: the same model with its adapter switched
off. Both answers are in one micro-batch, so that the engine computes their shared prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.preferences import EncodedPair
from finetune.distributed.runtime import Runtime
from finetune.engine.layout import PackedMicrobatch
from finetune.engine.loss import BY_DEVICE, Choices, before_head, cross_entropy_per_target
from finetune.engine.loss_head import head_loss_per_target, summed_head_loss
from finetune.engine.microbatch import Microbatch
from finetune.engine.reference import in_float64
from finetune.inference.losses import LossSums, in_even_rounds
from finetune.model.base import evaluation_mode


@dataclass(frozen=True, kw_only=True)
class PreferenceMicrobatch:
    """One forward over pairs: rows 2k and 2k + 1 are the chosen and the rejected answer of pair k.

    The loss is divided by the number of pairs, so pairs are its targets.
    """

    rows: Microbatch

    @property
    def num_rows(self) -> int:
        """Pairs."""
        return self.rows.num_rows // 2

    @property
    def num_targets(self) -> int:
        """Pairs."""
        return self.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides."""
        return self.rows.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens of both sides; a shared beginning counts once."""
        return self.rows.num_computed

    @property
    def input_ids(self) -> torch.Tensor:
        """Token ids of the rows, padded or packed."""
        return self.rows.input_ids

    def to(self, device: torch.device) -> PreferenceMicrobatch:
        """A copy on another device."""
        return replace(self, rows=self.rows.to(device))

    def pin_memory(self) -> PreferenceMicrobatch:
        """A copy in page-locked memory, for a loader with `pin_memory`."""
        return replace(self, rows=self.rows.pin_memory())


def put_pairs_together(pairs: Sequence[EncodedPair], *, rows: Collate) -> PreferenceMicrobatch:
    """Make a micro-batch with the sides of each pair next to each other; `rows` packs or pads them."""
    return PreferenceMicrobatch(rows=rows([side for pair in pairs for side in pair]))


FIGURES = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
"""Figures measured beside the loss, as means over pairs. A reward is beta times how much more the model prefers an
answer than the reference does, in nats; the margin is the chosen answer's reward less the rejected one's; accuracy is
the share of pairs with a margin above 0."""

_ROUNDING_NATS = 1e-4
"""Smaller margins are rounding errors. Their pairs count half, so that an untrained model has an accuracy of 1/2."""


class Outcomes(NamedTuple):
    """The values of each pair, float64, shape (pairs,)."""

    losses: torch.Tensor
    """Only the losses have a gradient."""
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    wins: torch.Tensor
    """1 where the chosen answer is preferred, 0 where the rejected one is, 1/2 where neither is."""

    def sums(self) -> torch.Tensor:
        """Return the sums over the pairs: the loss, then `FIGURES`; shape (1 + FIGURES,)."""
        margins = self.chosen_rewards - self.rejected_rewards
        each = (self.losses, self.chosen_rewards, self.rejected_rewards, margins, self.wins)
        return torch.stack([values.sum() for values in each])


def summed_preferences(
    model: Any, microbatch: PreferenceMicrobatch, *, beta: float, choices: Choices = BY_DEVICE
) -> torch.Tensor:
    """Sum the loss over the pairs of a micro-batch, with a gradient, followed by the sums of `FIGURES`; float64.

    Args:
        model: a PEFT model, in training mode.
        microbatch: on the model's device.
        beta: the weight of the penalty for moving away from the reference.
        choices: how packed rows are computed.
    """
    return measure_preferences(model, microbatch, beta=beta, choices=choices).sums()


def measure_preferences(
    model: Any, microbatch: PreferenceMicrobatch, *, beta: float, choices: Choices = BY_DEVICE
) -> Outcomes:
    """Measure each pair under the model and the reference. `EMPTY_MICROBATCH` has no pairs."""
    rows = microbatch.rows if isinstance(microbatch, PreferenceMicrobatch) else microbatch
    with evaluation_mode(model), model.disable_adapter():
        reference = _by_row(rows, in_float64(cross_entropy_per_target(model, rows, choices)))
    if isinstance(rows, PackedMicrobatch):
        losses, nats = _packed_losses(model, rows, reference, beta, choices)
    else:
        nats = _by_row(rows, in_float64(cross_entropy_per_target(model, rows)))
        losses = _losses(nats, reference, beta)
    gained = (reference - nats).detach()
    chosen, rejected = gained[0::2], gained[1::2]
    margins = chosen - rejected
    wins = torch.where(margins.abs() <= _ROUNDING_NATS, 0.5, (margins > 0).double())
    return Outcomes(losses, beta * chosen, beta * rejected, wins)


def sum_preference_losses(
    runtime: Runtime, model: Any, loader: EvaluationLoader, *, beta: float
) -> tuple[LossSums, list[float]]:
    """Add up losses and `FIGURES` of this rank's pairs, without gradients and in evaluation mode.

    Once a rank was told to stop, the evaluation is cut short and the figures are zero.
    """
    totals, figures = [0.0] * 4, [0.0] * len(FIGURES)
    each: Any = in_even_rounds(runtime, loader)  # yields `PreferenceMicrobatch`, which its type does not say
    with evaluation_mode(model):
        for microbatch in each:
            if runtime.is_anyone_told_to_stop():
                return LossSums(num_cut_short=1.0), [0.0] * len(FIGURES)
            outcomes = runtime.forward(partial(measure_preferences, beta=beta), model, microbatch)
            losses = outcomes.losses
            value, *more = outcomes.sums().tolist()
            added = (value, float(len(losses)), value, float((losses**2).sum()))
            totals = [total + one for total, one in zip(totals, added, strict=True)]
            figures = [total + one for total, one in zip(figures, more, strict=True)]
    loss, pairs, means, squares = totals
    return LossSums(loss, pairs, pairs, means, squares), figures


def _losses(nats: torch.Tensor, reference: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the loss of each pair, from the nats of each row under the model and under the reference."""
    gained = reference - nats
    return functional.softplus(-beta * (gained[0::2] - gained[1::2]))


def _packed_losses(
    model: Any, rows: PackedMicrobatch, reference: torch.Tensor, beta: float, choices: Choices
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each pair and the nats of each row, computing logits a chunk at a time.

    The values are computed first, then one weighted sum whose gradient is that of the losses.
    """
    hidden, head = before_head(model, rows, choices)
    size = choices.logits_chunk_bytes
    with torch.autocast(hidden.device.type, enabled=False):
        of_term = head_loss_per_target(hidden.detach(), head.weight, rows.labels, bias=head.bias, chunk_bytes=size)
        nats = _by_row(rows, in_float64(of_term[rows.target_term])).requires_grad_()
        with torch.enable_grad():
            losses = _losses(nats, reference, beta)
            (weights,) = torch.autograd.grad(losses.sum(), nats)
        if not hidden.requires_grad:
            return losses.detach(), nats.detach()
        of_target = weights[rows.target_row.to(weights.device)]
        of_terms = torch.zeros(len(rows.labels), dtype=of_target.dtype, device=of_target.device)
        of_terms.index_add_(0, rows.target_term.to(of_target.device), of_target)
        counts = of_terms.to(hidden.device, of_term.dtype)
        weighted = summed_head_loss(hidden, head.weight, rows.labels, bias=head.bias, counts=counts, chunk_bytes=size)
    # The weighted sum adds a gradient and no value. Any split over the pairs will do: only the sum of losses is used.
    return losses.detach() + (weighted - weighted.detach()) / len(losses), nats.detach()


def _by_row(rows: Microbatch, nats: torch.Tensor) -> torch.Tensor:
    """Sum the nats of targets by row: float64, shape (rows,)."""
    owner = rows.target_row.to(nats.device)
    return torch.zeros(rows.num_rows, dtype=torch.float64, device=nats.device).index_add(0, owner, nats)
