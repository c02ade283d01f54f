"""Warn of a run that learns from rewards and goes wrong.

It may have nothing to compare, give answers without an end, repeat itself, or do better on its own prompts only.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from finetune.runs.metrics import Event, number_in

_WINDOW = 10
"""Steps averaged: one rollout is noisy."""
_MOST_EQUAL = 0.9
_MOST_TRUNCATED = 0.5
_LEAST_ENTROPY = 0.1
"""Of the entropy of the first steps."""
_RISES_BY = 0.02
"""Smaller changes may be noise: if half of 2,500 answers are rewarded, twice the standard error of the mean is 0.02."""


class RunWarning(NamedTuple):
    """A warning about a run."""

    name: str
    """The `kind` of its event in metrics.jsonl."""
    text: str


class RewardWarnings:
    """Checks steps and validations of a run; nothing happens where these have no rewards."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._first_entropy: list[float] = []
        self._validations: list[tuple[float, float]] = []
        """Of each validation: the mean reward of the steps before it, and its own."""

    def after_step(self, event: Event) -> RunWarning | None:
        """Return the warning that a step causes, if any."""
        for name in ("reward", "equal_groups", "truncated", "entropy"):
            if (value := number_in(event, name)) is not None:
                self._recent.setdefault(name, deque(maxlen=_WINDOW)).append(value)
        if len(self._first_entropy) < _WINDOW and (entropy := number_in(event, "entropy")) is not None:
            self._first_entropy.append(entropy)
        return self._equal() or self._truncated() or self._collapsed()

    def after_validation(self, event: Event) -> RunWarning | None:
        """Return the warning that a validation causes, if any."""
        reward, trained = number_in(event, "reward"), self._mean("reward")
        if reward is None or trained is None:
            return None
        self._validations.append((trained, reward))
        if len(self._validations) < 3:
            return None
        (before, best), (_, middle), (now, last) = self._validations[-3:]
        if not (now > before + _RISES_BY and last < middle < best and last < best - _RISES_BY):
            return None
        text = (
            f"over the last validations, the training reward rises from {before:.3f} to {now:.3f}, but the validation "
            f"reward falls from {best:.3f} to {last:.3f}: the model learns its training prompts by heart, or exploits "
            "a reward function. Set grpo.beta, lower optim.learning_rate, or look at the answers in rollouts/"
        )
        return RunWarning("overfitted", text)

    def _mean(self, name: str) -> float | None:
        """Return the mean of the last steps; None before there are enough."""
        values = self._recent.get(name, ())
        return statistics.fmean(values) if len(values) == _WINDOW else None

    def _equal(self) -> RunWarning | None:
        share = self._mean("equal_groups")
        if share is None or share <= _MOST_EQUAL:
            return None
        text = (
            f"all answers to a prompt have the same reward for {share:.0%} of the prompts over the last {_WINDOW} "
            "steps, so there is little to learn from. Take prompts that are neither too easy nor too hard, or raise "
            "rollout.num_generations or rollout.temperature"
        )
        return RunWarning("equal", text)

    def _truncated(self) -> RunWarning | None:
        share = self._mean("truncated")
        if share is None or share <= _MOST_TRUNCATED:
            return None
        text = (
            f"{share:.0%} of the answers of the last {_WINDOW} steps have no end. Raise rollout.max_completion_length, "
            "or reward short answers: add length to reward.functions, with a small weight"
        )
        return RunWarning("truncated", text)

    def _collapsed(self) -> RunWarning | None:
        entropy = self._mean("entropy")
        if entropy is None or len(self._first_entropy) < _WINDOW:
            return None
        first = statistics.fmean(self._first_entropy)
        if entropy >= _LEAST_ENTROPY * first:
            return None
        text = (
            f"the entropy of answers has collapsed from {first:.3g} to {entropy:.3g} nats per token: the model hardly "
            "tries anything new. Lower optim.learning_rate, raise grpo.epsilon_high or rollout.temperature, and go on "
            "from an earlier checkpoint"
        )
        return RunWarning("collapsed", text)
