"""Make the chart of parallel coordinates: an axis for each setting that differs between runs, and one of the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from finetune.report.curves import COLOURS, LOG_FROM_RATIO, Chart, specify_chart
from finetune.report.sentences import best_run, best_value, format_number, metric_of
from finetune.runs.comparison import compare_runs, format_value
from finetune.runs.recorded_run import RecordedRun
from finetune.terminal import visible

_FEWEST_RUNS = 3
_MOST_SETTINGS = 7
_MOST_TICKS = 6


class Axis(NamedTuple):
    """A vertical axis. Heights are from 0 to 1."""

    name: str
    texts: list[str]
    """The value of each run."""
    heights: list[float | None]
    """The height of each run's value. None if the run has no value."""
    ticks: dict[str, float]
    """Labels with their heights."""


@dataclass(frozen=True, kw_only=True)
class ParallelChart(Chart):
    """A chart of parallel axes, one for each setting or result. Each run is a line through its values on the axes."""

    runs: list[str]
    best: int
    axes: list[Axis]

    @property
    def description(self) -> str:
        """The values of each run, for readers who cannot see the chart."""
        lines = (
            f"{run}: {', '.join(f'{axis.name} {axis.texts[index]}' for axis in self.axes)}"
            for index, run in enumerate(self.runs)
        )
        return f"{self.title}. {'; '.join(lines)}."

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for the page, as other charts do."""
        runs = [
            {"name": name, "run": index, "hue": index % COLOURS, "raw": False, "index": index}
            for index, name in enumerate(self.runs)
        ]
        lines = [
            {"curve": run["run"], "run": run["run"], "hue": run["hue"], "axis": axis.name, "height": height}
            | {"width": 3.2 if run["run"] == self.best else 1.4}
            for axis in self.axes
            for run, height in zip(runs, axis.heights, strict=True)
            if height is not None
        ]
        labels = [
            {"curve": -1, "run": -1, "axis": axis.name, "height": height, "label": label}
            for axis in self.axes
            for label, height in axis.ticks.items()
        ]
        return {
            **{"name": self.name, "title": self.title, "unit": self.unit, "large": True, "has_steps": False},
            **{"first": "linear", "specifications": {"linear": self._specification("linear")}},
            **{"curves": runs, "points": [*lines, *labels]},
        }

    def _specification(self, form: str) -> dict[str, Any]:
        of_axis = {"orient": "top", "labelAngle": 0, "labelLimit": 180, "domain": False, "grid": True}
        x = {
            **{"field": "axis", "type": "nominal", "title": None, "sort": [axis.name for axis in self.axes]},
            **{"scale": {"type": "point", "padding": 0.45}, "axis": of_axis},
        }
        y = {"field": "height", "type": "quantitative", "axis": None, "scale": {"domain": [-0.05, 1.1], "nice": False}}
        width = {"field": "width", "type": "quantitative", "scale": None, "legend": None}
        lines = {
            "transform": [{"filter": "!isValid(datum.label)"}],
            "mark": {"type": "line", "strokeJoin": "round"},
            "encoding": {"y": y, "strokeWidth": width},
        }
        quiet = {"value": "var(--quiet)"}
        labels = {
            "transform": [{"filter": "isValid(datum.label)"}],
            "mark": {"type": "text", "align": "left", "dx": 7, "fontSize": 11},
            "encoding": {"y": y, "text": {"field": "label", "type": "nominal"}, "color": quiet},
        }
        return specify_chart(x, [lines, labels], height=260)


def parallel_charts(runs: Sequence[RecordedRun]) -> list[ParallelChart]:
    """Return the chart of three runs or more; none if they cannot be compared or their settings are the same."""
    best = best_run(runs) if len(runs) >= _FEWEST_RUNS else None
    changed = [row for row in compare_runs(runs) if row.part == "config"] if best else []
    if best is None or not changed:
        return []
    metric = metric_of(runs)
    axes = [_axis(row.name, row.values) for row in changed[:_MOST_SETTINGS]]
    axes.append(_axis(f"validation {metric}", [best_value(run, runs) for run in runs]))
    chart = ParallelChart(
        name="parallel",
        title="Settings and result",
        unit="a line for each run, the best one bold",
        curves=[],
        runs=[run.name for run in runs],
        best=list(runs).index(best),
        axes=axes,
        is_large=True,
    )
    return [chart]


def _axis(name: str, values: Sequence[Any]) -> Axis:
    """Place numbers on a linear or logarithmic axis, and other values at equal distances."""
    texts = [format_number(value) if isinstance(value, float) else visible(format_value(value)) for value in values]
    numbers = [float(value) for value in values if type(value) in (int, float) and math.isfinite(value)]
    is_numeric = len(numbers) == sum(value is not None for value in values) and bool(numbers)
    if not is_numeric:
        order = {text: index for index, text in enumerate(sorted(set(texts)))}
        ticks = {text: index / max(1, len(order) - 1) for text, index in order.items()}
        return Axis(visible(name), texts, [ticks[text] for text in texts], ticks)
    low, high = min(numbers), max(numbers)
    is_log = low > 0 and high / low > LOG_FROM_RATIO

    def height_of(value: float) -> float:
        """Map low to 0 and high to 1."""
        if low == high:
            return 0.5
        return math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)

    heights = [None if value is None else height_of(value) for value in values]
    distinct = sorted(set(numbers))
    shown = distinct if len(distinct) <= _MOST_TICKS else (low, high)
    return Axis(visible(name), texts, heights, {format_number(value): height_of(value) for value in shown})
