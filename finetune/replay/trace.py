"""Compute steps of a run with given settings, in this process or by another Python.

    python -m finetune.replay.trace RUN PLAN TRACE.json [KEY=VALUE ...]

The other Python runs this module with its own packages. PLAN is a `StepPlan` as JSON, and the file gets the `Trace`.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch

from finetune.config.schema import Config
from finetune.errors import ConfigError, FinetuneError, last_line
from finetune.replay.steps import StepPlan, open_replay, replay_config
from finetune.runs.metrics import as_json
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.tensors import digest_tensor

FIELDS = ("num_targets", "num_tokens", "loss", "grad_norm", "learning_rate")
"""The compared values of a step, in the order in which they are computed."""
NUM_REPLAYED_STEPS = 8
"""The most steps to compute by default."""
_LAST_BYTES = 1 << 16
"""Of the errors of another Python, only the end is kept."""
_packages_of_modules, _version = cache(packages_distributions), cache(version)
"""Reading what all packages say of themselves takes as long as some steps, and a search computes steps many times."""


@dataclass(frozen=True)
class Trace:
    """Steps of a run as they were recorded or computed."""

    steps: Mapping[int, Mapping[str, float]]
    """The values of `FIELDS` by step."""
    record: Mapping[str, Any]
    """The run.json of the run or of the computation, which also has the versions of all imported packages."""
    plan: StepPlan = field(default_factory=dict)
    """Empty if the steps were recorded."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Digests of all weights before the first step, by name. Empty if the steps were recorded."""
    trained: Mapping[str, str] = field(default_factory=dict)
    """Digests of the trained weights after the last step, by name. Empty if the steps were recorded."""

    def has_bytes_of(self, other: Trace) -> bool:
        """Return whether another trace has the same steps, values and weights, to the last bit."""
        parts = [(trace.steps, trace.weights, trace.trained) for trace in (self, other)]
        return bool(as_json(parts[0]) == as_json(parts[1]))  # as text, NaN equals itself


def recorded_trace(run: RecordedRun) -> Trace:
    """Return the recorded values of each step that has a loss."""
    of_field = {name: dict(run.points("step", name)) for name in FIELDS}
    steps = {step: {name: of[step] for name, of in of_field.items() if step in of} for step in of_field["loss"]}
    return Trace(steps, run.record)


def compute_trace(run: RecordedRun, config: Config, plan: StepPlan, base: Path | None) -> Trace:
    """Compute steps in this process. Nothing in the run's folder is changed.

    An empty plan means at most `NUM_REPLAYED_STEPS` of the recorded steps. For the other arguments, see `open_replay`.

    Raises:
        FinetuneError: a step cannot be computed.
    """
    with open_replay(run, config, base) as replay:
        weights = {name: digest_tensor(value) for name, value in replay.trainer.model.state_dict().items()}
        plan = plan or replay.choose_steps(recorded_trace(run).steps, NUM_REPLAYED_STEPS)
        steps = {step: {name: getattr(result, name) for name in FIELDS} for step, result in replay.compute(plan)}
        parameters = replay.trainer.model.named_parameters()
        trained = {name: digest_tensor(value) for name, value in parameters if value.requires_grad}
        record = RecordedRun(replay.trainer.config.output_dir).record
        del replay, parameters
    gc.collect()  # the next replay needs the memory of this model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # The record has our own version. pip may know this package by another name in another environment.
    modules = {name.partition(".")[0] for name in sys.modules} - {"finetune"}
    packages = _packages_of_modules()
    versions = {package: _version(package) for module in sorted(modules) for package in packages.get(module, ())}
    return Trace(steps, {**record, "versions": {**versions, **record["versions"]}}, plan, weights, trained)


def compute_trace_with(python: str, run: RecordedRun, plan: StepPlan, settings: Sequence[str]) -> Trace:
    """Compute steps by another Python, in a process of its own. The settings change the run's configuration.

    Raises:
        ConfigError: see `run_other_python`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        words = ["finetune.replay.trace", str(run.folder.path), json.dumps(plan), str(file), *settings]
        trace = run_other_python(python, words, file, "compute the steps")
    # In JSON, keys and values that are not finite are texts.
    steps = {int(step): {name: float(value) for name, value in row.items()} for step, row in trace["steps"].items()}
    return Trace(steps, trace["record"], plan, trace["weights"], trace["trained"])


def run_other_python(python: str, words: Sequence[str], file: Path, task: str) -> Any:
    """Run one of our modules, given with its arguments, by another Python, and read the JSON file that it writes.

    Raises:
        ConfigError: the Python cannot be started or did not write the file.
    """
    try:
        # -P: a folder that happens to be the current one must not supply modules.
        command, output = [python, "-P", "-m", *words], subprocess.DEVNULL
        with subprocess.Popen(command, stdout=output, stderr=subprocess.PIPE, bufsize=0) as process:
            said, part = b"", b""
            while part := process.stderr.read(_LAST_BYTES) if process.stderr else b"":
                said = (said + part)[-_LAST_BYTES:]  # it may never end
    except OSError as error:
        raise ConfigError(f"--python is {python}, which cannot be started: {error}. Name a Python.") from error
    if not file.is_file():
        raise ConfigError(
            f"--python is {python}, which did not {task} (exit code {process.returncode}: "
            f"{last_line(said.decode(errors='replace'))}). Its environment needs this version of finetune."
        )
    return json.loads(file.read_bytes())


def _main(path: str, plan: str, file: str, *settings: str) -> None:
    run = RecordedRun(path)
    try:
        steps_by_start = {int(start): steps for start, steps in json.loads(plan).items()}
        trace = compute_trace(run, replay_config(run, settings), steps_by_start, run.folder.base)
    except FinetuneError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    Path(file).write_text(json.dumps(as_json(asdict(trace))), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
