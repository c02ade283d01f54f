"""Name the cause of a difference, from what two sides recorded and from what was computed again."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune.bisect.replaying import FIELDS, Steps, Trace, recorded_steps
from finetune.bisect.rows import first_difference, load_rows
from finetune.config.keys import on_resume, values
from finetune.errors import CheckpointError
from finetune.export.checks import loss_difference
from finetune.export.replay import replay_config
from finetune.runs.comparison import differing, format_value, recorded_facts
from finetune.runs.recorded_run import RecordedRun
from finetune.terminal import without_passwords

if TYPE_CHECKING:
    from finetune.config.schema import Config

_MACHINE = ("device", "precision", "threads")
_ROUNDING = {"num_targets": 0.0, "num_tokens": 0.0, "grad_norm": 1e-4, "learning_rate": 1e-12}
"""The largest relative difference of two values that counts as rounding."""
_ADDED_BY_PEFT = ("base_model.model.", ".base_layer")
"""Parts of the names of a base's tensors."""


@dataclass(frozen=True)
class Cause:
    """What makes the difference."""

    what: str
    """`configuration`, `rows`, `order of rows`, `chat template`, `tokenizer`, `base weights`, `starting weights`,
    `published weights`, `package`, `device`, `precision`, `threads`, `optimizer`, `gradient` or `unknown`."""
    name: str
    """The key, the row, the tensor or the packages; empty if there is none."""
    text: str
    """A sentence without a full stop."""
    commands: tuple[str, ...] = ()
    """Two commands that show the difference."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two that are compared."""

    title: str
    """The name of the side in messages."""
    run: RecordedRun
    """The run that has the checkpoints."""
    config: Config
    """See `replay_config`."""
    record: Mapping[str, Any]
    """What it recorded, or what was recorded when its steps were computed."""
    steps: Steps
    """The values of each step, recorded or computed alike."""
    overrides: Sequence[str] = ()
    """The differences of the configuration from the run's own."""
    python: str | None = None
    """The Python that computes the steps. None: this one."""

    @classmethod
    def of(cls, run: RecordedRun, overrides: Sequence[str] = (), *, settings: Sequence[str] = ()) -> Side:
        """Describe a recorded run, perhaps with overrides. The settings, as `key=value`, are those of all sides.

        Raises:
            CheckpointError: the run has not trained, or see `replay_config`.
            ConfigError: the overrides are wrong.
        """
        if not (steps := recorded_steps(run)):
            raise CheckpointError(f"{run.name} has no recorded step. Name the folder of a run that has trained.")
        return cls(
            title=without_passwords(f"{run.name} with {shlex.join(overrides)}") if overrides else run.name,
            run=run,
            config=replay_config(run, [*settings, *overrides]),
            record=run.record,
            steps=steps,
            overrides=overrides,
        )


def first_divergence(first: Steps, second: Steps, bound: float) -> int | None:
    """Return the first step whose losses differ by more than the bound; None if there is none."""
    return next((step for step, name in _differing_values(first, second, bound) if name == "loss"), None)


def cause_in_records(first: Side, second: Side) -> Cause | None:
    """Return the cause that two records name; None if they hold the same facts."""
    sides = [recorded_facts(side.record) for side in (first, second)]
    data, versions, world = (
        {name: both for name, both in differing([side[part] for side in sides]) if None not in both}
        for part in ("data", "versions", "world")
    )
    if "data.train" in data:
        if "chat_template" in data:
            return Cause("chat template", "", "the chat template differs, and with it the training rows")
        return cause_in_rows(first, second, data["data.train"])
    if "base" in data:
        return Cause("base weights", "", f"{first.title} and {second.title} have bases with other weights")
    versions.pop("git_commit", None)
    facts = versions | {name: world[name] for name in _MACHINE if name in world}
    if not facts:
        return None
    each = ", ".join(f"{name} ({a} and {b})" for name, (a, b) in facts.items())
    text = f"of all recorded facts, {first.title} and {second.title} differ only in {each}. If this is not the cause, "
    text += "the weights of the base or code have changed"
    return Cause("package" if versions else next(iter(facts)), ", ".join(facts), text)


def cause_in_rows(first: Side, second: Side, fingerprints: Sequence[str]) -> Cause:
    """Describe the first difference between the training rows of two sides, given the fingerprints of both."""
    both = [
        load_rows(side.title, side.config, fingerprint)
        for side, fingerprint in zip((first, second), fingerprints, strict=True)
    ]
    if both[0] is None or both[1] is None:
        lost = first.title if both[0] is None else second.title
        text = "the training rows differ, with the fingerprints " + " and ".join(digest[:12] for digest in fingerprints)
        return Cause("rows", "", f"{text}. No row can be named, because those of {lost} are no longer on this machine")
    found = first_difference(both[0], both[1])
    commands = []
    if both[0].is_on_disk and both[1].is_on_disk:
        for side in (first, second):
            preview = ["finetune", "preview", f"{side.run.name}/config.yaml", *side.overrides]
            commands.append(without_passwords(shlex.join([*preview, "--row", str(found.row)])))
    return Cause(found.what, f"row {found.row}", found.text, tuple(commands))


def cause_in_steps(recorded: Side, computed: Side, bound: float) -> Cause:
    """Describe which part of the computation differs, by the first value that does; the records are equal."""
    step, name = next(_differing_values(recorded.steps, computed.steps, bound))
    if name == "grad_norm":
        text = f"the gradient of step {step} differs although its loss is equal: other starting weights, or a kernel"
        return Cause("gradient", "", text)
    if name == "loss" and step > min(computed.steps):
        text = f"the update of step {step - 1} differs although its gradient is equal: the optimizer, or its code"
        return Cause("optimizer", "", text)
    text = f"the {name} of step {step} is another than {recorded.title} has, although all recorded facts are equal"
    return Cause("unknown", "", f"{text}: the weights of the base, a kernel, or code")


def cause_in_setting(keys: Sequence[str], first: Side, second: Side, traces: tuple[Trace, Trace]) -> Cause:
    """Describe what keys change that make the difference by themselves: rows, tensors, or no more than the value."""
    key, section = keys[0], keys[0].partition(".")[0]
    both = [format_value(values(side.config)[key]) for side in (first, second)]
    text = f"{key} is {both[0]} in {first.title} and {both[1]} in {second.title}"
    if len(keys) > 1:
        text = f"only {' and '.join(keys)} together make the difference: {text}"
    if section in ("data", "model") or key == "lora.start_from":
        data = [recorded_facts(trace.record)["data"] for trace in traces]
        rows, templates = ([of[name] for of in data] for name in ("data.train", "chat_template"))
        if templates[0] != templates[1]:
            return Cause("chat template", key, f"{text}, which renders the rows with another chat template")
        if rows[0] != rows[1]:
            found = cause_in_rows(first, second, rows)
            what, name = ("tokenizer", key) if section == "model" else (found.what, found.name)
            return Cause(what, name, f"{text}: {found.text}", found.commands)
        if (tensors := cause_in_weights(traces)) is not None:
            return Cause(tensors.what, tensors.name, f"{text}: {tensors.text}")
    if all(on_resume(one).matters == "noise" for one in keys):
        text += ". Without dropout and noise, this changes only rounding, and rounding errors grow from step to step"
    return Cause("configuration", key, text)


def cause_in_weights(traces: tuple[Trace, Trace]) -> Cause | None:
    """Name the first tensor that differs before the first step, of the base if there is one; None if all are equal."""
    names = [name for name, _ in differing([trace.weights for trace in traces])]
    of_base = [name for name in names if "lora_" not in name]
    if not names:
        return None
    first = (of_base or names)[0]
    for part in _ADDED_BY_PEFT:
        first = first.replace(part, "")
    text = f"{len(names)} of {len(traces[0].weights)} tensors differ before the first step, the first is {first}"
    return Cause("base weights" if of_base else "starting weights", first, text)


def cause_in_modules(traces: tuple[Trace, Trace]) -> Cause | None:
    """Name the packages of which two environments loaded other files; None if all are equal."""
    first, second = (trace.modules for trace in traces)
    modules: dict[str, str] = {}
    for name in sorted(first.keys() & second.keys(), reverse=True):
        if first[name] != second[name]:
            modules[first[name][0]] = name
    if not modules:
        return None
    each = []
    for package, module in sorted(modules.items()):
        a, b = first[module][1], second[module][1]
        each.append(f"{package} ({a} and {b})" if a != b else f"{package} ({a} in both, with another {module})")
    return Cause("package", ", ".join(sorted(modules)), f"the loaded packages differ: {', '.join(each)}")


def _differing_values(first: Steps, second: Steps, bound: float) -> Iterator[tuple[int, str]]:
    """Yield the step and the name of each value that differs beyond rounding, in the order of their computation."""
    bounds = {**_ROUNDING, "loss": bound, "grad_norm": max(bound, _ROUNDING["grad_norm"])}
    for step in sorted(first.keys() & second.keys()):
        for name in FIELDS:
            a, b = first[step].get(name), second[step].get(name)
            if a is None or b is None or a == b or (math.isnan(a) and math.isnan(b)):
                continue
            apart = loss_difference(a, b) if name == "loss" else abs(a - b) / max(abs(a), abs(b))
            if not apart <= bounds[name]:  # true if one of them is NaN
                yield step, name
