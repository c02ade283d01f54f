"""Find the first step in which two sides differ, and the cause: recorded facts first, then steps computed again."""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.bisect.causes import (
    Cause,
    Side,
    cause_in_modules,
    cause_in_records,
    cause_in_setting,
    cause_in_steps,
    cause_in_weights,
    first_divergence,
)
from finetune.bisect.replaying import NUM_STEPS, Plan, Request, Trace, compute_trace, compute_trace_with
from finetune.config.compose import config_from_record
from finetune.config.keys import on_resume, values
from finetune.errors import CheckpointError, ConfigError, FinetuneError, first_line
from finetune.export.replay import MOST_APART
from finetune.runs.comparison import Difference, compare_runs, differing, format_value
from finetune.runs.metrics import as_json
from finetune.runs.recorded_run import RecordedRun, open_run
from finetune.runs.tensors import each_tensor
from finetune.runs.verification import whole_checkpoints

if TYPE_CHECKING:
    from finetune.config.schema import Config

WEIGHTS_BOUND = 1e-5
"""Promise 1 for an adapter: the largest norm of the differences over the norm of the weights."""
_NOT_IN_STEPS = ("parallel", "validation", "testing", "early_stopping", "checkpoint")
"""Sections that no training step reads."""
_ALSO_IN_STEPS = ("global_batch_size", "device", "fused", "deterministic", "gradient_checkpointing")
"""Keys of `training` that may change on resume, and that a step reads nevertheless."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a bisection of two sides."""

    titles: tuple[str, str]
    num_steps: int
    """The number of steps that were compared."""
    bound: float
    """The bound of their losses, see `MOST_APART`. If the precisions differ, the smaller one."""
    step: int | None = None
    """The first step whose losses differ."""
    losses: tuple[float, float] | None = None
    facts: tuple[Difference, ...] = ()
    """What two runs record differently, as `finetune diff` lists it."""
    cause: Cause | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, first: Side, second: Side) -> Finding:
        """Compare the losses of the steps that both sides have."""
        precisions = [str(side.record.get("precision")) for side in (first, second)]
        bound = min(MOST_APART.get(precision, MOST_APART["fp32"]) for precision in precisions)
        step = first_divergence(first.steps, second.steps, bound)
        losses = None if step is None else (first.steps[step]["loss"], second.steps[step]["loss"])
        num_steps = len(first.steps.keys() & second.steps.keys())
        return cls(titles=(first.title, second.title), num_steps=num_steps, bound=bound, step=step, losses=losses)

    def explained(self, cause: Cause, *commands: str, notes: Sequence[str] = ()) -> Finding:
        """Return the finding with its cause, and with commands if the cause has none."""
        return replace(self, cause=replace(cause, commands=cause.commands or commands), notes=tuple(notes))

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for `--json`."""
        a, b = self.titles
        record = {"a": a, "b": b, "num_steps": self.num_steps, "bound": self.bound, "step": self.step}
        record |= {"losses": self.losses, "differences": [one.as_record() for one in self.facts]}
        record |= {"cause": None if self.cause is None else asdict(self.cause), "notes": self.notes}
        return {name: as_json(value) for name, value in record.items()}


def bisect_runs(first: Path, second: Path, settings: Sequence[str] = ()) -> Finding:
    """Compare two runs by their recorded losses, and find the cause of the first difference.

    The settings, as `key=value`, change the configuration of both.

    Raises:
        CheckpointError: a folder is not a run, the two have no step in common, or one was resumed with other settings.
        ConfigError: a configuration cannot be read.
    """
    runs = [open_run(first), open_run(second)]
    a, b = (Side.of(run, settings=settings) for run in runs)
    found = replace(Finding.of(a, b), facts=tuple(compare_runs(runs)))
    if not found.num_steps:
        raise CheckpointError(f"{first} and {second} have no recorded step in common. Name two runs that have trained.")
    if found.step is None:
        folders = [run.folder.adapter for run in runs]
        distance, name = _distance(*folders)
        if not all(folder.is_dir() for folder in folders) or distance <= WEIGHTS_BOUND:
            return found
        text = f"the losses are equal, but the published weights differ by {distance:.3g} of their norm"
        text += f", the most in {name}" if name else ", or in their names"
        return found.explained(
            Cause("published weights", name, text), *(shlex.join(["finetune", "verify", run.name]) for run in runs)
        )
    for start in sorted({0, _last_equal_start(runs, found.step - 1)}, reverse=True):
        found = _explain(found, a, b, {start: [*range(start + 1, found.step + 1)]})
        if found.cause is not None and found.cause.what != "unknown":
            break  # else the difference is older than this checkpoint
    return found


def bisect_overrides(path: Path, overrides: Sequence[str], plan: Plan | None, settings: Sequence[str] = ()) -> Finding:
    """Compare a run with the same run under overrides. Both are computed here, the first steps without a plan.

    The settings, as `key=value`, change the configuration of both.

    Raises:
        FinetuneError: the folder is not a run that has trained, or the steps cannot be computed.
    """
    run = open_run(path)
    a, b = (Side.of(run, changed, settings=settings) for changed in ((), overrides))
    plan = plan or {0: list(a.steps)[:NUM_STEPS]}
    (a, first), (b, second) = (_computed(side, plan, (a, b)) for side in (a, b))
    found = Finding.of(a, b)
    return found if found.step is None else _explain_settings(found, a, b, (first, second))


def bisect_environment(path: Path, python: str | None, plan: Plan | None, settings: Sequence[str] = ()) -> Finding:
    """Compare what a run recorded with what this environment computes, or this environment with another Python.

    The settings, as `key=value`, change the configuration of both.

    Raises:
        FinetuneError: the folder is not a run that has trained, or the steps cannot be computed.
    """
    recorded = Side.of(open_run(path), settings=settings)
    here, trace = _computed(recorded, plan, (recorded,), reads_modules=python is not None)
    here = replace(here, title="this environment")
    if python is None:
        found = Finding.of(recorded, here)
        if found.step is None:
            return found
        command = _bisect_command(recorded.run, trace.plan, found.step)
        return found.explained(_changed_since(recorded, here, found.bound), command)
    side = replace(recorded, title=python, python=python)
    there, other = _computed(side, trace.plan, (recorded,), reads_modules=True)
    found, traces = Finding.of(here, there), (trace, other)
    if found.step is None:
        return found
    cause = cause_in_modules(traces) or cause_in_weights(traces) or cause_in_steps(here, there, found.bound)
    command = _bisect_command(recorded.run, trace.plan, found.step)
    return found.explained(cause, command, f"{shlex.quote(python)} -m {command}")


def _explain(found: Finding, a: Side, b: Side, plan: Plan) -> Finding:
    """Compute the steps of both runs again. If they still differ, the settings do; else something else has changed."""
    diff = shlex.join(["finetune", "diff", a.run.name, b.run.name])
    try:
        (here_a, first), (here_b, second) = (_computed(side, plan, (a, b)) for side in (a, b))
    except FinetuneError as error:
        known = cause_in_records(a, b) or Cause("unknown", "", "no step could be computed again")
        return found.explained(known, diff, notes=[f"the steps were not computed again: {first_line(error)}"])
    pairs = [(a, here_a), (b, here_b)]
    changed = [pair for pair in pairs if first_divergence(pair[0].steps, pair[1].steps, found.bound) is not None]
    notes = [f"{recorded.title} recorded other losses than it computes now" for recorded, _ in changed]
    if first_divergence(first.steps, second.steps, found.bound) is not None:
        return replace(_explain_settings(found, here_a, here_b, (first, second)), notes=tuple(notes))
    cause = cause_in_records(a, b)
    if cause is None and changed:
        recorded, now = changed[0]
        cause = _changed_since(recorded, replace(now, title="this environment"), found.bound)
    cause = cause or Cause("unknown", "", f"both runs compute the same losses here, also in step {found.step}")
    again = _bisect_command((changed or pairs)[0][0].run, plan, found.step)
    return found.explained(cause, diff, again, notes=notes)


def _changed_since(recorded: Side, computed: Side, bound: float) -> Cause:
    return cause_in_records(recorded, computed) or cause_in_steps(recorded, computed, bound)


def _explain_settings(found: Finding, a: Side, b: Side, traces: tuple[Trace, Trace]) -> Finding:
    """Compute the first side with each differing setting of the second, until the losses are equal."""
    first, second = traces
    keys = [key for key, _ in differing([values(side.config) for side in (a, b)]) if _is_in_steps(key)]
    sections = [list(group) for _, group in groupby(keys, key=lambda key: key.partition(".")[0])]
    command = _bisect_command(a.run, first.plan, found.step)
    given, effective = values(b.config), []
    for group in [*([key] for key in keys), *(section for section in sections if len(section) > 1)]:
        try:
            mixed = _with_values(a.config, b.config, group)
            _, trace = _computed(replace(a, config=mixed), first.plan, (a, b))
        except FinetuneError:
            continue  # these keys fit only together with others
        if first_divergence(trace.steps, second.steps, found.bound) is None:
            changed = shlex.join([f"{key}={format_value(given[key])}" for key in group])
            cause = cause_in_setting(group, a, replace(b, config=mixed), (first, trace))
            return found.explained(cause, command, f"{command} {changed}")
        if first_divergence(trace.steps, first.steps, found.bound) is not None:
            effective += group
    text = f"no single key gives the losses of {b.title}; "
    text += f"these change the losses of {a.title}: {', '.join(dict.fromkeys(effective)) or 'none'}"
    changed = shlex.join([f"{key}={format_value(given[key])}" for key in keys])
    return found.explained(Cause("unknown", "", text), command, f"{command} {changed}")


def _computed(
    side: Side, plan: Plan | None, known: Sequence[Side], *, reads_modules: bool = False
) -> tuple[Side, Trace]:
    """Compute steps of a side, on the random base that the run of its settings saved. Return it with the results."""
    settings = (side.config.model, side.config.seed)
    bases = [one.run.folder.base for one in known if (one.config.model, one.config.seed) == settings]
    request = Request(
        run=str(side.run.folder.path),
        config=side.config.model_dump(mode="json"),
        base=next((str(base) for base in bases if base.is_dir()), None),
        plan=plan,
        reads_modules=reads_modules,
    )
    trace = compute_trace(request) if side.python is None else compute_trace_with(side.python, request)
    return replace(side, record=trace.record, steps=trace.steps), trace


def _is_in_steps(key: str) -> bool:
    section, _, name = key.rpartition(".")
    is_free = on_resume(key).matters == "never"
    return section not in _NOT_IN_STEPS and (not is_free or (section == "training" and name in _ALSO_IN_STEPS))


def _with_values(config: Config, other: Config, keys: Sequence[str]) -> Config:
    """Return a checked configuration with the values that another one has for these keys."""
    record, given = (each.model_dump(mode="json") for each in (config, other))
    for key in keys:
        section, _, name = key.rpartition(".")
        (record[section] if section else record)[name] = (given[section] if section else given)[name]
    return config_from_record(record)


def _bisect_command(run: RecordedRun, plan: Plan, until: int | None) -> str:
    """Return the command that computes the same steps of a run again, up to the first that differs."""
    assert until is not None  # there is no cause without one
    first = max(start for start in plan if start < until) + 1
    return shlex.join(["finetune", "bisect", run.name, "--steps", f"{first}-{until}"])


def read_steps_option(text: str | None, path: Path) -> Plan | None:
    """Read `--steps 5-8`: steps that follow the start of a run, or a kept checkpoint.

    Raises:
        ConfigError: the text is not a range, or the run has no such checkpoint.
    """
    if text is None:
        return None
    kept = [0, *RecordedRun(path).folder.checkpoint_steps()]
    found = re.fullmatch("([0-9]+)-([0-9]+)", text)
    first, last = map(int, found.groups()) if found else (0, 0)
    if first - 1 not in kept or last < first:
        after = ", ".join(str(step + 1) for step in kept)
        raise ConfigError(f"--steps is {text}, expected two steps, such as 1-4. {path} can begin at {after}.")
    return {first - 1: [*range(first, last + 1)]}


def _last_equal_start(runs: Sequence[RecordedRun], most: int) -> int:
    """Return the last step, not after `most`, of which both runs kept the same weights; 0 is the start."""
    kept = [{int(path.name.removeprefix("step-")): path for path in whole_checkpoints(run.folder)} for run in runs]
    steps = sorted(step for step in kept[0].keys() & kept[1].keys() if step <= most)
    count = bisect_right(steps, False, key=lambda step: _distance(kept[0][step], kept[1][step])[0] > WEIGHTS_BOUND)
    return steps[count - 1] if count else 0


def _distance(first: Path, second: Path) -> tuple[float, str]:
    """Return the norm of the differences of all tensors in two folders over their norm, and the most different tensor.

    The distance is infinite if the folders have other tensors.
    """
    files = [sorted(folder.glob("*.safetensors")) for folder in (first, second)]
    a, b = (chain.from_iterable(map(each_tensor, of_folder)) for of_folder in files)
    total, apart, most, name = 0.0, 0.0, 0.0, ""
    for (here, x), (there, y) in zip_longest(a, b, fillvalue=("", torch.zeros(0))):
        if here != there or x.shape != y.shape:
            return float("inf"), ""
        total += float(x.double().square().sum())
        of_tensor = float((x.double() - y.double()).square().sum())
        apart += of_tensor
        most, name = max((most, name), (of_tensor, here))
    return (0.0 if not apart else (apart / total) ** 0.5 if total else float("inf")), name
