"""Compute `GroupLoss` for micro-batches of answers. The engine computes the prompt of a group once.

The reference is the base: the same model with its adapter switched off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from finetune.data.batches import Collate
from finetune.data.encoded import EncodedExample
from finetune.engine.loss import BY_DEVICE, Choices, cross_entropy_per_target, function_of_nats
from finetune.engine.microbatch import WithRows
from finetune.engine.reference import in_float64
from finetune.model.base import evaluation_mode
from finetune.training.rewards.groups import GroupLoss, GroupNats


class ScoredAnswer(NamedTuple):
    """An answer with its prompt, as a row to train on."""

    row: EncodedExample
    """Prompt and answer; the tokens of the answer are targets."""
    advantage: float
    old_nats: Sequence[float] | None = None
    """-log p of the answer's tokens under the weights that generated it; None: under the present ones."""


@dataclass(frozen=True, kw_only=True)
class GroupMicrobatch(WithRows):
    """One forward over answers.

    Attributes:
        rows: prompts with answers.
        advantages: of each row, float64, shape (rows,).
        old: see `GroupNats.old`.
        num_targets: its part of the loss's denominator (`GroupLoss.denominator`).
        per_token: a factor for sums over tokens: divided by the whole denominator, they become means over all tokens.
    """

    advantages: torch.Tensor
    old: torch.Tensor | None = None
    num_targets: int
    per_token: float = math.nan

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers; a shared prompt counts once for each answer."""
        return self.rows.num_tokens

    def to(self, device: torch.device) -> GroupMicrobatch:
        """A copy on another device."""
        return replace(self, rows=self.rows.to(device))


def put_answers_together(
    answers: Sequence[ScoredAnswer], *, rows: Collate, num_targets: int, per_token: float = math.nan
) -> GroupMicrobatch:
    """Make a micro-batch of answers, at least one; `rows` packs or pads them."""
    old = [nats for answer in answers for nats in answer.old_nats or ()]
    return GroupMicrobatch(
        rows=rows([answer.row for answer in answers]),
        advantages=torch.tensor([answer.advantage for answer in answers], dtype=torch.float64),
        old=torch.tensor(old, dtype=torch.float64) if old else None,
        num_targets=num_targets,
        per_token=per_token,
    )


def summed_group_loss(
    model: Any, microbatch: Any, *, loss: GroupLoss, temperature: float, choices: Choices = BY_DEVICE
) -> torch.Tensor:
    """Sum the loss over a micro-batch, with a gradient, followed by the sums of its metrics; float64.

    Args:
        model: in training mode; a PEFT model if the loss has a reference.
        microbatch: on the model's device; plain rows count as answers with an advantage of 1.
        loss: with its settings.
        temperature: of the sampling.
        choices: how packed rows are computed.
    """
    answers = _as_answers(microbatch)
    reference = None
    if loss.section.beta:
        with evaluation_mode(model), model.disable_adapter():
            reference = nats_of_tokens(model, answers, temperature=temperature, choices=choices)

    def summed(nats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = nats.device
        old = None if answers.old is None else answers.old.to(here)
        return loss(GroupNats(nats, old, reference, answers.rows.target_row.to(here), answers.advantages.to(here)))

    total, metrics = function_of_nats(model, answers.rows, summed, choices, temperature=temperature)
    return torch.cat([total[None], metrics * answers.per_token])


def nats_of_tokens(model: Any, microbatch: Any, *, temperature: float, choices: Choices = BY_DEVICE) -> torch.Tensor:
    """Return -log p of each token of the answers, answer after answer, float64, without a gradient."""
    with torch.no_grad():
        rows = _as_answers(microbatch).rows
        return in_float64(cross_entropy_per_target(model, rows, choices, temperature=temperature))


def _as_answers(microbatch: Any) -> GroupMicrobatch:
    if isinstance(microbatch, GroupMicrobatch):
        return microbatch
    advantages = torch.ones(microbatch.num_rows, dtype=torch.float64)
    # Of rows without answers all sums are 0. Times nan they would hide the metrics of other ranks.
    return GroupMicrobatch(rows=microbatch, advantages=advantages, num_targets=microbatch.num_targets, per_token=0.0)
