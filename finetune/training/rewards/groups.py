"""Compute the loss of answers that are compared with other answers to the same prompt.

`GroupLoss` is a function of log-probabilities. GRPO: Shao et al., 2024, arXiv:2402.03300, equations 3 and 4. DAPO: Yu
et al., 2025, arXiv:2503.14476, equation 8. Dr. GRPO: Liu et al., 2025, arXiv:2503.20783, section 3.2. GSPO, with a
ratio for each answer: Zheng et al., 2025, arXiv:2507.18071, equation 5. CISPO: MiniMax, 2025, arXiv:2506.13585,
section 3.1, without a lower bound. BNPO and all names and defaults: TRL 1.16, `GRPOConfig`.

For micro-batches of answers, the engine computes the prompt of a group once. The reference is the base: the same model
with its adapter switched off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.data.batches import Collate
from finetune.data.encoded import EncodedExample
from finetune.engine.loss import BY_DEVICE, Choices, cross_entropy_per_target
from finetune.engine.loss_of_nats import function_of_nats
from finetune.engine.microbatch import WithRows
from finetune.engine.products import in_float64
from finetune.model.base import evaluation_mode

if TYPE_CHECKING:
    from finetune.config.schema import Config, GrpoSection, RolloutSection


METRICS = ("entropy", "clipped", "kl", "ratio", "clipped_ratio")
"""Means over the tokens of the answers that a step learns from. Without `grpo.beta`, their advantage is not 0.

`entropy` is -log p of the sampled tokens, in nats, which estimates the entropy. `clipped` is the share of tokens with a
clipped ratio. `kl` is the divergence from the reference, in nats, if the loss has one. `ratio` is the probability of a
token now over the one when the answer was generated, and `clipped_ratio` the same after clipping; they are left out
where both are the same by definition."""

_OF_TURNS = ("clipped", "ratio", "clipped_ratio")
"""The metrics of `METRICS` that are also measured for each turn."""
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
    turn: torch.Tensor | None = None
    """The turn of a conversation that each token is from, counted from 0, int64, shape (tokens,); None: the first."""


@dataclass(frozen=True)
class GroupLoss:
    """The loss with its settings.

    Attributes:
        section: its keys.
        longest: `rollout.max_completion_length`.
        turns: the most turns of an answer, for the metrics of each turn; 0: none are measured.
    """

    section: GrpoSection
    longest: int
    turns: int = 0

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics in the order in which they are returned."""
        return (*METRICS, *(f"{name}/{turn}" for name in _OF_TURNS for turn in range(self.turns)))

    def summarize(self, metrics: Mapping[str, float], largest: Sequence[float]) -> dict[str, Any]:
        """Return the metrics of a step by name, with the values of turns as lists: `ratio_by_turn`.

        `largest` is the largest ratio of each turn, 0 where there is none.
        """
        summary: dict[str, Any] = {name: value for name, value in metrics.items() if "/" not in name}
        by_turn = {name: [metrics.get(f"{name}/{turn}") for turn in range(self.turns)] for name in _OF_TURNS}
        if any(largest):
            summary["largest_ratio"], by_turn["largest_ratio"] = max(largest), [ratio or None for ratio in largest]
        for name, values in by_turn.items() if self.turns > 1 else ():
            while values and values[-1] is None:
                values.pop()
            if values:
                summary[f"{name}_by_turn"] = values
        return summary

    def denominator(self, num_answers: int, num_tokens: int) -> int:
        """Return the divisor of the sum over a global batch; `num_tokens` counts the answers that are in the loss."""
        by_type = {"grpo": num_answers, "dr_grpo": num_answers * self.longest}
        return max(1, by_type.get(self.section.loss_type, num_tokens))

    def __call__(self, tokens: GroupNats) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum over the tokens, with a gradient, and the sums of `metrics`; all float64.

        The largest ratio of each turn follows the sums.
        """
        section, row = self.section, tokens.row
        advantages = tokens.advantages[row]
        log_ratio = (tokens.nats.detach() if tokens.old is None else tokens.old) - tokens.nats
        num_tokens = torch.zeros_like(tokens.advantages).index_add(0, row, torch.ones_like(tokens.nats))
        if section.importance_sampling_level == "sequence":
            summed = torch.zeros_like(tokens.advantages).index_add(0, row, log_ratio)
            log_ratio = (summed / num_tokens.clamp(min=1))[row]
        ratio = log_ratio.exp()
        low, high = 1 - section.epsilon, 1 + (section.epsilon_high or section.epsilon)
        if section.loss_type == "cispo":  # a token beyond the bound keeps its gradient, with the bound as its weight
            low, losses = 0.0, ratio.detach().clamp(max=high) * advantages * tokens.nats
            is_clipped = (ratio > high) & (advantages != 0)
        else:
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
        unknown = torch.full_like(divergence, math.nan)
        ratios = (ratio.detach().sum(), ratio.detach().clamp(low, high).sum())
        metrics += (unknown, unknown) if tokens.old is None else ratios
        of_turns = self._of_turns(tokens, [is_clipped.double(), ratio.detach(), ratio.detach().clamp(low, high)])
        return losses.sum(), torch.cat([torch.stack(metrics), of_turns])

    def _of_turns(self, tokens: GroupNats, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of each value over the tokens of each turn, then the largest ratio in each."""
        if tokens.old is None or not len(tokens.nats):
            unknown = math.nan if tokens.old is None else 0.0
            return tokens.nats.new_tensor([unknown] * len(_OF_TURNS) * self.turns + [0.0] * self.turns)
        turn = torch.zeros_like(tokens.row) if tokens.turn is None else tokens.turn
        is_of_turn = turn == torch.arange(self.turns, device=turn.device)[:, None]
        return torch.cat([*((value * is_of_turn).sum(1) for value in values), (values[1] * is_of_turn).amax(1)])


def group_loss_of(config: Config) -> GroupLoss:
    """Return the loss of a run."""
    section = config.rollout
    return GroupLoss(config.grpo, section.max_completion_length, section.max_turns if has_turns(section) else 1)


def has_turns(section: RolloutSection) -> bool:
    """Return whether answers are conversations, because there are tools or an environment."""
    return bool(section.tools or section.environment)


class Advantages(NamedTuple):
    """How much better than the other answers of its group each answer is."""

    rewards: torch.Tensor
    """The weighted sum of rewards, float64, shape (groups, answers); nan where no function with a weight gave one."""
    values: torch.Tensor
    """Shape (groups, answers); 0 where there is no reward."""
    deviations: torch.Tensor
    """The standard deviation of the rewards of each group, shape (groups,)."""


def advantages_of(rewards: torch.Tensor, weights: Sequence[float], scale: str, *, num_generations: int) -> Advantages:
    """Compare the answers of each group of `num_generations`; `scale` is `grpo.scale_rewards`.

    `rewards` are float64, (answers, functions), group after group; nan where a function gave none.
    """
    of_weights = torch.tensor(weights, dtype=rewards.dtype)
    total = (rewards * of_weights).nansum(1)
    # A function of weight 0 is only measured. It gives no reward to an answer to which all others give none.
    total[rewards[:, of_weights != 0].isnan().all(1)] = math.nan
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


class ScoredAnswer(NamedTuple):
    """An answer with its prompt, as a row to train on."""

    row: EncodedExample
    """Prompt and answer; the tokens of the answer are targets."""
    advantage: float
    old_nats: Sequence[float] | None = None
    """-log p of the answer's tokens under the weights that generated it; None: under the present ones."""
    turns: Sequence[int] = ()
    """The turn of each of these tokens, counted from 0; empty: all are of the first."""


@dataclass(frozen=True, kw_only=True)
class GroupMicrobatch(WithRows):
    """One forward over answers.

    Attributes:
        rows: prompts with answers.
        advantages: of each row, float64, shape (rows,).
        old: see `GroupNats.old`.
        num_targets: its part of the loss's denominator (`GroupLoss.denominator`).
        per_token: a factor for sums over tokens: divided by the whole denominator, they become means over all tokens.
        per_turn: the same for the tokens of each turn.
        turn: see `GroupNats.turn`.
        largest: a list to which the loss adds the largest ratio of each turn; None: nobody asks for it.
    """

    advantages: torch.Tensor
    old: torch.Tensor | None = None
    num_targets: int
    per_token: float = math.nan
    per_turn: Sequence[float] = ()
    turn: torch.Tensor | None = None
    largest: list[torch.Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and answers; a shared prompt counts once for each answer."""
        return self.rows.num_tokens

    def to(self, device: torch.device) -> GroupMicrobatch:
        """A copy on another device."""
        return replace(self, rows=self.rows.to(device))


def put_answers_together(
    answers: Sequence[ScoredAnswer],
    *,
    rows: Collate,
    num_targets: int,
    per_token: float = math.nan,
    per_turn: Sequence[float] = (),
    largest: list[torch.Tensor] | None = None,
) -> GroupMicrobatch:
    """Make a micro-batch of answers, at least one; `rows` packs or pads them."""
    old = [nats for answer in answers for nats in answer.old_nats or ()]
    turns = [turn for answer in answers for turn in answer.turns]
    return GroupMicrobatch(
        rows=rows([answer.row for answer in answers]),
        advantages=torch.tensor([answer.advantage for answer in answers], dtype=torch.float64),
        old=torch.tensor(old, dtype=torch.float64) if old else None,
        num_targets=num_targets,
        per_token=per_token,
        per_turn=per_turn,
        turn=torch.tensor(turns) if turns else None,
        largest=largest,
    )


def summed_group_loss(
    model: Any, microbatch: Any, *, loss: GroupLoss, temperature: float, choices: Choices = BY_DEVICE
) -> torch.Tensor:
    """Return the loss summed over a micro-batch, which has a gradient, then its metrics; float64.

    The model is in training mode, and a PEFT model if the loss has a reference. Plain rows count as answers with an
    advantage of 1.
    """
    answers = _as_answers(microbatch)
    reference = None
    if loss.section.beta:
        with evaluation_mode(model), model.disable_adapter():
            reference = nats_of_tokens(model, answers, temperature=temperature, choices=choices)

    def summed(nats: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here = nats.device
        old = None if answers.old is None else answers.old.to(here)
        row, turn = answers.rows.target_row.to(here), None if answers.turn is None else answers.turn.to(here)
        return loss(GroupNats(nats, old, reference, row, answers.advantages.to(here), turn))

    total, metrics = function_of_nats(model, answers.rows, summed, choices, temperature=temperature)
    per_turn = answers.per_turn or [0.0] * loss.turns
    factors = metrics.new_tensor([answers.per_token] * len(METRICS) + [*per_turn] * len(_OF_TURNS))
    if answers.largest is not None:
        answers.largest.append(metrics[len(factors) :])
    return torch.cat([total[None], metrics[: len(factors)] * factors])


def nats_of_tokens(model: Any, microbatch: Any, *, temperature: float, choices: Choices = BY_DEVICE) -> torch.Tensor:
    """Return -log p of each token of the answers, answer after answer, float64, without a gradient."""
    with torch.no_grad():
        rows = _as_answers(microbatch).rows
        return in_float64(cross_entropy_per_target(model, rows, choices, temperature=temperature))


def _as_answers(microbatch: Any) -> GroupMicrobatch:
    if isinstance(microbatch, GroupMicrobatch):
        return microbatch
    num_targets, advantages = microbatch.num_targets, torch.ones(microbatch.num_rows, dtype=torch.float64)
    # A rank without answers must add 0 to the sums of ratios, too: nan would hide the metrics of the other ranks.
    old = None if num_targets else torch.zeros(0, dtype=torch.float64)
    return GroupMicrobatch(rows=microbatch, advantages=advantages, old=old, num_targets=num_targets, per_token=0.0)
