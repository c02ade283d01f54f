"""Make the charts of the page: the curves of one run or several, as points and as Vega specifications.

Vega-Lite (Satyanarayan et al., 2017) is compiled when the report is written, so the page needs only Vega.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from finetune.report.sentences import format_number
from finetune.runs.metrics import FORGOTTEN, subset_key
from finetune.runs.metrics_reader import measured_beside_loss, subset_metrics_in
from finetune.runs.recorded_run import Points, RecordedRun, finite
from finetune.terminal import visible

MOST_POINTS = 1200
"""The most points of a curve: more cannot be seen, and would make a large page."""
COLOURS = 8
"""The number of hues in page.css."""
_SMOOTHED_FROM = 40
"""Curves with fewer points are not smoothed."""
LOG_FROM_RATIO = 50.0
"""An axis is logarithmic if its largest value is so many times the smallest one."""
_VEGA_LITE = "6.1"
_PER_GIB = 2.0**-30


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line. With `is_raw` it is faint, behind its smoothed copy; with `is_measured` it has a mark at each point."""

    name: str
    run: int
    hue: int
    points: Points
    errors: dict[int, float] = field(default_factory=dict)
    """The standard error, by step."""
    is_raw: bool = False
    is_measured: bool = False

    def drawn(self) -> Points:
        """Return the points to draw: all, or for a long curve the lowest and the highest of each interval."""
        points = finite(self.points)
        return points if len(points) <= MOST_POINTS else list(_extremes(points, MOST_POINTS // 2))


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves on common axes."""

    name: str
    title: str
    unit: str
    curves: list[Curve]
    starts_at_zero: bool = False
    is_large: bool = False

    @property
    def can_be_log(self) -> bool:
        """Whether a large chart can have a logarithmic axis: all its values are positive."""
        values = [value for curve in self.curves for _, value in curve.drawn()]
        return self.is_large and bool(values) and min(values) > 0

    @property
    def is_log_first(self) -> bool:
        """Whether the logarithmic axis is shown first, because a linear chart would be mostly empty."""
        values = [value for curve in self.curves for _, value in curve.drawn()]
        return self.can_be_log and max(values) / min(values) > LOG_FROM_RATIO

    @property
    def num_left_out(self) -> int:
        """The number of points of long curves that are not drawn."""
        return sum(len(finite(curve.points)) - len(curve.drawn()) for curve in self.curves)

    @property
    def not_finite(self) -> list[int]:
        """The steps with a NaN or infinite value, which cannot be drawn."""
        return sorted({step for curve in self.curves for step, value in curve.points if not math.isfinite(value)})

    @property
    def description(self) -> str:
        """The first and the last point of each curve, for readers who cannot see the chart."""
        drawn = ((curve.name, curve.drawn()) for curve in self.curves if not curve.is_raw)
        ends = [(name, points[0], points[-1]) for name, points in drawn if points]
        curves = (
            f"{name}: from {format_number(first[1])} at step {first[0]:,} "
            f"to {format_number(last[1])} at step {last[0]:,}"
            for name, first, last in ends
        )
        return f"{self.title}. {'; '.join(curves)}."

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for the page: specifications, curves and points."""
        forms = {"linear": self._specification("linear")}
        if self.can_be_log:
            forms["log"] = self._specification("log")
        return {
            "name": self.name,
            "title": self.title,
            "unit": self.unit,
            "large": self.is_large,
            "first": "log" if self.is_log_first else "linear",
            "has_steps": True,
            "specifications": forms,
            "curves": [
                {"name": curve.name, "run": curve.run, "hue": curve.hue, "raw": curve.is_raw, "index": index}
                for index, curve in enumerate(self.curves)
            ],
            "points": [point for index, curve in enumerate(self.curves) for point in _as_points(index, curve)],
        }

    def _specification(self, form: str) -> dict[str, Any]:
        points = [point for curve in self.curves for point in curve.drawn()]
        steps, values = [step for step, _ in points], [value for _, value in points]
        span = max(max(steps) - min(steps), 1)  # more ticks than steps would name a step twice
        ticks = {"format": ",d", "tickMinStep": 1, "tickCount": {"expr": f"min(max(3, floor(width / 90)), {span})"}}
        domain = {"domain": [min(steps), min(steps) + span], "nice": False}
        x = {"field": "step", "type": "quantitative", "title": None, "scale": domain, "axis": ticks}
        axis: dict[str, Any] = {"format": "~s" if max(values) >= 1000 else "~g", "tickCount": 5}
        scale: dict[str, Any] = {"type": "linear", "nice": True, "zero": self.starts_at_zero}
        if form == "log":
            scale = {"type": "log", "domain": [min(values) / 1.15, max(values) * 1.15], "nice": False}
            axis["values"] = _round_numbers(min(values), max(values))
        y = {"field": "value", "type": "quantitative", "title": None, "scale": scale, "axis": axis}
        return specify_chart(x, list(self._layers(y)), height=300 if self.is_large else 150)

    def _layers(self, y: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the layers of the chart: raw curves, smoothed curves, error bars, and measured points."""
        for is_raw, width, opacity in ((True, 1, 0.35), (False, 1.8, 1)):
            if any(curve.is_raw == is_raw and not curve.is_measured for curve in self.curves):
                selection = {"filter": f"!datum.measured && {'' if is_raw else '!'}datum.raw"}
                mark = {"type": "line", "strokeWidth": width, "opacity": opacity, "strokeJoin": "round", "clip": True}
                yield {"transform": [selection], "mark": mark, "encoding": {"y": y}}
        if any(curve.errors for curve in self.curves):
            selection = {"filter": "datum.measured && isValid(datum.low)"}
            encoding = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
            mark = {"type": "rule", "strokeWidth": 1.2, "opacity": 0.6}
            yield {"transform": [selection], "mark": mark, "encoding": encoding}
        if any(curve.is_measured for curve in self.curves):
            line: dict[str, Any] = {"type": "line", "strokeWidth": 1.4, "strokeDash": [5, 3]}
            dots: dict[str, Any] = {"type": "point", "filled": True, "size": 38, "opacity": 1}
            for mark in (line, dots):
                yield {"transform": [{"filter": "datum.measured"}], "mark": mark, "encoding": {"y": y}}


def specify_chart(x: dict[str, Any], layers: Sequence[dict[str, Any]], *, height: int) -> dict[str, Any]:
    """Return layers on a common horizontal axis in Vega-Lite, for the points that the page puts into the chart."""
    hues = list(range(COLOURS))
    scale = {"domain": hues, "range": [f"var(--hue-{hue})" for hue in hues]}
    colour = {"field": "hue", "type": "nominal", "legend": None, "scale": scale}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "width": "container",
        "height": height,
        "background": None,
        "padding": {"left": 2, "right": 8, "top": 6, "bottom": 2},
        "data": {"name": "points"},
        "params": [{"name": "hidden", "value": []}],
        "transform": [{"filter": "indexof(hidden, datum.run) < 0"}],
        "encoding": {"x": x, "color": colour, "detail": {"field": "curve"}},
        "layer": layers,
        "config": _CONFIG,
    }


def compile_charts(charts: Sequence[dict[str, Any]]) -> str | None:
    """Compile the specifications of charts, each the record of a `Chart`, to Vega in place. Return Vega's own script.

    V8, which compiles them, ends its process if it may not reserve address space. So it runs in another one. None if
    that has ended: then nothing was compiled.
    """
    asked = [json.dumps(form) for chart in charts for form in chart["specifications"].values()]
    missing = [form for form in dict.fromkeys(asked) if form not in _compiled]
    if missing or not _vega:
        request = json.dumps([_VEGA_LITE, not _vega, missing])
        done = subprocess.run([sys.executable, "-P", "-c", _COMPILER], input=request.encode(), capture_output=True)
        if done.returncode:
            return None
        script, compiled = json.loads(done.stdout)
        _vega.extend(script)
        _compiled.update(zip(missing, compiled, strict=True))
    for chart in charts:
        forms = chart["specifications"].items()
        chart["specifications"] = {name: _compiled[json.dumps(form)] for name, form in forms}
    return _vega[0]


_vega: list[str] = []
"""Vega's script, once a page needed it: making it takes a second. It brings an interpreter and needs no `eval`."""
_compiled: dict[str, dict[str, Any]] = {}
"""What each specification of a page became. Charts over the same steps often have the same one."""
_COMPILER = """
import json, sys, vl_convert
version, needs_script, forms = json.load(sys.stdin)
compiled = [vl_convert.vegalite_to_vega(json.loads(form), vl_version=version) for form in forms]
script = [vl_convert.javascript_bundle("window.finetuneVega = vegaEmbed;")] if needs_script else []
json.dump([script, compiled], sys.stdout)
"""
_LABELS = {"labelColor": "var(--quiet)", "labelFontSize": 11, "labelPadding": 6}
_CONFIG: dict[str, Any] = {
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {**_LABELS, "gridColor": "var(--line)", "ticks": False, "domain": False},
    "axisX": {"grid": False, "domain": True, "domainColor": "var(--line-strong)", "labelFlush": True},
}


_OF_ANSWERS = (
    ("reward_std", "Spread of rewards", "standard deviation in a group, mean over groups"),
    ("equal_groups", "Groups of equal rewards", "share of prompts"),
    ("answer_length", "Length of answers", "tokens"),
    ("truncated", "Truncated answers", "share of answers"),
    ("drawn_entropy", "Entropy of all answers", "nats per token, as drawn"),
    ("entropy", "Entropy", "nats per token of answers with an advantage"),
    ("clipped", "Clipped ratios", "share of tokens"),
    ("kl", "KL divergence from the reference", "nats"),
    ("largest_ratio", "Largest ratio", "new to old probability of a token"),
    ("largest_drawn_ratio", "Largest ratio to drawing", "probability when training to that when drawn"),
    ("turns", "Turns", "mean over conversations"),
    ("calls", "Calls of tools", "mean over conversations"),
    ("failed_calls", "Failed calls", "share of calls"),
)
"""Metrics of steps, each with the title and the unit of its chart."""


def build_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Make every chart for which a run has points."""
    objectives = list(dict.fromkeys(run.objective for run in runs))
    units = {objective.unit for objective in objectives}
    unit = units.pop() if len(units) == 1 else "; ".join(f"{each.name}: {each.unit}" for each in objectives)
    is_labelled = any(each.reads_labels for each in objectives)
    shares, margin = ("share of rows", "good minus bad") if is_labelled else ("share of pairs", "chosen minus rejected")
    charts = [
        Chart(name="loss", title="Loss", unit=unit, curves=list(_losses(runs)), is_large=True),
        _chart(runs, "reward-accuracy", "Reward accuracy", shares, "step", "reward_accuracy"),
        _chart(runs, "reward-margin", "Reward margin", margin, "step", "reward_margin"),
        *_rewards(runs),
        *_metrics(runs),
        *_subsets(runs, unit),
        _chart(runs, "learning-rate", "Learning rate", "", "step", "learning_rate", smooth=False),
        _chart(runs, "grad-norm", "Gradient norm", "before clipping", "step", "grad_norm"),
        _chart(runs, "throughput", "Throughput", "tokens per second", "step", "tokens_per_second"),
        *_resources(runs),
    ]
    return [chart for chart in charts if any(curve.drawn() for curve in chart.curves)]


def _rewards(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield the charts of runs that learn from rewards: the rewards first, then what the answers are like."""
    prefix = "reward_"
    learning = [run for run in runs if run.objective.generates_answers]
    names = [name for name in _measured(learning) if name.startswith(prefix)]
    yield _chart(runs, "reward", "Reward", "weighted sum, mean over answers", "step", "reward")
    for index, name in enumerate(names):
        yield _chart(runs, f"reward-{index}", visible(name.removeprefix(prefix)), "mean over answers", "step", name)
    for name, title, unit in _OF_ANSWERS:
        yield _chart(runs, name.replace("_", "-"), title, unit, "step", name)


def _metrics(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield a chart of each metric of answers that was measured in validations."""
    for index, name in enumerate(_measured(runs)):
        if not any(run.points("step", name) for run in runs):  # rewards have a chart by steps
            title = visible(name).replace("_", " ").capitalize()
            unit = "nats per token" if name == FORGOTTEN else "mean over answers"
            yield _chart(runs, f"metric-{index}", title, unit, "validation", name, smooth=False)


def _measured(runs: Sequence[RecordedRun]) -> dict[str, None]:
    """Return the names of the metrics that validations measured beside the loss, each once."""
    return dict.fromkeys(name for run in runs for event in run.of("validation") for name in measured_beside_loss(event))


def _subsets(runs: Sequence[RecordedRun], unit: str) -> Iterator[Chart]:
    """Yield a chart of each metric that validations measured for each source, with a curve for each of them."""
    names = dict.fromkeys(name for run in runs for event in run.of("validation") for name in subset_metrics_in(event))
    for index, metric in enumerate(dict.fromkeys(name.partition("/")[0] for name in names)):
        subsets = [name.partition("/")[2] for name in names if name.partition("/")[0] == metric]
        curves = [
            _validated(
                run,
                place,
                visible(subset) if len(runs) == 1 else f"{run.name}: {visible(subset)}",
                (number if len(runs) == 1 else place) % COLOURS,
                subset_key(metric, subset),
                error=subset_key("standard_error", subset) if metric == "loss" else "",
            )
            for place, run in enumerate(runs)
            for number, subset in enumerate(subsets)
        ]
        title = "Validation loss" if metric == "loss" else visible(metric).replace("_", " ").capitalize()
        unit_of_metric = unit if metric == "loss" else "mean over answers"
        yield Chart(
            name=f"sources-{index}", title=f"{title} of each source", unit=unit_of_metric, curves=curves, is_large=True
        )


def smoothed(points: Points) -> Points:
    """Return the mean of a twentieth of the curve around each point, equally to both sides, so that it does not lag."""
    sums = [0.0, *accumulate(value for _, value in points)]  # sums[b] - sums[a] is the sum of the values a to b - 1
    reach = max(1, len(points) // 40)
    means = []
    for index, (step, _) in enumerate(points):
        half = min(reach, index, len(points) - 1 - index)
        means.append((step, (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)))
    return means


def _losses(runs: Sequence[RecordedRun]) -> Iterator[Curve]:
    is_alone = len(runs) == 1
    for index, run in enumerate(runs):
        name = "" if is_alone else f"{run.name}: "
        hue = 0 if is_alone else index % COLOURS
        yield from _raw_and_smoothed(run.points("step", "loss"), f"{name}training", index, hue)
        if run.points("validation", "loss"):
            hue = 1 if is_alone else hue
            yield _validated(run, index, f"{name}validation", hue, "loss", error="standard_error")


def _validated(run: RecordedRun, index: int, name: str, hue: int, metric: str, *, error: str) -> Curve:
    """Return the curve of a metric of validations. `error` names its standard error; empty for none."""
    points, errors = run.points("validation", metric), dict(finite(run.points("validation", error)))
    return Curve(name=name, run=index, hue=hue, points=points, errors=errors, is_measured=True)


def _raw_and_smoothed(points: Points, name: str, run: int, hue: int) -> Iterator[Curve]:
    """Yield a short curve as it is, or a long one twice: raw and smoothed."""
    if len(finite(points)) < _SMOOTHED_FROM:
        yield Curve(name=name, run=run, hue=hue, points=points)
        return
    yield Curve(name=name, run=run, hue=hue, points=points, is_raw=True)
    yield Curve(name=f"{name}, smoothed", run=run, hue=hue, points=smoothed(finite(points)))


def _chart(
    runs: Sequence[RecordedRun],
    name: str,
    title: str,
    unit: str,
    event: str,
    metric: str,
    *,
    smooth: bool = True,
    factor: float = 1.0,
) -> Chart:
    """Return a chart of one metric of an event, with a curve for each run. Values are multiplied by `factor`."""
    curves: list[Curve] = []
    for index, run in enumerate(runs):
        points = [(step, value * factor) for step, value in run.points(event, metric)]
        curve_name = title.lower() if len(runs) == 1 else run.name
        hue = index % COLOURS
        if smooth:
            curves += _raw_and_smoothed(points, curve_name, index, hue)
        else:
            curves.append(Curve(name=curve_name, run=index, hue=hue, points=points))
    return Chart(name=name, title=title, unit=unit, curves=curves, starts_at_zero=True)


def _resources(runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    """Yield the charts of memory and waiting, from `resources` events."""
    for name, title, unit, metric, factor in (
        ("device-memory", "Memory of the accelerator", "GiB, the most so far", "device_memory", _PER_GIB),
        ("host-memory", "Memory of the process", "GiB, the most so far", "host_memory", _PER_GIB),
        ("data-wait", "Waiting for data", "% of the time", "data_wait_share", 100.0),
        ("slowest-rank", "Waiting for the slowest rank", "% of the time", "slowest_rank_share", 100.0),
    ):
        yield _chart(runs, name, title, unit, "resources", metric, smooth=False, factor=factor)


def _as_points(index: int, curve: Curve) -> Iterator[dict[str, Any]]:
    for step, value in curve.drawn():
        point = {"curve": index, "run": curve.run, "hue": curve.hue, "step": step, "value": _short(value)}
        if curve.is_raw:
            point["raw"] = True
        if curve.is_measured:
            point["measured"] = True
            if (error := curve.errors.get(step)) is not None and 0 < value - error < value + error < math.inf:
                point |= {"low": _short(value - error), "high": _short(value + error)}
        yield point


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _round_numbers(low: float, high: float) -> list[float]:
    """Return the powers of ten in a range, and if they are few, also 2 and 5 times each."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 3 else (1, 2, 5)
    return [float(f"{factor}e{power}") for power in range(first, last + 1) for factor in factors]


def _extremes(points: Points, num_intervals: int) -> Iterator[tuple[int, float]]:
    """Yield the lowest and the highest point of each interval, in ascending steps."""
    for index in range(num_intervals):
        interval = points[len(points) * index // num_intervals : len(points) * (index + 1) // num_intervals]
        yield from sorted({min(interval, key=lambda p: p[1]), max(interval, key=lambda p: p[1])})
