"""Find the first step in which two sides differ, and the cause: recorded facts first, then steps computed again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from finetune.config.keys import on_resume, values
from finetune.config.run_config import config_from_record
from finetune.config.schema import Config
from finetune.errors import CheckpointError, ConfigError, FinetuneError, first_line
from finetune.replay.causes import Cause, ComparedSide, cause_in_facts, cause_in_key, cause_in_steps, first_divergence
from finetune.replay.steps import LOSS_BOUNDS, StepPlan, replay_config
from finetune.replay.trace import NUM_REPLAYED_STEPS, compute_trace, compute_trace_with, recorded_trace
from finetune.runs.comparison import Difference, compare_runs, differing, format_value
from finetune.runs.durable import read_manifest
from finetune.runs.metrics import as_json
from finetune.runs.recorded_run import RecordedRun, open_run
from finetune.runs.verification import whole_checkpoints
from finetune.terminal import without_passwords

_NOT_IN_STEPS = ("parallel", "validation", "testing", "early_stopping", "checkpoint")
"""Sections that no training step reads."""
_ALSO_IN_STEPS = ("global_batch_size", "device", "fused", "deterministic", "gradient_checkpointing")
"""Keys of `training` that may change on resume, and that a step reads nevertheless."""


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The result of a bisection of two sides."""

    titles: tuple[str, str]
    num_steps: int
    """The number of steps that were compared."""
    bound: float
    """The bound of their losses, see `LOSS_BOUNDS`. If the precisions differ, the smaller one."""
    step: int | None
    """The first step in which the losses differ."""
    losses: tuple[float, float] | None
    facts: tuple[Difference, ...] = ()
    """The recorded facts that differ between two runs, as `finetune diff` lists them."""
    cause: Cause | None = None
    commands: tuple[str, ...] = ()
    """Commands that show the difference."""
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, first: ComparedSide, second: ComparedSide) -> Bisection:
        """Compare the losses of the steps that both sides have."""
        precisions = [str(side.trace.record.get("precision")) for side in (first, second)]
        bound = min(LOSS_BOUNDS.get(precision, LOSS_BOUNDS["fp32"]) for precision in precisions)
        step = first_divergence(first, second, bound)
        a, b = first.trace.steps, second.trace.steps
        losses = None if step is None else (a[step]["loss"], b[step]["loss"])
        titles = (first.title, second.title)
        return cls(titles=titles, num_steps=len(a.keys() & b.keys()), bound=bound, step=step, losses=losses)

    def explained(self, cause: Cause, *commands: str, notes: Iterable[str] = ()) -> Bisection:
        """Return the bisection with its cause, commands that show the difference, and notes."""
        return replace(self, cause=cause, commands=commands, notes=tuple(notes))

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for `--json`."""
        record = asdict(self)
        a, b = record.pop("titles")
        record["differences"] = [fact.as_record() for fact in record.pop("facts")]
        return {name: as_json(value) for name, value in {"a": a, "b": b, **record}.items()}


def bisect_runs(first: Path, second: Path, settings: Sequence[str]) -> Bisection:
    """Compare two runs by their recorded losses, and find the cause of the first difference.

    If no setting differs that a step reads, the recorded facts name the cause. Otherwise the steps are computed again,
    from the last checkpoint with equal weights. The settings, as `key=value`, change the configuration of both.

    Raises:
        CheckpointError: a folder is not a run, the two have no step in common, or one was resumed with other settings.
        ConfigError: a configuration cannot be read.
    """
    runs = [open_run(first), open_run(second)]
    a, b = (_recorded_side(run, settings) for run in runs)
    result = replace(Bisection.of(a, b), facts=tuple(compare_runs(runs)))
    if not result.num_steps:
        raise CheckpointError(f"{first} and {second} have no recorded step in common. Name two runs that have trained.")
    if result.step is None:
        return result
    diff = shlex.join(["finetune", "diff", a.run.name, b.run.name])
    cause = cause_in_facts(a, b)
    keys = _differing_keys(a.config, b.config)
    if cause is not None and not keys:
        return result.explained(cause, diff)
    start = _last_equal_start(runs, result.step)
    plan = {start: [*range(start + 1, result.step + 1)]}
    try:
        here_a, here_b = (_computed(side, plan, runs) for side in (a, b))
    except FinetuneError as error:
        names = ", ".join(keys)
        cause = cause or Cause(
            "key" if keys else "computation", names, f"unknown. These settings differ: {names or 'none'}"
        )
        return result.explained(cause, diff, notes=[f"the steps were not computed again: {first_line(error)}"])
    if first_divergence(here_a, here_b, result.bound) is not None:
        return _explain_settings(result, here_a, here_b, runs)
    # The settings do not matter. At least one of the runs does not compute its recorded losses any more.
    changed = [pair for pair in ((a, here_a), (b, here_b)) if first_divergence(*pair, result.bound) is not None]
    notes = [f"{recorded.title} recorded other losses than it computes now" for recorded, _ in changed]
    if cause is None and changed:
        recorded, computed = changed[0]
        cause = _cause_outside_of_settings(recorded, computed._replace(title="this environment"), result.bound)
    text = f"both compute the same losses here, also in step {result.step}"
    again = [_bisect_command(computed, result.step) for _, computed in changed]
    return result.explained(cause or Cause("computation", "", text), diff, *again, notes=notes)


def bisect_overrides(path: Path, overrides: Sequence[str], plan: StepPlan, settings: Sequence[str]) -> Bisection:
    """Compare a run with the same run under overrides. Both are computed here, by default the first steps.

    The settings, as `key=value`, change the configuration of both.

    Raises:
        FinetuneError: the folder is not a run that has trained, or the steps cannot be computed.
    """
    run = open_run(path)
    a = _recorded_side(run, settings)
    title = without_passwords(f"{run.name} with {shlex.join(overrides)}")
    b = a._replace(title=title, config=replay_config(run, [*settings, *overrides]))
    plan = plan or {0: list(a.trace.steps)[:NUM_REPLAYED_STEPS]}
    a, b = (_computed(side, plan, [run]) for side in (a, b))
    result = Bisection.of(a, b)
    return result if result.step is None else _explain_settings(result, a, b, [run])


def bisect_environment(path: Path, python: str | None, plan: StepPlan, settings: Sequence[str]) -> Bisection:
    """Compare what a run recorded with what this environment computes, or this environment with another Python.

    See `compute_in_both` for the arguments and errors.
    """
    first, second = compute_in_both(path, python, plan, settings)
    result = Bisection.of(first, second)
    if result.step is None:
        return result
    again = _bisect_command(second, result.step)
    commands = [again] if python is None else [again, f"{shlex.quote(python)} -m {again}"]
    return result.explained(_cause_outside_of_settings(first, second, result.bound), *commands)


def compute_in_both(
    path: Path, python: str | None, plan: StepPlan, settings: Sequence[str]
) -> tuple[ComparedSide, ComparedSide]:
    """Compute recorded steps of a run here and with another Python; without one, return the recorded and those here.

    By default, a few recorded steps after the start and after each kept checkpoint are computed. The settings, as
    `key=value`, change the configuration of both.

    Raises:
        FinetuneError: the folder is not a run that has trained, or the steps cannot be computed.
    """
    recorded = _recorded_side(open_run(path), settings)
    here = _computed(recorded, plan, [recorded.run])._replace(title="this environment")
    if python is None:
        return recorded, here
    trace = compute_trace_with(python, recorded.run, here.trace.plan, settings)
    return here, here._replace(title=python, trace=trace)


def _explain_settings(result: Bisection, a: ComparedSide, b: ComparedSide, runs: Sequence[RecordedRun]) -> Bisection:
    """Compute the first side with one differing key of the second after the other, until the losses are equal."""
    assert result.step is not None
    again = _bisect_command(a, result.step)
    keys = _differing_keys(a.config, b.config)
    if not keys:
        return result.explained(_cause_outside_of_settings(a, b, result.bound), again)
    settings = values(b.config)
    for key in keys:
        try:
            changed = _computed(a._replace(config=_with_value(a.config, b.config, key)), a.trace.plan, runs)
        except FinetuneError:
            continue  # the key fits only together with others
        if first_divergence(changed, b, result.bound) is None:
            cause = cause_in_key(key, a, changed._replace(title=b.title))
            return result.explained(cause, again, f"{again} {shlex.quote(f'{key}={format_value(settings[key])}')}")
    overrides = shlex.join(f"{key}={format_value(settings[key])}" for key in keys)
    text = f"no single key gives the losses of {b.title}. These differ: {', '.join(keys)}"
    return result.explained(Cause("key", ", ".join(keys), text), again, f"{again} {overrides}")


def _cause_outside_of_settings(first: ComparedSide, second: ComparedSide, bound: float) -> Cause:
    return cause_in_facts(first, second) or cause_in_steps(first, second, bound)


def _recorded_side(run: RecordedRun, settings: Sequence[str]) -> ComparedSide:
    """Return what a run recorded.

    Raises:
        CheckpointError: the run has not trained, or see `replay_config`.
    """
    trace = recorded_trace(run)
    if not trace.steps:
        raise CheckpointError(f"{run.name} has no recorded step. Name the folder of a run that has trained.")
    return ComparedSide(run.name, run, replay_config(run, settings), trace, settings)


def _computed(side: ComparedSide, plan: StepPlan, runs: Sequence[RecordedRun]) -> ComparedSide:
    """Compute steps of a side, on the random base that one of the runs saved with the same settings and seed."""
    settings = (side.config.model, side.config.seed)
    bases = [run.folder.base for run in runs if run.config and (run.config.model, run.config.seed) == settings]
    base = next((base for base in bases if base.is_dir()), None)
    return side._replace(trace=compute_trace(side.run, side.config, plan, base))


def _differing_keys(first: Config, second: Config) -> list[str]:
    """Return the keys that differ and that a training step reads."""
    keys = []
    for key, _ in differing([values(config) for config in (first, second)]):
        section, _, name = key.rpartition(".")
        is_free = on_resume(key).matters == "never" and (section != "training" or name not in _ALSO_IN_STEPS)
        if section not in _NOT_IN_STEPS and not is_free:
            keys.append(key)
    return keys


def _with_value(config: Config, other: Config, key: str) -> Config:
    """Return a checked configuration with another one's value of a key."""
    record, source = (each.model_dump(mode="json") for each in (config, other))
    section, _, name = key.rpartition(".")
    (record[section] if section else record)[name] = (source[section] if section else source)[name]
    return config_from_record(record)


def _bisect_command(side: ComparedSide, step: int) -> str:
    """Return the command that computes the same steps of a run again, up to the first that differs."""
    first = max(start for start in side.trace.plan if start < step) + 1
    settings = [word for setting in side.settings for word in ("--set", without_passwords(setting))]
    return shlex.join(["finetune", "bisect", side.run.name, "--steps", f"{first}-{step}", *settings])


def read_steps_option(text: str | None, path: Path) -> StepPlan:
    """Read `--steps 5-8`: steps that follow the start of a run, or a kept checkpoint. Empty without the option.

    Raises:
        ConfigError: the text is not a range, or the run has no such checkpoint, or no step after it.
    """
    if text is None:
        return {}
    run = RecordedRun(path)
    recorded = recorded_trace(run).steps
    starts = [0, *(step for step in run.folder.checkpoint_steps() if step + 1 in recorded)]
    match = re.fullmatch("([0-9]+)-([0-9]+)", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if first - 1 not in starts or last < first:
        after = ", ".join(str(step + 1) for step in starts)
        raise ConfigError(f"--steps is {text}, expected two steps, such as 1-4. {path} can begin at {after}.")
    if last > max(recorded, default=last):
        raise ConfigError(f"--steps is {text}, but {path} has the steps 1 to {max(recorded)}.")
    return {first - 1: [*range(first, last + 1)]}


def _last_equal_start(runs: Sequence[RecordedRun], step: int) -> int:
    """Return the last step before `step` for which both runs kept the same bytes of all weights; 0 is the start."""
    first, second = (
        {
            int(path.name.removeprefix("step-")): {
                name: entry for name, entry in read_manifest(path).items() if name.endswith(".safetensors")
            }
            for path in whole_checkpoints(run.folder)
        }
        for run in runs
    )
    return max((saved for saved in first if saved < step and first[saved] == second.get(saved)), default=0)
