"""The progress of a run in one line, made from the events of metrics.jsonl: for its log, and for the live view."""

from __future__ import annotations

import math
import statistics
from collections import deque

from finetune.runs.metrics import Event, number_in, step_of
from finetune.units import format_duration

_SPEED_STEPS = 50


class ProgressLine:
    """The last step of a run. `num_steps` is for the whole run, if it is known."""

    def __init__(self, num_steps: int | None = None) -> None:
        self.num_steps = num_steps
        self.step = 0
        self.seconds_left: float | None = None
        """The time left, if training sets it; otherwise it is estimated from the last steps."""
        self._last: Event = {}
        self._seconds: deque[float] = deque(maxlen=_SPEED_STEPS)

    def take(self, event: Event) -> None:
        """Take an event of metrics.jsonl. Types that are not shown are ignored."""
        if event["event"] != "step":
            return
        self._last = event
        self.step = shown_step(event)
        speed, tokens = number_in(event, "tokens_per_second"), number_in(event, "num_tokens")
        if speed and tokens and math.isfinite(speed):
            self._seconds.append(tokens / speed)

    def line(self) -> str:
        """Describe the last step in one line."""
        return joined(
            f"step {self._of_all()}",
            self._epoch(),
            f"loss {format_metric(self._last, 'loss', '.4f')}",
            f"reward {format_metric(self._last, 'reward', '.3f')}" if "reward" in self._last else "",
            self._tokens_per_second(),
            self._left(),
        )

    def _of_all(self) -> str:
        return f"{self.step}/{self.num_steps}" if self.num_steps else str(self.step)

    def _epoch(self) -> str:
        epoch = number_in(self._last, "epoch")
        return "" if epoch is None else f"epoch {epoch + 1:.0f}"

    def _tokens_per_second(self) -> str:
        speed = number_in(self._last, "tokens_per_second")
        return "" if speed is None else f"{speed:,.0f} tokens/s"

    def _left(self) -> str:
        seconds = self.seconds_left
        if seconds is None and self.num_steps and self._seconds:
            seconds = statistics.fmean(self._seconds) * max(self.num_steps - self.step, 0)
        return "" if seconds is None else f"{format_duration(seconds)} left"


def shown_step(event: Event) -> int:
    """Return the step that an event belongs to; 0 if it has no valid step, which no training counts."""
    return step_of(event) or 0


def joined(*parts: str) -> str:
    """Join the parts of a line that are not empty."""
    return " · ".join(filter(None, parts))


def format_metric(event: Event, name: str, form: str) -> str:
    """Format a number of an event; a dash if it has none of this name."""
    value = number_in(event, name)
    return "–" if value is None else format(value, form)
