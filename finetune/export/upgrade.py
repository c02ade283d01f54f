"""Compare another environment with this one: steps of a finished run, computed again, and the answers of its model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.export.served_comparison import served_vectors
from finetune.export.vectors import write_vectors
from finetune.export.verifying import load_served, vectors_of_run
from finetune.inference.finished_run import find_run
from finetune.replay.bisect import Bisection, compute_in_both
from finetune.replay.causes import Cause, ComparedSide, cause_in_facts, cause_in_steps
from finetune.replay.steps import StepPlan
from finetune.replay.trace import run_other_python
from finetune.runs.comparison import differing, loss_difference, recorded_facts
from finetune.runs.durable import FolderWriter
from finetune.runs.metrics import as_json

Verdict = Literal["same bytes", "same within rounding", "differs"]


@dataclass(frozen=True, kw_only=True)
class Upgrade:
    """The result of `compare_environments`."""

    python: str
    verdict: Verdict
    num_steps: int
    largest_difference: float
    """The largest difference of two losses, relative to max(1, loss)."""
    bound: float
    """The bound of that difference."""
    has_equal_steps: bool
    """All values of the steps, and the weights before the first and after the last one, have the same bytes."""
    has_equal_answers: bool
    """All logits and answers have the same bytes."""
    certificate: Mapping[str, Any]
    """What `finetune verify` wrote in the other environment, with test vectors that were served in this one."""
    versions: Mapping[str, Sequence[str]]
    """The versions in this and in the other environment of each package that both imported, where they differ."""
    step: int | None
    """The first step in which the losses differ beyond the bound."""
    cause: Cause | None
    """Set if the verdict is `differs`."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for `--json`."""
        return {name: as_json(value) for name, value in asdict(self).items()}


def compare_environments(path: Path, python: str, plan: StepPlan, settings: Sequence[str]) -> Upgrade:
    """Compute some recorded steps of a finished run, and the answers of its model, here and with another Python.

    The environment of `python` has this version of finetune. An empty plan is a few steps after the start and after
    each kept checkpoint. `settings` change the configuration of the run in both environments, as `key=value`.

    Raises:
        FinetuneError: the folder is not a run with weights, or one of the two environments cannot compute with it.
    """
    here, there = compute_in_both(path, python, plan, settings)
    steps = Bisection.of(here, there)
    certificate = _verify_with(python, path, settings)
    has_equal_steps = here.trace.has_bytes_of(there.trace)
    has_equal_answers = certificate["max_abs"] == 0 and not certificate["near_ties"] and not certificate["mismatches"]
    cause = _cause(here, there, steps, certificate["mismatches"])
    same: Verdict = "same bytes" if has_equal_steps and has_equal_answers else "same within rounding"
    a, b = here.trace, there.trace
    versions = differing([recorded_facts(trace.record)["versions"] for trace in (a, b)])
    return Upgrade(
        python=python,
        verdict=same if cause is None else "differs",
        num_steps=steps.num_steps,
        largest_difference=max(loss_difference(a.steps[step]["loss"], b.steps[step]["loss"]) for step in a.steps),
        bound=steps.bound,
        has_equal_steps=has_equal_steps,
        has_equal_answers=has_equal_answers,
        certificate=certificate,
        versions={name: both for name, both in versions if None not in both},
        step=steps.step,
        cause=cause,
    )


def _verify_with(python: str, path: Path, settings: Sequence[str]) -> Mapping[str, Any]:
    """Serve a run here, and verify it with another Python against what was served. Returns the certificate."""
    run = find_run(path, settings, is_alone=True)
    known = vectors_of_run(run)
    with load_served(run, known) as served:
        known = served_vectors(served, known)
    with tempfile.TemporaryDirectory() as folder:
        write_vectors(FolderWriter(Path(folder)), known)
        file = Path(folder, "certificate.json")
        words = ["finetune", "verify", str(path), "--vectors", folder, "--out", str(file)]
        changes = [word for setting in settings for word in ("--set", setting)]
        certificate: Mapping[str, Any] = run_other_python(python, [*words, *changes], file, "verify the run")
        return certificate


def _cause(here: ComparedSide, there: ComparedSide, steps: Bisection, mismatches: Sequence[str]) -> Cause | None:
    """Name the cause of a difference beyond rounding; None if there is no such difference."""
    if steps.step is not None:
        return cause_in_facts(here, there) or cause_in_steps(here, there, steps.bound)
    if mismatches:
        text = "all recorded facts and the computed steps are equal, and the answers differ"
        return cause_in_facts(here, there) or Cause("computation", "answers", text)
    return None
