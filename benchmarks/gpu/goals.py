"""The figures to reach on an H200. They are goals: benchmarks/README.md says what has been measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.gpu.figures import Figures


class Goal(NamedTuple):
    """A figure to reach."""

    what: str
    task: str
    figure: str
    low: float
    high: float = math.inf
    against: tuple[str, ...] = ()
    """Tasks: the figure is divided by the best of theirs."""


_RATE = "median_tokens_per_second"
GOALS = (
    Goal("phi-4, rows of 4,096 tokens, tokens per second", "phi4/defaults", _RATE, 8_200),
    Goal("Phi-4-mini, rows of 4,096 tokens, tokens per second", "peers/mini/ours", _RATE, 28_000),
    Goal(
        "Phi-4-mini, chat rows, divided by the faster TRL with Liger",
        "peers/chat/ours",
        _RATE,
        1.5,
        against=("peers/chat/trl-grouped-16-liger", "peers/chat/trl-packed-flash-liger"),
    ),
    Goal("phi-4, peak memory divided by the plan's", "phi4/plain", "peak_over_plan", 0.9, 1.1),
    Goal(
        "phi-4 with checkpointing, peak memory divided by the plan's", "phi4/checkpointed", "peak_over_plan", 0.9, 1.1
    ),
)


def standings(figures: Figures) -> Iterator[str]:
    """Say for each goal where the figures stand."""
    for goal in GOALS:
        value = _value(figures, goal)
        asked = f"at least {goal.low:,g}" if goal.high == math.inf else f"{goal.low:g} to {goal.high:g}"
        yield f"{goal.what}: {'not measured yet' if value is None else f'{value:,.4g}'} (goal: {asked})"


def _value(figures: Figures, goal: Goal) -> float | None:
    mine = _figure(figures, goal.task, goal.figure)
    if mine is None or not goal.against:
        return mine
    theirs = [value for task in goal.against if (value := _figure(figures, task, goal.figure)) is not None]
    return mine / max(theirs) if theirs else None


def _figure(figures: Figures, task: str, name: str) -> float | None:
    record = figures.last(task) or {}
    value = record.get("figures", {}).get(name)
    return None if value is None else float(value)
