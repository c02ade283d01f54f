"""The best validation of a run, among those from which its weights could be published."""

from __future__ import annotations

from finetune.runs.metrics import FORGOTTEN, sign_of
from finetune.runs.recorded_run import Points, RecordedRun, finite


def best_validation(run: RecordedRun, metric: str = "loss") -> tuple[int, float] | None:
    """Return step and value of the best validation by a metric; None without one."""
    return best_point(publishable_points(run, metric), metric)


def publishable_points(run: RecordedRun, metric: str) -> Points:
    """Return step and metric of each validation, except those beyond `early_stopping.max_forgotten`."""
    bound = run.config.early_stopping.max_forgotten if run.config else None
    beyond = {step for step, value in run.points("validation", FORGOTTEN) if bound is not None and value > bound}
    return [(step, value) for step, value in run.points("validation", metric) if step not in beyond]


def best_point(points: Points, metric: str) -> tuple[int, float] | None:
    """Return the step and the value of the best point by a metric; None without one."""
    return max(finite(points), key=lambda point: sign_of(metric) * point[1], default=None)
