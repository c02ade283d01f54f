"""Compute steps of a run with given settings, in this process or by another Python.

    python -m finetune.bisect.replaying REQUEST.json TRACE.json

The other Python runs this module with its own packages. The files hold a `Request` and a `Trace`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, packages_distributions
from pathlib import Path
from typing import Any

import torch

from finetune.config.compose import config_from_record
from finetune.errors import ConfigError, FinetuneError, last_line
from finetune.export.digests import digest_tensor
from finetune.export.replay import choose_steps, compute_steps, open_replay
from finetune.runs.metrics import as_json
from finetune.runs.recorded_run import RecordedRun

FIELDS = ("num_targets", "num_tokens", "loss", "grad_norm", "learning_rate")
"""The compared values of a step, in the order in which they are computed."""
NUM_STEPS = 8
"""The most steps to compute if nothing says which."""
Steps = dict[int, dict[str, float]]
"""The values of `FIELDS` by step."""
Plan = Mapping[int, list[int]]
"""Steps in ascending order, by the step after which to start; 0 is the start of the run."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to compute."""

    run: str
    """The folder of the run that has the checkpoints."""
    config: Mapping[str, Any]
    """A whole configuration, as plain values."""
    base: str | None
    """The folder of a random base that a run saved. None if the base follows from the configuration."""
    plan: Plan | None
    """None: a few of the recorded steps."""
    reads_modules: bool
    """Whether to digest the loaded modules."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What was computed."""

    steps: Steps
    record: Mapping[str, Any]
    """The run.json of the computation."""
    plan: Plan
    weights: Mapping[str, str]
    """Digests of all weights before the first step, by name."""
    modules: Mapping[str, list[str]]
    """By the name of each loaded module: its package, the version of the package, and a digest of the file."""


def compute_trace(request: Request) -> Trace:
    """Compute the steps in this process. Nothing in the run's folder is changed.

    Raises:
        FinetuneError: a step cannot be computed, see `open_replay` and `compute_steps`.
    """
    run = RecordedRun(request.run)
    base = None if request.base is None else Path(request.base)
    with open_replay(run, config_from_record(request.config), base) as opened:
        weights = {name: digest_tensor(value) for name, value in opened.trainer.model.state_dict().items()}
        plan = request.plan or choose_steps(run, recorded_steps(run), opened.cadence, NUM_STEPS)[0]
        results = compute_steps(opened, run.folder, plan)
        steps = {step: {name: getattr(result, name) for name in FIELDS} for step, result in results}
        record = RecordedRun(opened.trainer.config.output_dir).record
        del opened
    gc.collect()  # the next replay needs the memory of this model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    modules = _digest_modules() if request.reads_modules else {}
    return Trace(steps=steps, record=record, plan=plan, weights=weights, modules=modules)


def compute_trace_with(python: str, request: Request) -> Trace:
    """Compute the steps with another Python, in a process of its own.

    Raises:
        ConfigError: the Python cannot be started or did not compute the steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "trace.json")
        question.write_text(json.dumps(asdict(request)), encoding="utf-8")
        command = [python, "-P", "-m", "finetune.bisect.replaying", str(question), str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(f"--python is {python}, which cannot be started: {error}. Name a Python.") from error
        if done.returncode or not answer.is_file():
            raise ConfigError(
                f"--python is {python}, which did not compute the steps (exit code {done.returncode}: "
                f"{last_line(done.stderr)}). Its environment needs a finetune that has the command bisect."
            )
        found = json.loads(answer.read_bytes())
    steps = {step: {name: float(value) for name, value in of.items()} for step, of in found["steps"].items()}
    return Trace(**found | {"steps": _with_numbers(steps), "plan": _with_numbers(found["plan"])})


def recorded_steps(run: RecordedRun) -> Steps:
    """Return the recorded values of each step of a run that has a loss."""
    of_field = {name: dict(run.points("step", name)) for name in FIELDS}
    return {step: {name: of[step] for name, of in of_field.items() if step in of} for step in of_field["loss"]}


def _digest_modules() -> dict[str, list[str]]:
    owners, versions = packages_distributions(), {one.name: one.version for one in distributions()}
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not name.startswith("__") and file and Path(file).is_file():
            owner = owners.get(name.partition(".")[0], ["Python"])[0]
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            found[name] = [owner, versions.get(owner, sys.version.partition(" ")[0]), digest]
    return found


def _with_numbers(by_step: Mapping[str, Any]) -> dict[int, Any]:
    """Restore the keys of a mapping, which are texts in JSON."""
    return {int(step): value for step, value in by_step.items()}


def _main(question: str, answer: str) -> None:
    asked = json.loads(Path(question).read_bytes())
    try:
        trace = compute_trace(Request(**asked | {"plan": _with_numbers(asked["plan"])}))
    except FinetuneError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    Path(answer).write_text(json.dumps(as_json(asdict(trace))), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
