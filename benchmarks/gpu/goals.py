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
    against: str = ""
    """The beginning of the names of tasks: the figure is divided by the best of the others."""
    unit: float = 1
    """The figure is divided by it, too."""


_RATE, _MEMORY = "median_tokens_per_second", "timed_peak_allocated_bytes"
GOALS = (
    Goal("phi-4, rows of 4,096 tokens, tokens per second", "phi4/defaults", _RATE, 8_200),
    Goal("Phi-4-mini, rows of 4,096 tokens, tokens per second", "peers/mini/ours", _RATE, 28_000),
    Goal("Phi-4-mini, chat rows, divided by the fastest peer", "peers/chat/ours", _RATE, 1.5, against="peers/chat/"),
    Goal("phi-4, peak memory divided by the plan's", "phi4/plain", "peak_over_plan", 0.9, 1.1),
    Goal(
        "phi-4 with checkpointing, peak memory divided by the plan's", "phi4/checkpointed", "peak_over_plan", 0.9, 1.1
    ),
    Goal("phi-4 on a base in fp8, rows of 4,096 tokens, tokens per second", "phi4/fp8", _RATE, 12_900),
    Goal("phi-4 on a base in fp8, error of the gradient", "phi4/fp8", "fp8_gradient_error", 0, 0.201),
    Goal("Phi-4-mini, a micro-batch of 1,024 tokens, milliseconds", "profile/1024", "median_ms", 0, 90),
    Goal(
        "Phi-4-mini, a micro-batch of 1,024 tokens in a run, milliseconds",
        "profile/1024-train",
        "median_step_ms",
        0,
        45,
        unit=4,  # micro-batches of a step, whose optimizer counts too
    ),
    Goal(
        "GRPO on Phi-4-mini, update, distinct tokens per second",
        "rewards/update",
        "median_distinct_tokens_per_second",
        20_000,
    ),
    Goal("GRPO on Phi-4-mini, whole step with 64 answers, tokens per second", "rewards/step-graphs", _RATE, 9_000),
    Goal("a token of 64 answers of Phi-4-mini, milliseconds", "rewards/graph-64", "ms_per_token", 0, 9),
    Goal("a token of one answer of Phi-4-mini, milliseconds", "rewards/graph-1", "ms_per_token", 0, 5),
    Goal("QLoRA on phi-4, one row in a micro-batch, tokens per second", "qlora/one-row", _RATE, 8_400),
    Goal("QLoRA on phi-4, one row in a micro-batch, peak memory in GB", "qlora/one-row", _MEMORY, 0, 42, unit=1e9),
    Goal("QLoRA on phi-4 within 12 GB, tokens per second", "qlora/least-12gb", _RATE, 6_000),
    Goal("QLoRA on phi-4 within 12 GB, peak memory in GB", "qlora/least-12gb", _MEMORY, 0, 11.4, unit=1e9),
    Goal(
        "QLoRA on phi-4 within 12 GB, peak memory of the whole run in GB",
        "qlora/least-12gb",
        "peak_allocated_bytes",
        0,
        11.4,
        unit=1e9,
    ),
    Goal("full fine-tuning of Phi-4-mini, MFU", "full/mini", "mfu", 0.45),
    Goal("full fine-tuning of Phi-4-mini, peak memory in GB", "full/mini", _MEMORY, 0, 48, unit=1e9),
    Goal("two GPUs with DDP, divided by two of one", "ranks/ddp", "times_as_fast", 0.97, unit=2),
    Goal("two GPUs with FSDP2, divided by two of one", "ranks/fsdp2", "times_as_fast", 0.95, unit=2),
)


def standings(figures: Figures) -> Iterator[str]:
    """Say for each goal where the figures stand."""
    for goal in GOALS:
        range_ = f"{goal.low:g} to {goal.high:g}" if goal.low else f"at most {goal.high:g}"
        asked = f"at least {goal.low:,g}" if goal.high == math.inf else range_
        yield f"{goal.what}: {_reached(figures, goal)} (goal: {asked})"


def _reached(figures: Figures, goal: Goal) -> str:
    mine = _figure(figures, goal.task, goal.figure)
    if mine is None:
        return "not measured yet"
    if not goal.against:
        return f"{mine / goal.unit:,.4g}"
    peers = dict.fromkeys(
        record["task"]
        for record in figures.records
        if record["task"].startswith(goal.against) and record["task"] != goal.task
    )
    rates = {task: value for task in peers if (value := _figure(figures, task, goal.figure)) is not None}
    if not rates:
        return "no peer measured yet"
    best = max(rates, key=rates.__getitem__)
    return f"{mine / rates[best]:,.4g} against `{best.removeprefix(goal.against)}`, of {len(rates)} measured"


def _figure(figures: Figures, task: str, name: str) -> float | None:
    found = (figures.last(task) or {}).get("figures", {})
    value = None if found.get("ranks_share_a_gpu") else found.get(name)  # the times of a shared GPU mean nothing
    return None if value is None else float(value)
