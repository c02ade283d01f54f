"""The losses that prefer one answer to another, as functions of the log-probabilities of answers.

DPO: Rafailov et al., 2023, arXiv:2305.18290, equation 7. KTO: Ethayarajh et al., 2024, arXiv:2402.01306, equations 7
and 8. ORPO: Hong et al., 2024, arXiv:2403.07691, equations 6 and 7. SimPO: Meng et al., 2024, arXiv:2405.14734,
equation 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from finetune.config.objectives import OBJECTIVES, ObjectiveFacts

if TYPE_CHECKING:
    from finetune.config.schema import PreferenceSection

METRICS = ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy")
"""Metrics measured beside the loss, as means over pairs. A reward is beta times the score of an answer: how much more
the model prefers it than the reference does, in nats; without a reference, its mean log-probability per token. The
margin is the chosen answer's reward less the rejected one's; accuracy is the share of pairs with a margin above 0. For
labelled answers, the chosen ones are the good ones. The accuracy is the share of rewards on the right side of KL."""
KTO_METRICS = (*METRICS, "kl")
"""`kl`: how far the model has moved from the reference, in nats, over the whole global batch."""

_ROUNDING_NATS = 1e-4
"""Smaller margins are rounding errors. Their pairs count half, so that an untrained model has an accuracy of 1/2."""
_CERTAIN = -(2.0**-40)
"""The highest log-probability whose odds are finite."""


class GlobalSums(NamedTuple):
    """Sums over a whole global batch, or a validation split, that losses take besides their own rows."""

    num_rows: float = 0.0
    """Pairs, or labelled answers."""
    num_read: float = 0.0
    """Tokens of chosen answers and their prompts, without the first of each."""
    num_good: float = 0.0
    """Answers that are labelled good."""
    gained: float = 0.0
    """How much more the model prefers mismatched completions than the reference does, in nats."""


NOTHING = GlobalSums()
"""The sums over no rows."""


class RowNats(NamedTuple):
    """The rows of a micro-batch as a loss sees them."""

    nats: torch.Tensor
    """-log p of each row's targets, float64, shape (rows,)."""
    reference: torch.Tensor | None
    """-log p of each row's targets under the reference; None if the loss has no reference."""
    num_targets: torch.Tensor
    """Float64, shape (rows,)."""
    is_good: torch.Tensor | None
    """The labels, shape (rows,)."""
    whole: GlobalSums

    @property
    def gained(self) -> torch.Tensor:
        """How much more the model prefers each row than the reference does, in nats, shape (rows,)."""
        assert self.reference is not None
        return self.reference - self.nats

    @property
    def mean_log_p(self) -> torch.Tensor:
        """log p per token of each row, shape (rows,)."""
        return -self.nats / self.num_targets.clamp(min=1.0)


class Outcomes(NamedTuple):
    """The values of each pair or labelled answer, float64."""

    losses: torch.Tensor
    """Shape (pairs,). Only the losses have a gradient."""
    metrics: torch.Tensor
    """Shape (metrics, pairs)."""

    def sums(self) -> torch.Tensor:
        """Return the sums over the pairs: the loss, then the metrics; shape (1 + metrics,)."""
        return torch.cat([self.losses.sum()[None], self.metrics.sum(1)])


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of an objective with its settings."""

    name: str
    section: PreferenceSection

    @property
    def objective(self) -> ObjectiveFacts:
        """What is known about the objective."""
        return OBJECTIVES[self.name]

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of its metrics."""
        return KTO_METRICS if self.name == "kto" else METRICS

    @property
    def needs_global_sums(self) -> bool:
        """Whether it takes sums over the whole global batch."""
        return self.name in ("kto", "orpo")

    def __call__(self, rows: RowNats) -> Outcomes:
        """Compute the loss of each pair or labelled answer."""
        return _LOSSES[self.name](rows, self.section)


def _dpo(rows: RowNats, section: PreferenceSection) -> Outcomes:
    chosen, rejected = rows.gained[0::2], rows.gained[1::2]
    losses = functional.softplus(-section.beta * (chosen - rejected))
    return Outcomes(losses, _metrics_of_pairs(chosen, rejected, section.beta))


def _simpo(rows: RowNats, section: PreferenceSection) -> Outcomes:
    chosen, rejected = rows.mean_log_p[0::2], rows.mean_log_p[1::2]
    losses = functional.softplus(section.gamma - section.beta * (chosen - rejected))
    return Outcomes(losses, _metrics_of_pairs(chosen, rejected, section.beta))


def _orpo(rows: RowNats, section: PreferenceSection) -> Outcomes:
    """Compute ORPO's loss. A pair has three rows: chosen answer, rejected answer, and the prompt, which is learnt."""
    chosen, rejected = rows.mean_log_p[0::3], rows.mean_log_p[1::3]
    # The mean over the tokens of all pairs, so that a long answer counts more, as in TRL.
    likelihood = (rows.nats[0::3] + rows.nats[2::3]) * (rows.whole.num_rows / max(1.0, rows.whole.num_read))
    losses = likelihood + section.beta * functional.softplus(_log_odds(rejected) - _log_odds(chosen))
    return Outcomes(losses, _metrics_of_pairs(chosen, rejected, section.beta))


def _kto(rows: RowNats, section: PreferenceSection) -> Outcomes:
    """Compute KTO's loss. KL has no gradient."""
    assert rows.is_good is not None
    num_rows, _, num_good, gained = rows.whole
    kl = max(0.0, gained / num_rows) if num_rows else 0.0
    sign = rows.is_good.double() * 2 - 1
    value = sign * (rows.gained - kl)
    weight = torch.where(rows.is_good, section.desirable_weight, section.undesirable_weight)
    losses = weight * torch.sigmoid(-section.beta * value)
    # So that means over all answers are means over good and over bad ones; nan where there are none.
    rewards = section.beta * rows.gained.detach()
    good = rewards * (sign > 0) * _ratio(num_rows, num_good)
    bad = rewards * (sign < 0) * _ratio(num_rows, num_rows - num_good)
    metrics = [good, bad, good - bad, _wins(value.detach()), torch.full_like(rewards, kl)]
    return Outcomes(losses, torch.stack(metrics))


_LOSSES: Mapping[str, Callable[[RowNats, PreferenceSection], Outcomes]] = {
    "dpo": _dpo,
    "kto": _kto,
    "orpo": _orpo,
    "simpo": _simpo,
}


def _metrics_of_pairs(chosen: torch.Tensor, rejected: torch.Tensor, beta: float) -> torch.Tensor:
    """Return `METRICS` of each pair, given the scores of its answers."""
    chosen, rejected = chosen.detach(), rejected.detach()
    margins = chosen - rejected
    return torch.stack([beta * chosen, beta * rejected, beta * margins, _wins(margins)])


def _wins(margins: torch.Tensor) -> torch.Tensor:
    """Return 1 where the better answer is preferred, 0 where the worse one is, 1/2 where neither is."""
    return torch.where(margins.abs() <= _ROUNDING_NATS, 0.5, (margins > 0).double())


def _log_odds(log_p: torch.Tensor) -> torch.Tensor:
    """Return log(p / (1 - p))."""
    log_p = log_p.clamp(max=_CERTAIN)
    return log_p - torch.log(-torch.expm1(log_p))


def _ratio(part: float, total: float) -> float:
    return part / total if total else math.nan
