"""Warn of a loss that is flat or explodes, and of a data loader that slows training down.

The thresholds for the loss scale with the curve's own noise, so that a noisy data set raises no alarm.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

from finetune.runs.metrics import Event, number_in

_WINDOW = 10
"""Steps averaged for a comparison: the mean of 10 has a third of one step's noise."""
_FIRST = 5
"""Steps at the start of a run in which the loss cannot change much."""
_EXPLODES_BY = 0.5
"""A loss explodes if it is above the lowest mean so far by half of this mean ..."""
_EXPLODES_SIGMAS = 8.0
"""... and by more than the noise: over thousands of windows, lowest and highest lie about 7 sigmas apart."""
_FLAT_AFTER = 100
"""Steps after which the loss of a run that learns has fallen."""
_FLAT_BY = 0.02
"""A loss is flat if it has fallen by less than 2% ..."""
_FLAT_SIGMAS = 2.0
"""... or by less than the noise of the two means, from both the first 5 steps and the first 50."""
_FLAT_WINDOW = 50
_FLATS_IN_A_ROW = 2
"""Flat windows in a row before the warning: a single one may lie high by chance."""
_WAITS_FROM = 0.2
"""Share of the time: without this waiting, a run would be 1 / (1 - 0.2) = 1.25 times as fast."""
_WAITS_IN_A_ROW = 2
"""Slow intervals in a row before the warning: the first may include the start of worker processes."""
_KEPT_DIFFERENCES = 1000


class RunWarning(NamedTuple):
    """A warning about a run."""

    name: str
    """The `kind` of its event in metrics.jsonl."""
    text: str


class RunWarnings:
    """Check every event of a run, including those of its earlier starts. Each type of warning is given once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._num_losses = 0
        self._first: list[float] = []
        self._begin: list[float] = []
        self._recent: deque[float] = deque(maxlen=_FLAT_WINDOW)
        self._differences: deque[float] = deque(maxlen=_KEPT_DIFFERENCES)
        self._lowest = math.inf
        self._flats = self._waits = 0
        self._has_learning_rate = False

    def take(self, event: Event) -> RunWarning | None:
        """Return the warning that this event causes, if any."""
        if event["event"] == "warning":
            self._said.add(str(event.get("kind")))
        warning: RunWarning | None = None
        if event["event"] == "step":
            warning = self.after_step(event)
        elif event["event"] == "validation":
            warning = self.after_validation(event)
        elif event["event"] == "resources":
            warning = self._after_interval(event)
        if warning is None or warning.name in self._said:
            return None
        self._said.add(warning.name)
        return warning

    def after_validation(self, event: Event) -> RunWarning | None:
        """Return the warning that a validation causes, if any. An objective may define its own."""
        del event
        return None

    def after_step(self, event: Event) -> RunWarning | None:
        """Return the warning that a step causes, if any."""
        loss = number_in(event, "loss")
        if loss is None or not math.isfinite(loss) or event.get("skipped"):
            return None
        self._has_learning_rate |= bool(number_in(event, "learning_rate"))
        if self._recent:
            self._differences.append(abs(loss - self._recent[-1]))
        self._recent.append(loss)
        self._num_losses += 1
        if len(self._first) < _FIRST:
            self._first.append(loss)
        if len(self._begin) < _FLAT_WINDOW:
            self._begin.append(loss)
        if self._num_losses < 2 * _WINDOW:
            return None
        return self._exploding() or self._flat()

    def _exploding(self) -> RunWarning | None:
        recent = statistics.median(list(self._recent)[-_WINDOW:])  # one bad step does not move it
        before = list(self._recent)[-2 * _WINDOW : -_WINDOW]
        self._lowest = min(self._lowest, statistics.fmean(before), statistics.fmean(self._first))
        rise = recent - self._lowest
        if rise <= _EXPLODES_BY * abs(self._lowest):
            return None
        noise = self._noise() * math.sqrt(1 / _WINDOW + 1 / _FIRST)
        if rise <= _EXPLODES_SIGMAS * noise:
            return None
        text = (
            f"the loss is exploding: {recent:.3g} over the last {_WINDOW} steps, after {self._lowest:.3g}. Lower "
            "optim.learning_rate or set optim.max_grad_norm, and go on from the last good checkpoint"
        )
        return RunWarning("exploding", text)

    def _flat(self) -> RunWarning | None:
        """Compare with the start of the run only: a run that has learned may stay where it is."""
        if self._num_losses < _FLAT_AFTER or self._num_losses % _FLAT_WINDOW:
            return None
        now = statistics.fmean(self._recent)
        is_moved = self._move(self._first, now) or self._move(self._begin, now)
        self._flats = 0 if is_moved else self._flats + 1
        if self._flats < _FLATS_IN_A_ROW:
            return None
        reason = "optim.learning_rate may be too low" if self._has_learning_rate else "the learning rate is 0"
        text = (
            f"the loss is flat: {now:.4g} over the last {len(self._recent)} steps, {statistics.fmean(self._begin):.4g} "
            f"over the first. {reason}, or few of the tokens carry loss: see finetune preview"
        )
        return RunWarning("flat", text)

    def _move(self, before: list[float], now: float) -> bool:
        """Return whether the means of the last steps and of `before` differ by enough, and by more than noise."""
        mean = statistics.fmean(before)
        noise = self._noise() * math.sqrt(1 / len(before) + 1 / len(self._recent))
        return abs(mean - now) >= max(_FLAT_BY * abs(mean), _FLAT_SIGMAS * noise)

    def _noise(self) -> float:
        """Estimate the standard deviation of one step's loss from differences: 1.4826 x median / sqrt(2).

        Steps in which the curve jumps do not move the median. The differences of a normal variable have sqrt(2) times
        its deviation, and their median absolute value is 0.6745 times that.
        """
        return 1.4826 * statistics.median(self._differences) / math.sqrt(2) if self._differences else 0.0

    def _after_interval(self, event: Event) -> RunWarning | None:
        share = number_in(event, "data_wait_share")
        if share is None:
            return None
        self._waits = self._waits + 1 if share > _WAITS_FROM else 0
        if self._waits < _WAITS_IN_A_ROW:
            return None
        text = (
            f"the data loader slows training down: {share:.0%} of the time is spent waiting for rows. Raise "
            "training.num_workers (and training.prefetch_factor), or put data on a faster disk"
        )
        return RunWarning("data", text)
