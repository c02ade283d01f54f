"""From what the ranks wrote to figures: one set a run, medians over rounds, ratios between runs of one round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.clock import RankReport
from benchmarks.flops import necessary_flops
from benchmarks.job import Job

Run = dict[str, Any]
"""One line of runs.jsonl: job (by name), engine, round, and `figures` or `error`."""


class Spread(NamedTuple):
    """Several measurements of one thing."""

    median: float
    deviation: float
    """The median absolute deviation: half of the measurements lie nearer to the median."""


class Goal(NamedTuple):
    """A figure that the project has set itself."""

    what: str
    job: str
    """`Job.name`."""
    figure: str
    against: str | None
    """The engine that ours is divided by; None for our figure itself."""
    at_least: bool
    value: float


_MEMORY, _FIRST, _RATE = "peak_memory_mib", "first_step_seconds", "tokens_per_cpu_second"
# "fused": measured only on models with one layer for q, k and v, and one for gate and up, as in phi3.
GOALS = (
    Goal("tokens per CPU second, `real`, fp32 (fused)", "real, fp32", _RATE, "trl-grouped-targets", True, 1.15),
    Goal("tokens per CPU second, `smollm2`, fp32", "smollm2, fp32", _RATE, "trl-1x16-targets", True, 2.5),
    Goal("tokens per CPU second, `smollm2`, bf16", "smollm2, bf16", _RATE, "unsloth", True, 1.5),
    Goal("tokens per CPU second, `qwen2`, fp32", "qwen2, fp32", _RATE, "trl-1x16-targets", True, 1.5),
    Goal("tokens per CPU second, `phi2`, fp32", "phi2, fp32", _RATE, "trl-1x16-targets", True, 1.5),
    Goal("tokens per CPU second, `s32k`, fp32 (fused)", "s32k, fp32", _RATE, "trl-grouped-targets", True, 1.7),
    Goal("tokens per CPU second, `s100k`, fp32 (fused)", "s100k, fp32", _RATE, "trl-grouped-targets", True, 1.8),
    Goal("tokens per CPU second, `real`, bf16 (fused)", "real, bf16", _RATE, "trl-1x16-targets", True, 1.4),
    Goal(
        "with a shared prompt, `real`, fp32 (fused)",
        "real, fp32, shared prompt",
        _RATE,
        "trl-grouped-targets",
        True,
        1.8,
    ),
    Goal("against TRL as it is, `s32k`, fp32 (fused)", "s32k, fp32", _RATE, "trl-grouped", True, 4.0),
    Goal("DPO on pairs, `real`, fp32 (fused)", "real, fp32, pairs", _RATE, "trl-dpo-targets", True, 1.8),
    Goal("peak memory, `real`, fp32 (fused)", "real, fp32", _MEMORY, "trl-grouped-targets", False, 0.40),
    Goal("peak memory, `smollm2`, fp32", "smollm2, fp32", _MEMORY, "trl-1x16-targets", False, 0.25),
    Goal("time to the first step, `real`, fp32 (fused)", "real, fp32", _FIRST, "trl-grouped-targets", False, 0.35),
    Goal("share of the matmul limit, `real`, fp32 (fused)", "real, fp32", "limit_share", None, True, 0.80),
)
ONE_TO_TWO = Goal("1 to 2 processes, tokens per second", "real, fp32", "tokens_per_second", None, True, 1.85)
HELP = Goal("`finetune --help`, seconds", "help", "seconds", None, False, 0.3)


def figures_of(job: Job, reports: Sequence[RankReport]) -> dict[str, float]:
    """What one run comes to. Rates are taken from the end of the warm-up to the end of the last step.

    Raises:
        ValueError: a rank has not done every step.
    """
    for report in reports:
        if len(report.marks) != job.steps:
            raise ValueError(f"rank {report.rank} did {len(report.marks)} optimizer steps of {job.steps}")
    timed = [row for report in reports for step in report.rows[job.warmup_steps :] for row in step]
    num_tokens = sum(row.num_tokens for row in timed)
    begins = [report.marks[job.warmup_steps - 1] for report in reports]
    ends = [report.marks[-1] for report in reports]
    cpu = sum(end.cpu - begin.cpu for begin, end in zip(begins, ends, strict=True))
    wall = max(end.wall for end in ends) - max(begin.wall for begin in begins)
    return {
        "tokens_per_cpu_second": num_tokens / cpu,
        "tokens_per_second": num_tokens / wall,
        "first_step_seconds": max(report.marks[0].wall for report in reports),
        "first_step_cpu_seconds": sum(report.marks[0].cpu for report in reports),
        "total_seconds": max(report.finished for report in reports),
        "peak_memory_mib": sum(report.peak_memory for report in reports) / 2**20,
        "flops_per_second": necessary_flops(job.shape, timed, trains_all=job.method == "full")
        / (wall if job.device == "cuda" else cpu),
        "num_tokens": float(num_tokens),
    }


def loss_difference(
    reports: Sequence[RankReport], row_losses: dict[int, tuple[float, int]], *, first: float | None = None
) -> float:
    """How far the first step's loss is from that of the base model on the same rows, relative; nan if unknown.

    Args:
        reports: of all ranks.
        row_losses: nats and targets of rows under the base model.
        first: the loss itself, where it does not depend on the rows: log 2 for pairs, before anything is learnt.
    """
    numbers = [number for report in reports for number in report.first_rows]
    losses = [report.losses[1] for report in reports if 1 in report.losses]
    if losses and first is not None:
        return abs(losses[0] - first) / first
    if not numbers or not losses:
        return math.nan
    nats, targets = (sum(row_losses[number][part] for number in numbers) for part in (0, 1))
    return abs(losses[0] - nats / targets) / (nats / targets)


def spread(values: Iterable[float]) -> Spread | None:
    """Median and median absolute deviation, None of nothing."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return None
    median = statistics.median(known)
    return Spread(median, statistics.median(abs(value - median) for value in known))


def over_rounds(runs: Iterable[Run], job: str, engine: str, figure: str) -> dict[int, float]:
    """A figure of one engine, by round; runs that failed are left out."""
    return {
        run["round"]: run["figures"][figure]
        for run in runs
        if (run["job"], run["engine"]) == (job, engine) and figure in run.get("figures", {})
    }


def limit_shares(runs: Sequence[Run], job: str, engine: str) -> dict[int, float]:
    """The part of the matmul limit, measured in the same round, that an engine reaches."""
    return _divided(
        over_rounds(runs, job, engine, "flops_per_second"), over_rounds(runs, job, "limit", "flops_per_second")
    )


def paired_ratios(runs: Sequence[Run], job: str, figure: str, engine: str, against: str) -> dict[int, float]:
    """One engine's figure divided by another's in the same round."""
    return _divided(over_rounds(runs, job, engine, figure), over_rounds(runs, job, against, figure))


def reached(runs: Sequence[Run], goal: Goal, ours: str = "ours") -> Spread | None:
    """Where we stand on a goal; None where nothing was measured."""
    if goal is ONE_TO_TWO:
        two = over_rounds(runs, f"{goal.job}, 2 processes", ours, goal.figure)
        return spread(_divided(two, over_rounds(runs, goal.job, ours, goal.figure)).values())
    if goal is HELP:
        return spread(over_rounds(runs, goal.job, "help", goal.figure).values())
    if goal.figure == "limit_share":
        return spread(limit_shares(runs, goal.job, ours).values())
    if goal.against is None:
        return spread(over_rounds(runs, goal.job, ours, goal.figure).values())
    return spread(paired_ratios(runs, goal.job, goal.figure, ours, goal.against).values())


def in_order(runs: Iterable[Run], key: Callable[[Run], str]) -> list[str]:
    """The values of a key, each once, as they first come."""
    return list(dict.fromkeys(key(run) for run in runs))


def _divided(above: dict[int, float], below: dict[int, float]) -> dict[int, float]:
    return {number: above[number] / below[number] for number in above if number in below}
