"""Name the cause of a difference: first from facts, then from values that were computed again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.config.keys import on_resume, values
from finetune.replay.causes import first_differing_row, load_rows
from finetune.replay.trace import FIELDS, Trace
from finetune.runs.comparison import differing, format_value, loss_difference, recorded_facts
from finetune.runs.recorded_run import RecordedRun

if TYPE_CHECKING:
    from finetune.config.schema import Config

_MACHINE = ("device", "precision", "threads")
_ROUNDING = {"num_targets": 0.0, "num_tokens": 0.0, "grad_norm": 1e-4, "learning_rate": 1e-12}
"""The largest relative difference of two values that counts as rounding."""
_ADDED_BY_PEFT = ("base_model.model.", ".base_layer")
"""Parts of the names of a base's tensors."""


@dataclass(frozen=True)
class Cause:
    """The cause of a difference."""

    type: Literal["row", "key", "tensor", "package", "computation"]
    name: str
    """The row, the keys, the tensor, the packages or the part of the computation; empty if it is not known."""
    text: str
    """A sentence without a full stop."""


class ComparedSide(NamedTuple):
    """One of the two that are compared."""

    title: str
    """The name of the side in messages."""
    run: RecordedRun
    """The run that has the checkpoints."""
    config: Config
    """See `replay_config`."""
    trace: Trace


def first_divergence(first: ComparedSide, second: ComparedSide, bound: float) -> int | None:
    """Return the first step in which the losses differ by more than the bound. Return None if there is no such step."""
    return next((step for step, name in _differing_values(first, second, bound) if name == "loss"), None)


def cause_in_facts(first: ComparedSide, second: ComparedSide) -> Cause | None:
    """Return the cause that the facts of both sides name; None if the facts are equal.

    Facts are the rows, the weights before the first step, and the versions and the machine in run.json.
    """
    facts = [recorded_facts(side.trace.record) for side in (first, second)]
    # Of each part, the facts that both sides recorded with different values.
    data, versions, world = (
        {name: both for name, both in differing([side[part] for side in facts]) if None not in both}
        for part in ("data", "versions", "world")
    )
    versions.pop("git_commit", None)
    environment = versions | {name: world[name] for name in _MACHINE if name in world}
    listed = ", ".join(f"{name} ({a} and {b})" for name, (a, b) in environment.items())
    cause = None
    if "data.train" in data:
        cause = _cause_in_rows(first, second, data["data.train"], other_template="chat_template" in data)
    elif first.trace.weights and second.trace.weights:
        cause = _cause_in_weights(first, second)
    if cause is None and "base" in data:
        cause = Cause("tensor", "", f"{first.title} and {second.title} have bases with other weights")
    if cause is not None:
        return replace(cause, text=f"{cause.text}. They differ in {listed} as well") if listed else cause
    if not listed:
        return None
    text = f"of all recorded facts, {first.title} and {second.title} differ only in {listed}"
    return Cause("package" if versions else "computation", ", ".join(environment), text)


def _cause_in_rows(
    first: ComparedSide, second: ComparedSide, fingerprints: Sequence[str], *, other_template: bool
) -> Cause:
    """Describe the first difference between the training rows, given their fingerprints."""
    if other_template:
        return Cause("row", "", "the chat template differs, and with it the training rows")
    sides = (first, second)
    a, b = (load_rows(side.title, side.config, digest) for side, digest in zip(sides, fingerprints, strict=True))
    if a is None or b is None:
        text = "the training rows differ, with the fingerprints " + " and ".join(digest[:12] for digest in fingerprints)
        missing = (first if a is None else second).title
        return Cause("row", "", f"{text}. The rows of {missing} are no longer on this machine, so no row can be named")
    row, text = first_differing_row(a, b)
    return Cause("row", f"row {row}", text)


def _cause_in_weights(first: ComparedSide, second: ComparedSide) -> Cause | None:
    """Name the first tensor that differs before the first step, of the base if there is one; None if all are equal."""
    names = [name for name, _ in differing([first.trace.weights, second.trace.weights])]
    if not names:
        return None
    tensor = next((name for name in names if "lora_" not in name), names[0])
    for part in _ADDED_BY_PEFT:
        tensor = tensor.replace(part, "")
    text = f"{len(names)} of {len(first.trace.weights)} tensors differ before the first step, the first is {tensor}"
    return Cause("tensor", tensor, text)


def cause_in_key(key: str, first: ComparedSide, second: ComparedSide) -> Cause:
    """Describe the effect of the only key that differs: on rows, on weights, or only by its value.

    The steps of both sides were computed.
    """
    texts = [format_value(values(side.config)[key]) for side in (first, second)]
    text = f"{key} is {texts[0]} in {first.title} and {texts[1]} in {second.title}"
    if key.startswith(("data.", "model.")) or key == "lora.start_from":
        cause = cause_in_facts(first, second)
        if cause is not None and cause.type in ("row", "tensor"):
            return replace(cause, name=cause.name or key, text=f"{text}: {cause.text}")
    if on_resume(key).matters == "noise":
        text += ". Without dropout and noise, this changes only rounding, and rounding errors grow from step to step"
    return Cause("key", key, text)


def cause_in_steps(first: ComparedSide, second: ComparedSide, bound: float) -> Cause:
    """Name the first value that differs between two sides with the same settings and facts."""
    step, name = next(_differing_values(first, second, bound))
    part = f"{name} of step {step}"
    text = f"the {part} is the first value that differs, although settings and recorded facts are equal: the weights "
    return Cause("computation", part, f"{text}of the base, a kernel, the optimizer, or other code")


def _differing_values(first: ComparedSide, second: ComparedSide, bound: float) -> Iterator[tuple[int, str]]:
    """Yield the step and the name of each value that differs beyond rounding, in the order of their computation."""
    bounds = {**_ROUNDING, "loss": bound, "grad_norm": max(bound, _ROUNDING["grad_norm"])}
    for step in sorted(first.trace.steps.keys() & second.trace.steps.keys()):
        for name in FIELDS:
            a, b = (side.trace.steps[step].get(name) for side in (first, second))
            if a is None or b is None or a == b or (math.isnan(a) and math.isnan(b)):
                continue
            difference = loss_difference(a, b) if name == "loss" else abs(a - b) / max(abs(a), abs(b))
            if not difference <= bounds[name]:  # true if one of them is NaN
                yield step, name
