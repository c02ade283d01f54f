"""The live view of a run, made from the events of metrics.jsonl.

Training passes each event when it happens, and `finetune watch` (`runs/watch.py`) when it reads the event. The view is
a table, because rich.progress shows several tasks, and a run is one task with many values.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

from finetune.runs.metrics import FORGOTTEN, Event, number_in, sign_of
from finetune.runs.metrics_reader import measured_beside_loss, subset_metrics_in
from finetune.runs.progress_line import ProgressLine, format_metric, joined, shown_step
from finetune.terminal import visible
from finetune.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_KEPT_LOSSES = 400
_MOST_TREND_STEPS = 50
_FEWEST_TREND_STEPS = 5
_MAX_WARNINGS = 3
_MOST_SUBSETS = 12
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 24
_BAR_WIDTH = 24
_NARROW = 80
"""With these widths, every row fits a terminal of 80 columns. On a wider one, the curve and the bar are longer."""
_OF_BOTH_SIDES = ("chosen_reward", "rejected_reward")
"""Metrics of a validation that are left out, because their difference is shown."""


class RunView(ProgressLine):
    """The metrics of a run so far, rendered by rich. `num_steps` is for the whole run, if it is known."""

    def __init__(self, num_steps: int | None = None, max_forgotten: float | None = None) -> None:
        super().__init__(num_steps)
        self.max_forgotten = max_forgotten
        """`early_stopping.max_forgotten`. A validation beyond it is never the best."""
        self.headline = ""
        """The run's name and state; `finetune watch` sets it."""
        self.task = ""
        """What the run does beside its steps, for example validate; training sets it."""
        self._resources: Event = {}
        self._validation: Event = {}
        self._best: tuple[str, float, int] | None = None
        """The name of the best metric, its best value, and the step of that value."""
        self._losses: deque[float] = deque(maxlen=_KEPT_LOSSES)
        self._warnings: list[str] = []

    def take(self, event: Event) -> None:
        """Take an event of metrics.jsonl. Types that are not shown are ignored."""
        super().take(event)
        event_type = event["event"]
        if event_type == "step":
            loss = number_in(event, "loss")
            if loss is not None and math.isfinite(loss):
                self._losses.append(loss)
        elif event_type == "validation":
            self._take_validation(event)
        elif event_type == "resources":
            self._resources = event
        elif event_type == "warning":
            self._warnings.append(f"step {event.get('step')}: {event.get('text')}")

    def validation_line(self) -> str:
        """Describe the last validation in one line."""
        loss = f"validation loss {format_metric(self._validation, 'loss', '.4f')}"
        return joined(f"step {self._validation.get('step')}", loss, *self._metrics(), *self._in_subsets())

    def trend(self) -> str:
        """Compare the mean loss of the newest steps with the mean loss of the same number of earlier steps.

        Return an empty text if there are not enough steps. The loss is level unless the difference is more than twice
        its standard error.
        """
        count = min(len(self._losses) // 2, _MOST_TREND_STEPS)
        if count < _FEWEST_TREND_STEPS:
            return ""
        losses = list(self._losses)
        now, before = losses[-count:], losses[-2 * count : -count]
        difference = statistics.fmean(now) - statistics.fmean(before)
        error = math.sqrt((statistics.variance(now) + statistics.variance(before)) / count)
        direction = "level" if abs(difference) <= 2 * error else "falling" if difference < 0 else "rising"
        return f"{direction}, {difference / (abs(statistics.fmean(before)) or 1.0):+.1%} over {count} steps"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._rows(wider=max(0, options.max_width - _NARROW)):
            table.add_row(name, Text(visible(value)))
        for text in self._warnings[-_MAX_WARNINGS:]:
            table.add_row(Text("warning", style="bold magenta"), Text(visible(text)))
        yield table

    def _rows(self, *, wider: int = 0) -> list[tuple[str, str]]:
        """Return the rows of the table. Rows without a value are left out."""
        of_steps = {
            "loss": self._loss(_CURVE_WIDTH + wider),
            "reward": self._reward() if "reward" in self._last else "",
        }
        rates = {
            "rate": joined(
                f"learning rate {format_metric(self._last, 'learning_rate', '.2e')}",
                f"gradient norm {format_metric(self._last, 'grad_norm', '.3g')}",
            ),
            "speed": self._speed(),
        }
        rows = {
            "run": self.headline,
            "step": self._progress(_BAR_WIDTH + wider),
            "now": self.task,
            **(of_steps if self._last else {}),
            "validation": self._validated() if self._validation else "",
            "sources": joined(*self._in_subsets()),
            **(rates if self._last else {}),
            "memory": self._memory(),
        }
        return [(name, value) for name, value in rows.items() if value]

    def _progress(self, width: int) -> str:
        text = joined(self._of_all(), self._epoch(), self._left())
        if not self.num_steps:
            return text
        filled = width * min(self.step, self.num_steps) // self.num_steps
        return f"{text}  {'━' * filled}{'─' * (width - filled)}"

    def _loss(self, width: int) -> str:
        loss = joined(format_metric(self._last, "loss", ".4f"), self.trend())
        return f"{loss}  {curve(list(self._losses), width)}".rstrip()

    def _reward(self) -> str:
        forms = {"answer_length": ".0f", "truncated": ".0%", "failed_calls": ".0%"}
        length, truncated, failed = (format_metric(self._last, name, form) for name, form in forms.items())
        names = [name for name in measured_beside_loss(self._last) if name.startswith("reward_") and name[7:] != "std"]
        rewards = [f"{visible(name[7:])} {format_metric(self._last, name, '.3f')}" for name in names]
        return joined(
            format_metric(self._last, "reward", ".3f"),
            *(rewards if len(rewards) > 1 else ()),
            f"{length} tokens an answer",
            f"{truncated} truncated",
            f"{failed} of calls failed" if "failed_calls" in self._last else "",
        )

    def _validated(self) -> str:
        loss = f"{format_metric(self._validation, 'loss', '.4f')} at step {self._validation.get('step')}"
        best = ""
        if self._best is not None and self._best[2] != self._validation.get("step"):
            name, value, step = self._best
            best = f"best {f'{value:.4f}' if name == 'loss' else f'{visible(name)} {value:.3f}'} at step {step}"
        return joined(loss, *self._metrics(), best)

    def _metrics(self) -> list[str]:
        """Return the metrics of the last validation beside its loss, each with its name."""
        names = [name for name in measured_beside_loss(self._validation) if name not in _OF_BOTH_SIDES]
        return [f"{visible(name)} {format_metric(self._validation, name, '.3f')}" for name in names]

    def _in_subsets(self) -> list[str]:
        """Return the losses and metrics of the last validation over each of its sources, each with its name."""
        names = subset_metrics_in(self._validation)
        shown = [f"{visible(name)} {format_metric(self._validation, name, '.4f')}" for name in names[:_MOST_SUBSETS]]
        return shown + ([f"and {len(names) - len(shown)} more"] if len(names) > len(shown) else [])

    def _speed(self) -> str:
        names = {"data_wait_share": "waiting for data", "slowest_rank_share": "for the slowest rank"}
        shares = {label: number_in(self._resources, name) for name, label in names.items()}
        parts = [f"{value:.0%} {label}" for label, value in shares.items() if value is not None]
        return joined(self._tokens_per_second(), *parts)

    def _memory(self) -> str:
        names = {"host_memory": "of the main process", "device_memory": "on its device"}
        sizes = {label: number_in(self._resources, name) for name, label in names.items()}
        parts = [f"{format_bytes(int(size))} {label}" for label, size in sizes.items() if size is not None]
        return f"{joined(*parts)}, at most" if parts else ""

    def _take_validation(self, event: Event) -> None:
        self._validation = event
        name = str(event.get("best_metric", "loss"))
        value, sign = number_in(event, name), sign_of(name)
        if self.max_forgotten is not None and (number_in(event, FORGOTTEN) or 0) > self.max_forgotten:
            value = None
        if self._best is not None and self._best[0] != name:
            self._best = None
        if value is not None and math.isfinite(value) and (self._best is None or sign * value > sign * self._best[1]):
            self._best = name, value, shown_step(event)


def curve(values: list[float], width: int) -> str:
    """Draw values as bars in one line of at most `width` characters. Each bar is the mean of its part of the values."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    cuts = [round(len(values) * place / width) for place in range(width + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
