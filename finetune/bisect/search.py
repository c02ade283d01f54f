"""Find the first step in which two runs differ, and the cause: recorded facts first, then steps computed again."""

from __future__ import annotations

import shlex
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.bisect.causes import (
    Cause,
    View,
    cause_in_modules,
    cause_in_records,
    cause_in_setting,
    cause_in_steps,
    cause_in_weights,
    first_divergence,
)
from finetune.bisect.replaying import Request, Steps, Trace, compute_trace, compute_trace_with, recorded_steps
from finetune.config.compose import config_from_record
from finetune.config.keys import on_resume, values
from finetune.errors import CheckpointError, ConfigError, FinetuneError, first_line
from finetune.export.replay import MOST_APART, replay_config
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
"""Keys of `training` that may change on resume, and that still belong to the computation of a step."""

Plan = Mapping[int, list[int]]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two that are compared.

    Attributes:
        title: names it in messages.
        run: that has the checkpoints.
        config: see `replay_config`.
        overrides: with which the configuration differs from the run's.
        python: that computes it; None: this one.
    """

    title: str
    run: RecordedRun
    config: Config
    overrides: tuple[str, ...] = ()
    python: str | None = None

    @property
    def steps(self) -> Steps:
        """What the run recorded."""
        return recorded_steps(self.run)

    def view(self, trace: Trace | None = None) -> View:
        """Describe what was recorded or, given a trace, what was computed."""
        arguments = shlex.join([str(self.run.folder.config_file), *self.overrides])
        if trace is None:
            return View(self.title, self.config, arguments, self.run.record, self.steps)
        return View("this environment", self.config, arguments, trace.record, trace.steps)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a bisection.

    Attributes:
        titles: of the two sides.
        num_steps: the steps that were compared.
        bound: of the losses, see `MOST_APART`.
        step: the first step whose losses differ; None if there is none.
        losses: of this step.
        facts: that two runs record differently, as `finetune diff` lists them.
        cause: None if nothing differs.
        notes: what else is to be known, one sentence each without a full stop.
    """

    titles: tuple[str, str]
    num_steps: int
    bound: float
    step: int | None = None
    losses: tuple[float, float] | None = None
    facts: tuple[Difference, ...] = ()
    cause: Cause | None = None
    notes: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for `--json`."""
        a, b = self.titles
        facts = [one.as_record() for one in self.facts]
        record = {"a": a, "b": b, "num_steps": self.num_steps, "bound": self.bound, "step": self.step}
        cause = None if self.cause is None else asdict(self.cause)
        record |= {"losses": self.losses, "differences": facts, "cause": cause, "notes": self.notes}
        return {name: as_json(value) for name, value in record.items()}


def bisect_runs(first: Path, second: Path) -> Finding:
    """Compare two runs by their recorded losses, and find the cause of the first difference.

    Raises:
        CheckpointError: one of them is not a run, or no step is recorded in both.
    """
    runs = [open_run(first), open_run(second)]
    titles, recorded = (str(first), str(second)), [recorded_steps(run) for run in runs]
    shared = recorded[0].keys() & recorded[1].keys()
    if not shared:
        raise CheckpointError(f"{first} and {second} have no recorded step in common. Name two runs that have trained.")
    bound = min(MOST_APART.get(str(run.record.get("precision")), MOST_APART["fp32"]) for run in runs)
    step = first_divergence(*recorded, bound)
    found = Finding(titles=titles, num_steps=len(shared), bound=bound, facts=tuple(compare_runs(runs)), step=step)
    if step is None:
        return replace(found, cause=_published_difference(runs, titles))
    found = replace(found, losses=(recorded[0][step]["loss"], recorded[1][step]["loss"]))
    try:
        sides = [Side(title=title, run=run, config=replay_config(run)) for title, run in zip(titles, runs, strict=True)]
    except FinetuneError as error:
        return replace(found, cause=Cause("unknown", "", f"the steps were not computed again: {first_line(error)}"))
    for start in sorted({0, _last_equal_start(runs, step - 1)}, reverse=True):
        found = _explain(found, sides[0], sides[1], {start: [*range(start + 1, step + 1)]})
        if found.cause is not None and found.cause.what != "unknown":
            break  # else the difference is older than the checkpoint
    return found


def bisect_overrides(path: Path, overrides: Sequence[str], plan: Plan | None) -> Finding:
    """Compare a run with the same run under other settings.

    Args:
        path: the run's folder.
        overrides: as for `finetune train`.
        plan: see `Request`; None: the first steps.

    Raises:
        CheckpointError: the folder is not a run that has trained.
        FinetuneError: the steps cannot be computed.
    """
    run = open_run(path)
    first = Side(title=str(path), run=run, config=replay_config(run))
    title = f"{path} with {' '.join(overrides)}"
    second = Side(title=title, run=run, config=replay_config(run, overrides), overrides=tuple(overrides))
    plan = plan or {0: list(first.steps)[: Request.num_steps]}
    traces = (_trace(first, plan, (first, second)), _trace(second, plan, (first, second)))
    found = _compared((first.title, title), traces, _bound(traces))
    return found if found.step is None else _explain_settings(found, first, second, traces)


def bisect_environment(path: Path, python: str | None, plan: Plan | None) -> Finding:
    """Compare what a run recorded with what this environment computes, or this environment with another Python.

    Raises:
        CheckpointError: the folder is not a run that has trained.
        FinetuneError: the steps cannot be computed.
    """
    run = open_run(path)
    here = Side(title=str(path), run=run, config=replay_config(run))
    trace = _trace(here, plan, (here,), reads_modules=python is not None)
    if python is None:
        recorded = Trace(steps=here.steps, record=run.record, plan=trace.plan, weights={}, modules={})
        found = _compared((str(path), "this environment"), (recorded, trace), _bound((recorded, trace)))
        return found if found.step is None else replace(found, cause=_outside([here], [trace], found.bound))
    other = replace(here, title=python, python=python)
    traces = (trace, _trace(other, trace.plan, (here,), reads_modules=True))
    found = _compared(("this environment", python), traces, _bound(traces))
    if found.step is None:
        return found
    views = (here.view(trace), other.view(traces[1])._replace(title=python))
    cause = cause_in_modules(found.titles, traces) or cause_in_weights(traces) or cause_in_steps(*views, found.bound)
    steps = _steps_option(trace.plan, found.step)
    commands = (f"finetune bisect {path}{steps}", f"{python} -m finetune bisect {path}{steps}")
    return replace(found, cause=replace(cause, commands=commands))


def _explain(found: Finding, first: Side, second: Side, plan: Plan) -> Finding:
    """Compute the steps of both runs again, and look for the cause in the settings if they still differ."""
    sides = (first, second)
    diff = f"finetune diff {first.title} {second.title}"
    try:
        traces = (_trace(first, plan, sides), _trace(second, plan, sides))
    except FinetuneError as error:
        cause = cause_in_records(first.view(), second.view())
        cause = cause or Cause("unknown", "", "the facts that differ are the candidates")
        notes = (f"the steps were not computed again: {first_line(error)}",)
        return replace(found, cause=replace(cause, commands=cause.commands or (diff,)), notes=notes)
    others = [
        side
        for side, trace in zip(sides, traces, strict=True)
        if first_divergence(side.steps, trace.steps, found.bound)
    ]
    notes = tuple(f"{side.title} computes other losses here than it recorded" for side in others)
    if first_divergence(traces[0].steps, traces[1].steps, found.bound) is not None:
        return replace(_explain_settings(found, first, second, traces), notes=notes)
    cause = _outside(sides, traces, found.bound)
    changed = others[0].title if others else first.title
    commands = cause.commands or (diff, f"finetune bisect {changed}{_steps_option(plan, found.step)}")
    return replace(found, cause=replace(cause, commands=commands), notes=notes)


def _outside(sides: Sequence[Side], traces: Sequence[Trace], bound: float) -> Cause:
    """Find the cause outside of the settings: in the records of two runs, or between a record and its replay."""
    if len(sides) > 1 and (cause := cause_in_records(sides[0].view(), sides[1].view())):
        return cause
    for side, trace in zip(sides, traces, strict=True):
        recorded, computed = side.view(), side.view(trace)
        if first_divergence(recorded.steps, computed.steps, bound) is not None:
            return cause_in_records(recorded, computed) or cause_in_steps(recorded, computed, bound)
    if len(sides) > 1 and (start := min(traces[0].plan)):
        folders = [side.run.folder.checkpoint(start) for side in sides]
        _, name = _distance(*folders)
        return Cause("unknown", name, f"the weights of step {start} differ by rounding only, the most in {name}")
    return Cause("unknown", "", "both runs compute the same losses here")


def _explain_settings(found: Finding, first: Side, second: Side, traces: tuple[Trace, Trace]) -> Finding:
    """Give the first side each differing setting of the second, until its losses are those of the second."""
    plan = traces[0].plan
    keys = [key for key, _ in differing([values(side.config) for side in (first, second)]) if _is_in_steps(key)]
    sections = [tuple(group) for _, group in groupby(keys, key=lambda key: key.partition(".")[0])]
    alone = []
    for group in [*((key,) for key in keys), *(section for section in sections if len(section) > 1)]:
        try:
            trace = _trace(
                replace(first, config=_with_values(first.config, second.config, group)), plan, (first, second)
            )
        except FinetuneError:
            continue  # these keys fit only together with others
        if first_divergence(trace.steps, traces[1].steps, found.bound) is None:
            cause = cause_in_setting(group, (first.view(), second.view()), (traces[0], trace))
            return replace(
                found, cause=replace(cause, commands=cause.commands or _commands(found, first, second, group, plan))
            )
        if first_divergence(trace.steps, traces[0].steps, found.bound) is not None:
            alone += group
    text = f"no single key gives the losses of {second.title}"
    text += f"; these change those of {first.title}: {', '.join(dict.fromkeys(alone))}" if alone else ""
    return replace(found, cause=Cause("unknown", "", text, _commands(found, first, second, keys, plan)))


def _commands(found: Finding, first: Side, second: Side, keys: Sequence[str], plan: Plan) -> tuple[str, str]:
    """Return the commands that compute the steps with the settings of the first side, and with keys of the second."""
    command = f"finetune bisect {first.run.folder.path}{_steps_option(plan, found.step)}"
    given = values(second.config)
    return command, shlex.join([*command.split(), *(f"{key}={format_value(given[key])}" for key in keys)])


def _trace(side: Side, plan: Plan | None, known: Sequence[Side], *, reads_modules: bool = False) -> Trace:
    """Compute steps of a side. If the base is random, take the one that the run of these settings saved."""
    settings = (side.config.model, side.config.seed)
    bases = [one.run.folder.base for one in known if (one.config.model, one.config.seed) == settings]
    request = Request(
        run=str(side.run.folder.path),
        config=side.config.model_dump(mode="json"),
        base=next((str(base) for base in bases if base.is_dir()), None),
        plan=plan,
        reads_modules=reads_modules,
    )
    return compute_trace(request) if side.python is None else compute_trace_with(side.python, request)


def _compared(titles: tuple[str, str], traces: tuple[Trace, Trace], bound: float) -> Finding:
    a, b = traces
    step = first_divergence(a.steps, b.steps, bound)
    losses = None if step is None else (a.steps[step]["loss"], b.steps[step]["loss"])
    return Finding(titles=titles, num_steps=len(a.steps.keys() & b.steps.keys()), bound=bound, step=step, losses=losses)


def _bound(traces: Sequence[Trace]) -> float:
    return min(MOST_APART.get(str(trace.record.get("precision")), MOST_APART["fp32"]) for trace in traces)


def _is_in_steps(key: str) -> bool:
    section, _, name = key.rpartition(".")
    if section in _NOT_IN_STEPS:
        return False
    return on_resume(key).matters != "never" or (section == "training" and name in _ALSO_IN_STEPS)


def _with_values(config: Config, other: Config, keys: Sequence[str]) -> Config:
    """Return a checked configuration with the values that another one has for these keys."""
    record: dict[str, Any] = config.model_dump(mode="json")
    given = other.model_dump(mode="json")
    for key in keys:
        section, _, name = key.rpartition(".")
        (record[section] if section else record)[name] = (given[section] if section else given)[name]
    return config_from_record(record)


def _steps_option(plan: Plan, until: int | None) -> str:
    """Return the option that computes the same steps up to the first that differs."""
    start = max(start for start in plan if start < (until or 1))
    return f" --steps {start + 1}-{until}"


def read_steps_option(text: str | None, run: Path) -> Plan | None:
    """Read `--steps 5-8`: the steps after the start of a run, or after a kept checkpoint.

    Raises:
        ConfigError: the text is not a range, or the run has no such checkpoint.
    """
    if text is None:
        return None
    begin, _, end = text.partition("-")
    if not (begin.isdigit() and end.isdigit() and 1 <= int(begin) <= int(end)):
        raise ConfigError(f"--steps is {text}, expected two steps, such as 1-4 or 21-23.")
    start = int(begin) - 1
    kept = [0, *RecordedRun(run).folder.checkpoint_steps()]
    if start not in kept:
        after = ", ".join(str(step + 1) for step in kept)
        raise ConfigError(f"--steps is {text}, but {run} has no checkpoint of step {start}. Begin at one of {after}.")
    return {start: [*range(start + 1, int(end) + 1)]}


def _last_equal_start(runs: Sequence[RecordedRun], most: int) -> int:
    """Return the last step, not after `most`, that both runs kept with the same weights; 0 is the start."""
    kept = [{path.name: path for path in whole_checkpoints(run.folder)} for run in runs]
    pairs = [(kept[0][name], kept[1][name]) for name in sorted(kept[0].keys() & kept[1].keys())]
    pairs = [pair for pair in pairs if int(pair[0].name.removeprefix("step-")) <= most]
    count = bisect_right(pairs, False, key=lambda pair: _distance(*pair)[0] > WEIGHTS_BOUND)
    return int(pairs[count - 1][0].name.removeprefix("step-")) if count else 0


def _distance(first: Path, second: Path) -> tuple[float, str]:
    """Return the norm of the differences of all tensors in two folders over their norm, and the tensor that differs most.

    The distance is infinite if they have other names or shapes.
    """
    files = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (first, second)]
    if files[0] != files[1]:
        return float("inf"), ""
    total = apart = most = 0.0
    name = ""
    for a, b in _tensor_pairs(first, second, files[0]):
        if a[0] != b[0] or a[1].shape != b[1].shape:
            return float("inf"), str(a[0])
        of_tensor = float((a[1].double() - b[1].double()).square().sum())
        total, apart = total + float(a[1].double().square().sum()), apart + of_tensor
        if of_tensor > most:
            most, name = of_tensor, a[0]
    return (apart / total) ** 0.5 if total else float(apart > 0), name


def _tensor_pairs(first: Path, second: Path, names: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    for name in names:
        yield from zip(each_tensor(first / name), each_tensor(second / name), strict=False)


def _published_difference(runs: Sequence[RecordedRun], titles: tuple[str, str]) -> Cause | None:
    """Compare the published weights of two runs whose losses are equal."""
    folders = [run.folder.adapter for run in runs]
    if not all(folder.is_dir() for folder in folders):
        return None
    distance, name = _distance(*folders)
    if distance <= WEIGHTS_BOUND:
        return None
    best = [run.result.get("best_step") for run in runs]
    text = f"the published weights differ by {distance:.3g} of their norm, the most in {name}"
    if best[0] != best[1]:
        text = f"the published weights are of step {best[0]} in {titles[0]} and of step {best[1]} in {titles[1]}"
    commands = tuple(f"finetune verify {title}" for title in titles)
    return Cause("published weights", name, text, commands)
