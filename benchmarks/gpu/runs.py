"""Whole runs of an engine on a job, for the parts `peers`, `phi4`, `gains`, `qlora` and `full`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.base_model import write_base_without_weights, write_wide_base
from benchmarks.clock import RankReport, forget_peak
from benchmarks.engines.ours import words as words_of_job
from benchmarks.gpu.session import Kind, Session, kept_folder
from benchmarks.job import Job
from benchmarks.machine import device_name
from benchmarks.summary import figures_of
from benchmarks.worker import Order, carry_out

if TYPE_CHECKING:
    from finetune.diagnose.plan import Plan


def train(
    session: Session,
    *,
    engine: str,
    kind: Kind,
    words: Sequence[str] = (),
    method: Literal["lora", "full"] = "lora",
    reads_weights: bool = False,
    compares_with_plan: bool = False,
    gigabytes: int | None = None,
) -> dict[str, Any]:
    """Train a job with an engine in this process, with weights that are made on the device.

    Args:
        session: where to compute.
        engine: a key of `benchmarks.engines.ENGINES`.
        kind: of the job.
        words: settings of ours.
        method: of ours.
        reads_weights: write the weights to the disk first, and let the engine read them, as QLoRA must.
        compares_with_plan: predict the peak of memory as `finetune plan` does, too.
        gigabytes: of a card. On CUDA, the run may use only as much memory as `finetune plan` knows of this card.
    """
    if gigabytes is not None and session.device == "cuda":
        words = [*words, f"training.memory_fraction={_fraction(gigabytes)}"]
    job = replace(session.job(kind), method=method)
    with TemporaryDirectory() as folder:
        base = _with_weights(job) if reads_weights else Path(folder) / "base"
        if not reads_weights:
            write_base_without_weights(job, base)
        order = Order(
            engine=engine, words=tuple(words), job=job, base=str(base), folder=folder, has_weights=reads_weights
        )
        plan = plan_of(order) if compares_with_plan else None
        forget_peak(session.device)
        report = carry_out(order)
        low_precision = _low_precision(Path(folder))
    figures = {"job": job.name, **_figures(job, report), **low_precision, **against_plan(session, report, plan)}
    if method == "full" and (peak_rate := _peak_flops(session)) is not None:
        figures["mfu"] = figures["flops_per_second"] / peak_rate
    return figures


@cache
def _with_weights(job: Job) -> Path:
    """Write a base with weights, once for all tasks of this process."""
    folder = kept_folder() / job.size
    write_wide_base(job, folder)
    return folder


def against_plan(session: Session, report: RankReport, plan: Plan | None) -> dict[str, float]:
    """Compare the peaks of memory with the planned ones; resident memory holds more than a plan counts."""
    if plan is None or plan.peak is None:
        return {}
    figures = {"planned_peak_bytes": plan.peak.total}
    measured = {"peak_over_plan": report.timed_peak_memory / plan.peak.total}
    if plan.loading is not None:
        figures |= {"planned_loading_bytes": plan.loading, "loading_peak_bytes": report.loading_peak_memory}
        measured["loading_over_plan"] = report.loading_peak_memory / plan.loading
    return {**figures, **(measured if session.device == "cuda" else {})}


def _fraction(gigabytes: int) -> float:
    """Return the fraction of this GPU's memory that a card has."""
    from finetune.diagnose.plan_devices import find_device, read_device

    return read_device(f"GPU {gigabytes}GB").memory / find_device("cuda").memory


def _low_precision(folder: Path) -> dict[str, float]:
    """Return what a base in fp8 or NF4 changes, as the run measured it before its first step."""
    record = folder / "run" / "run.json"
    measured = json.loads(record.read_text()).get("low_precision") if record.exists() else None
    names = ("num_layers", "base_loss", "loss", "gradient_error")
    return {f"{measured['precision']}_{name}": measured[name] for name in names} if measured else {}


def _peak_flops(session: Session) -> float | None:
    """Return the operations per second in bf16 that the maker of a GPU names, without sparsity; None if not known."""
    known = (rate for name, rate in _PEAKS.items() if name in (device_name(session.device) or ""))
    return next(known, None)


_PEAKS = {"H100": 989.5e12, "H200": 989.5e12}
"""NVIDIA's data sheets of the H100 and H200 (SXM), bf16 on tensor cores."""


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


def plan_of(order: Order, *, task: str = "finetune_lora") -> Plan:
    """Return what `finetune plan` predicts for a run with rows of one length."""
    from finetune.config.compose import compose
    from finetune.diagnose.plan_devices import find_device, read_device
    from finetune.diagnose.planner import make_plan

    config = compose([*words_of_job(order), *order.words], defaults={"task": task}, needs_data=False)
    # A plan refuses 4 bits on a CPU, where a tiny run only shows that the task works.
    is_elsewhere = config.lora.quantize != "none" and order.job.device == "cpu"
    device = read_device("H200") if is_elsewhere else find_device(order.job.device)
    return make_plan(config, device)
