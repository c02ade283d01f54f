"""The loss of answers that are compared with other answers to the same prompt, as a function of log-probabilities.

GRPO: Shao et al., 2024, arXiv:2402.03300, equations 3 and 4. DAPO: Yu et al., 2025, arXiv:2503.14476, equation 8. Dr.
GRPO: Liu et al., 2025, arXiv:2503.20783, section 3.2. GSPO, with a ratio for each answer: Zheng et al., 2025,
arXiv:2507.18071, equation 5. BNPO and all names and defaults: TRL 1.16, `GRPOConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from finetune.config.schema import GrpoSection

METRICS = ("entropy", "clipped", "kl")
"""Means over the tokens of a step: nats of the sampled tokens, which estimate the entropy; the share of tokens whose
ratio is clipped; the divergence from the reference, in nats, where there is one."""

_SMALLEST_DEVIATION = 1e-4
"""Added to the standard deviation of rewards, as in TRL."""


class GroupNats(NamedTuple):
    """The tokens of a micro-batch as the loss sees them."""

    nats: torch.Tensor
    """-log p of each token of the answers, float64, shape (tokens,)."""
    old: torch.Tensor | None
    """The same under the weights that generated the answers; None: under the present ones."""
    reference: torch.Tensor | None
    """The same under the base; None without a reference."""
    row: torch.Tensor
    """The answer of each token, int64, shape (tokens,)."""
    advantages: torch.Tensor
    """Of each answer, float64, shape (answers,)."""


@dataclass(frozen=True)
class GroupLoss:
    """The loss with its settings.

    Attributes:
        section: its settings.
        longest: `rollout.max_completion_length`.
    """

    section: GrpoSection
    longest: int

    def denominator(self, num_answers: int, num_tokens: int) -> int:
        """Return the divisor of the sum over a global batch; `num_tokens` counts the answers that are in the loss."""
        by_type = {"grpo": num_answers, "dr_grpo": num_answers * self.longest}
        return max(1, by_type.get(self.section.loss_type, num_tokens))

    def __call__(self, tokens: GroupNats) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over the tokens, with a gradient, and the sums of `METRICS`, shape (3,); all float64."""
        section, row = self.section, tokens.row
        advantages = tokens.advantages[row]
        log_ratio = (tokens.nats.detach() if tokens.old is None else tokens.old) - tokens.nats
        num_tokens = torch.zeros_like(tokens.advantages).index_add(0, row, torch.ones_like(tokens.nats))
        if section.importance_sampling_level == "sequence":
            summed = torch.zeros_like(tokens.advantages).index_add(0, row, log_ratio)
            log_ratio = (summed / num_tokens.clamp(min=1))[row]
        ratio = log_ratio.exp()
        low, high = 1 - section.epsilon, 1 + (section.epsilon_high or section.epsilon)
        losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        is_clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
        divergence = torch.full((), math.nan, dtype=torch.float64, device=losses.device)
        if section.beta and tokens.reference is not None:
            above = tokens.nats - tokens.reference
            each = above.exp() - above - 1
            losses = losses + section.beta * each
            divergence = each.detach().sum()
        if section.loss_type == "grpo":
            losses = losses / num_tokens[row]
        metrics = [tokens.nats.detach().sum(), is_clipped.double().sum(), divergence]
        return losses.sum(), torch.stack(metrics)


class Advantages(NamedTuple):
    """How much better than the other answers of its group each answer is."""

    rewards: torch.Tensor
    """The weighted sum of rewards, float64, shape (groups, answers); nan where no function gave one."""
    values: torch.Tensor
    """Shape (groups, answers); 0 where there is no reward."""
    deviations: torch.Tensor
    """The standard deviation of the rewards of each group, shape (groups,)."""


def advantages_of(rewards: torch.Tensor, weights: Sequence[float], scale: str, *, num_generations: int) -> Advantages:
    """Compare the answers of each group.

    Args:
        rewards: of each function, float64, (answers, functions), group after group; nan where it gave none.
        weights: of the functions.
        scale: `grpo.scale_rewards`.
        num_generations: answers of a group, at least 2.
    """
    weighted = rewards * torch.tensor(weights, dtype=rewards.dtype)
    total = weighted.nansum(1)
    total[rewards.isnan().all(1)] = math.nan
    grouped = total.view(-1, num_generations)
    # Equal rewards minus the lowest are exactly 0, and so is their mean; a mean of e.g. 0.1 three times is not 0.1.
    above = grouped - grouped.nan_to_num(math.inf).amin(1, keepdim=True)
    values = above - above.nanmean(1, keepdim=True)
    deviations = _deviations(above)
    if scale != "none":
        divisor = deviations if scale == "group" else _deviations(total[None])
        values = values / (divisor[:, None] + _SMALLEST_DEVIATION)
    return Advantages(grouped, values.nan_to_num(0.0), deviations)


def _deviations(rewards: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of each row without nan, with n - 1 in the denominator; 0 below two values."""
    count = rewards.isnan().logical_not().sum(1)
    squares = (rewards - rewards.nanmean(1, keepdim=True)).square().nansum(1)
    return (squares / (count - 1).clamp(min=1)).sqrt()
