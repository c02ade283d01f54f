"""Whole runs of an engine on a job, for the parts `peers`, `phi4` and `gains`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.base_model import write_base_without_weights
from benchmarks.clock import RankReport, forget_peak
from benchmarks.engines.ours import words as words_of_job
from benchmarks.gpu.session import Kind, Session
from benchmarks.job import Job
from benchmarks.summary import figures_of
from benchmarks.worker import Order, carry_out


def train(
    session: Session, *, engine: str, kind: Kind, words: Sequence[str] = (), compares_with_plan: bool = False
) -> dict[str, Any]:
    """Train a job with an engine in this process, with weights that are made on the device.

    Args:
        session: where to compute.
        engine: a key of `benchmarks.engines.ENGINES`.
        kind: of the job.
        words: settings of ours.
        compares_with_plan: predict the peak of memory as `finetune plan` does, too.
    """
    job = session.job(kind)
    with TemporaryDirectory() as folder:
        write_base_without_weights(job, Path(folder) / "base")
        base = str(Path(folder) / "base")
        order = Order(engine=engine, words=tuple(words), job=job, base=base, folder=folder, has_weights=False)
        planned = _planned_peak(order) if compares_with_plan else None
        forget_peak(session.device)
        report = carry_out(order)
        record = Path(folder) / "run" / "run.json"
        fp8 = json.loads(record.read_text()).get("fp8") if record.exists() else None
    figures = {"job": job.name, **_figures(job, report)}
    if fp8 is not None:
        figures |= {f"fp8_{name}": fp8[name] for name in ("num_layers", "loss_bf16", "loss_fp8", "gradient_error")}
    if planned is not None:
        figures["planned_peak_bytes"] = planned
        if session.device == "cuda":  # resident memory holds more than a plan counts
            figures["peak_over_plan"] = report.timed_peak_memory / planned
    return figures


def _figures(job: Job, report: RankReport) -> dict[str, Any]:
    walls = [mark.wall for mark in report.marks]
    seconds = [after - before for before, after in pairwise(walls)]
    tokens = [sum(row.num_tokens for row in step) for step in report.rows[1:]]
    timed = slice(job.warmup_steps - 1, None)
    rates = [number / time for number, time in zip(tokens, seconds, strict=True)][timed]
    overall = figures_of(job, [report])
    return {
        "median_tokens_per_second": statistics.median(rates),
        "slowest_tokens_per_second": min(rates),
        "fastest_tokens_per_second": max(rates),
        "tokens_per_second": overall["tokens_per_second"],
        "flops_per_second": overall["flops_per_second"],
        "median_step_ms": 1e3 * statistics.median(seconds[timed]),
        "timed_steps": len(rates),
        "num_tokens": int(overall["num_tokens"]),
        "first_step_seconds": overall["first_step_seconds"],
        "first_loss": report.losses.get(1),
        "last_loss": report.losses.get(job.steps),
        "peak_allocated_bytes": report.peak_memory,
        "timed_peak_allocated_bytes": report.timed_peak_memory,
        "peak_reserved_bytes": report.peak_reserved,
    }


def _planned_peak(order: Order) -> int | None:
    """Return the peak of memory that `finetune plan` predicts for a run with rows of one length."""
    from finetune.config.compose import compose
    from finetune.diagnose.plan_devices import find_device
    from finetune.diagnose.planner import make_plan

    config = compose([*words_of_job(order), *order.words], defaults={"task": "finetune_lora"}, needs_data=False)
    peak = make_plan(config, find_device(order.job.device)).peak
    return None if peak is None else peak.total
