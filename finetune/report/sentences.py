"""Describe the result of runs in sentences, and collect the values that the page shows of each run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from finetune.runs.best_validation import best_validation
from finetune.runs.comparison import compare_runs
from finetune.runs.metrics import sign_of
from finetune.runs.recorded_run import ENDED_EARLY, RecordedRun, finite
from finetune.units import format_duration, name_first

_NOT_COMPLETED = {
    ENDED_EARLY: "Its sweep ended it early",
    "failed": "It failed",
    "stopped": "It was stopped from the keyboard",
    "preempted": "It was preempted and saved a checkpoint",
}
_LONGEST_REASON = 300


def second_line(runs: Sequence[RecordedRun]) -> str:
    """Return why a run failed, or what differs between several runs. May be empty."""
    if len(runs) == 1:
        run = runs[0]
        reason = run.why or ""
        return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}…"
    if len(_validation_rows(runs)) > 1:
        return "They were validated on different rows: their losses cannot be compared."
    if len(_losses(runs)) > 1:
        objectives = list(dict.fromkeys(run.objective.name for run in runs))
        difference = " and ".join(objectives) if len(objectives) > 1 else f"{objectives[0]} with other settings"
        return f"They minimise different losses ({difference}), which cannot be compared."
    changed = [row for row in compare_runs(runs) if row.part == "config"]
    names = name_first([row.name for row in changed], 4)
    return f"Their settings differ in {names}." if changed else "Their settings are the same."


def summarize_run(run: RecordedRun) -> dict[str, Any]:
    """Collect the values that the page shows first. None or an empty text if the run did not record them."""
    losses = finite(run.points("step", "loss"))
    epochs = finite(run.points("step", "epoch"))
    speeds = [value for _, value in finite(run.points("step", "tokens_per_second"))]
    return {
        "steps": _count(run),
        "best_validation": best_validation(run),
        "first_loss": losses[0][1] if losses else None,
        "last_loss": losses[-1][1] if losses else None,
        "base": run.scores().get("base", {}),
        "tuned": run.scores().get("tuned", {}),
        "tested_split": run.tested_split,
        "rows_of_test_loss": run.rows_of_test_loss,
        "epoch": int(epochs[-1][1]) + 1 if epochs else None,
        "tokens": run.num_tokens,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "time": _took(run),
        "processes": run.record.get("world_size"),
    }


def best_run(runs: Sequence[RecordedRun]) -> RecordedRun | None:
    """Return the run with the best validation by `metric_of`; None if the runs cannot be compared."""
    if len(runs) < 2 or len(_validation_rows(runs)) > 1 or len(_losses(runs)) > 1:
        return None
    known = [run for run in runs if best_value(run, runs) is not None]
    return max(known, key=lambda run: sign_of(metric_of(runs)) * (best_value(run, runs) or 0.0), default=None)


def metric_of(runs: Sequence[RecordedRun]) -> str:
    """Return the metric by which runs choose their best weights; the loss if they do not have it in common."""
    names = {run.config.checkpoint.best_metric if run.config else "loss" for run in runs}
    return names.pop() if len(names) == 1 else "loss"


def best_value(run: RecordedRun, runs: Sequence[RecordedRun]) -> float | None:
    """Return the best value of a run's validations by `metric_of`; None without one."""
    best = best_validation(run, metric_of(runs))
    return best and best[1]


def format_number(value: float) -> str:
    """Write a number with four significant digits."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(fraction: float) -> str:
    """Write a fraction as `95.5 %` or `93 %`."""
    return f"{100 * fraction:.1f}".removesuffix(".0") + " %"


def _of_one(run: RecordedRun) -> str:
    steps = _steps(run)
    state = ENDED_EARLY if run.state == ENDED_EARLY else run.status
    if state in _NOT_COMPLETED:
        where = f"at step {run.last_step:,}" if run.last_step else "before its first step"
        change = _fall(run, "step")
        return f"{_NOT_COMPLETED[state]} {where}" + (f": {change}." if change else ".")
    if run.status != "completed":
        known = {"running": "It has not ended", "stopped": "It ended without recording how"}
        doing = known.get(run.state, "It is not known how it ended")
        change = _fall(run, "step")
        return f"{doing}: {change} in {steps}." if change else f"{doing}, and no step is recorded."
    scores = run.scores()
    base, tuned, score = scores.get("base", {}), scores.get("tuned", {}), score_of_headline([run])
    if score == "exact_match":
        before = f" The base model: {percent(base['exact_match'])}." if "exact_match" in base else ""
        return (
            f"{percent(tuned['exact_match'])} of its answers on the {run.tested_split} split are exactly right.{before}"
        )
    if score == "loss":
        change = _change(f"Loss on the {run.tested_split} split", base["loss"], tuned["loss"])
        rows = f", over {run.rows_of_test_loss}" if run.rows_of_test_loss else ""
        return f"{change}, from base to tuned model{rows}."
    change = _fall(run, "validation") or _fall(run, "step")
    return f"{change[0].upper()}{change[1:]} in {steps}." if change else f"It completed {steps}."


def score_of_headline(runs: Sequence[RecordedRun]) -> str:
    """Return the score of the tested split that the headline says, of base and tuned model; empty if it says none."""
    scores = runs[0].scores() if len(runs) == 1 and runs[0].status == "completed" else {}
    if "exact_match" in scores.get("tuned", {}):
        return "exact_match"
    return "loss" if all("loss" in scores.get(model, {}) for model in ("base", "tuned")) else ""


def headline(runs: Sequence[RecordedRun]) -> str:
    """Describe the result of one run, or of several, in one or two sentences."""
    if len(runs) == 1:
        return _of_one(runs[0])
    best, metric = best_run(runs), metric_of(runs)
    lead = best_value(best, runs) if best else None
    if best is None or lead is None:
        return f"{len(runs)} runs side by side."
    others = [value for run in runs if run is not best and (value := best_value(run, runs)) is not None]
    if not others:
        return f"{best.name} is the only one of {len(runs)} runs that was validated: {format_number(lead)}."
    sign = sign_of(metric)
    best_metric = f"{'highest' if sign > 0 else 'lowest'} {metric} in validations"
    distinction = "lowest validation loss" if metric == "loss" else best_metric
    next_best = sign * max(sign * value for value in others)
    return f"{best.name} has the {distinction}: {format_number(lead)}. The next best has {format_number(next_best)}."


def _validation_rows(runs: Sequence[RecordedRun]) -> set[str]:
    """Return the digests of the rows on which runs were validated."""
    digests = (run.part("fingerprints").get("data.validation") for run in runs)
    return {str(digest) for digest in digests if digest}


def _losses(runs: Sequence[RecordedRun]) -> set[tuple[object, ...]]:
    """Return the losses that runs minimise: each an objective with the settings that it reads.

    A run that learns from rewards validates greedy answers, which do not depend on `grpo` and `rollout`.
    """
    losses: set[tuple[object, ...]] = set()
    for run in runs:
        keys = [key for key in run.objective.keys if key not in ("grpo", "rollout")]
        losses.add((run.objective.name, *(run.config and str(attrgetter(key)(run.config)) for key in keys)))
    return losses


def _fall(run: RecordedRun, event_type: str) -> str:
    """Describe how the loss has changed over steps or validations, or the reward: its loss is near 0 in each step."""
    metric = "reward" if run.objective.generates_answers else "loss"
    points = finite(run.points(event_type, metric))
    name = f"{'training' if event_type == 'step' else event_type} {metric}"
    return _change(name, points[0][1], points[-1][1]) if len(points) > 1 else ""


def _change(name: str, before: float, after: float) -> str:
    if format_number(before) == format_number(after):
        return f"{name} stayed at {format_number(after)}"
    return f"{name} {'fell' if after < before else 'rose'} from {format_number(before)} to {format_number(after)}"


def _steps(run: RecordedRun) -> str:
    count = _count(run)
    return f"{count} step{'' if count == '1' else 's'}"


def _count(run: RecordedRun) -> str:
    """Write `375`, or `120 of 375`."""
    step, planned = run.last_step or 0, run.num_steps
    return f"{step:,} of {planned:,}" if planned is not None and planned != step else f"{step:,}"


def _took(run: RecordedRun) -> str:
    """Return the time from the last start to the end, or to the last event if there is no end."""
    try:
        start = datetime.fromisoformat(run.started) if run.started else None
        end = datetime.fromisoformat(run.finished) if run.finished else run.written
        return format_duration((end - start).total_seconds()) if start and end else ""
    except (ValueError, TypeError, OverflowError):
        return ""
