"""Warn of rewards that go wrong."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from finetune.runs.metrics import Event, number_in
from finetune.training.reporting.run_warnings import RunWarning, RunWarnings

_WINDOW = 10
"""Steps averaged for a comparison. One rollout is noisy."""
_MOST_EQUAL = 0.9
_MOST_TRUNCATED = 0.5
_LEAST_ENTROPY = 0.1
"""Of the entropy of the first steps."""
_RISES_BY = 0.02
"""Smaller changes may be noise: if half of 2,500 answers are rewarded, twice the standard error of the mean is 0.02."""


class RewardWarnings(RunWarnings):
    """Check the steps and validations of a run that learns from rewards. Its loss is near 0, whatever it learns."""

    def __init__(self) -> None:
        super().__init__()
        self._metrics: dict[str, deque[float]] = {}
        self._first_entropy: list[float] = []
        self._validations: list[tuple[float, float]] = []
        """Of each validation: the mean reward of the steps before it, and its own."""
        self._added: list[RunWarning] = []

    def add(self, name: str, text: str) -> None:
        """Add a warning that the next step gives."""
        self._added.append(RunWarning(name, text))

    def after_step(self, event: Event) -> RunWarning | None:
        """Return the warning that a step causes, if any."""
        if self._added:
            return self._added.pop()
        for name in ("reward", "equal_groups", "truncated", "drawn_entropy"):
            if (value := number_in(event, name)) is not None:
                self._metrics.setdefault(name, deque(maxlen=_WINDOW)).append(value)
        if len(self._first_entropy) < _WINDOW and (entropy := number_in(event, "drawn_entropy")) is not None:
            self._first_entropy.append(entropy)
        return next((sign for sign in self._signs() if sign.name not in self._said), None)

    def _signs(self) -> Iterator[RunWarning]:
        """Yield a warning for each sign that the last steps show, causes first, whether it was given before or not."""
        equal, truncated, entropy = (self._mean(name) for name in ("equal_groups", "truncated", "drawn_entropy"))
        if truncated is not None and truncated > _MOST_TRUNCATED:
            yield RunWarning(
                "truncated",
                f"{truncated:.0%} of the answers of the last {_WINDOW} steps have no end. Raise "
                "rollout.max_completion_length, or reward short answers: add length to reward.functions, with a small "
                "weight",
            )
        if entropy is not None and entropy < _LEAST_ENTROPY * (first := statistics.fmean(self._first_entropy)):
            yield RunWarning(
                "collapsed",
                f"the entropy of answers has collapsed from {first:.3g} to {entropy:.3g} nats per token: the model "
                "hardly tries anything new. Lower optim.learning_rate, raise grpo.epsilon_high or rollout.temperature, "
                "and go on from an earlier checkpoint",
            )
        if equal is not None and equal > _MOST_EQUAL:
            yield RunWarning(
                "equal",
                f"all answers to a prompt have the same reward for {equal:.0%} of the prompts over the last {_WINDOW} "
                "steps, so there is little to learn from. Take prompts that are neither too easy nor too hard, or "
                "raise rollout.num_generations or rollout.temperature",
            )

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
        values = self._metrics.get(name, ())
        return statistics.fmean(values) if len(values) == _WINDOW else None
