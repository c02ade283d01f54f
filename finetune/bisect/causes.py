"""Name the cause of a difference, from what two runs recorded and from what was computed again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.bisect.replaying import FIELDS, Steps, Trace
from finetune.bisect.rows import Rows, first_difference, load_rows, recorded_rows
from finetune.config.shipped_files import resolve_shipped
from finetune.export.checks import loss_difference
from finetune.runs.comparison import differing, format_value, recorded_facts

if TYPE_CHECKING:
    from finetune.config.schema import Config

GRADIENT_BOUND = 1e-4
"""The largest relative difference of two gradient norms that counts as rounding."""
_MACHINE = ("device", "precision", "threads")
_WRAPPERS = ("base_model.model.", ".base_layer")
"""Parts that PEFT adds to the names of a base's tensors."""


@dataclass(frozen=True)
class Cause:
    """What makes the difference.

    Attributes:
        what: `configuration`, `rows`, `order of rows`, `chat template`, `tokenizer`, `base weights`,
            `starting weights`, `published weights`, `package`, `device`, `precision`, `threads`, `optimizer`,
            `gradient`, or `unknown`.
        name: the key, the tensor, the package or the file; empty if there is none.
        text: a sentence without a full stop.
        commands: two commands that show the difference.
    """

    what: str
    name: str
    text: str
    commands: tuple[str, ...] = ()


class View(NamedTuple):
    """A run as it was recorded, or as it is computed here."""

    title: str
    config: Config
    arguments: str
    """Of `finetune preview`, which give this configuration."""
    record: Mapping[str, Any]
    steps: Steps


def first_divergence(first: Steps, second: Steps, bound: float) -> int | None:
    """Return the first step whose losses differ by more than the bound; None if there is none."""
    return next((step for step, name in _differing_fields(first, second, bound) if name == "loss"), None)


def cause_in_records(first: View, second: View) -> Cause | None:
    """Return the cause that the records of two runs name; None if they record the same facts."""
    sides = [recorded_facts(view.record) for view in (first, second)]
    data, versions, world = (
        {name: values for name, values in differing([side[part] for side in sides]) if None not in values}
        for part in ("data", "versions", "world")
    )
    if "data.train" in data and "chat_template" in data:
        text = f"the chat template differs ({_short(data['chat_template'])}), and with it the training rows"
        return Cause("chat template", "", text)
    if "data.train" in data:
        rows = [
            recorded_rows(view.title, view.config, view.arguments, fingerprint)
            for view, fingerprint in zip((first, second), data["data.train"], strict=True)
        ]
        if rows[0] is not None and rows[1] is not None:
            return cause_in_rows(rows[0], rows[1])
        lost = first.title if rows[0] is None else second.title
        text = f"the training rows differ (fingerprints {_short(data['data.train'])})"
        return Cause("rows", "", f"{text}. The rows of {lost} are no longer on this machine, so no row can be named")
    versions.pop("git_commit", None)
    if versions:
        each = [f"{name} {a} and {b}" for name, (a, b) in versions.items()]
        text = f"the versions of packages differ: {', '.join(each)} in {first.title} and {second.title}"
        return Cause("package", ", ".join(versions), f"{text}. Nothing else that is recorded differs")
    for name in _MACHINE:
        if name in world:
            a, b = world[name]
            return Cause(name, name, f"{first.title} computed with {name} {a}, and {second.title} with {b}")
    return None


def cause_in_steps(recorded: View, computed: View, bound: float) -> Cause:
    """Describe by the values of the steps which part of the computation differs, if the records are equal."""
    step, name = next(_differing_fields(recorded.steps, computed.steps, bound))
    title, is_first = recorded.title, step == min(computed.steps)
    newer = _newer_weights(recorded) if name == "loss" and is_first else None
    if newer is not None:
        text = f"{newer} was written after {title} was started, and already the loss of step {step} differs"
        return Cause("base weights", str(newer), text)
    if name == "loss" and not is_first:
        text = f"the update after step {step - 1} differs, although its gradient is equal"
        return Cause("optimizer", "", f"{text}: the optimizer computes something else than in {title}")
    if name == "grad_norm":
        text = f"the gradient of step {step} differs, although its loss is equal"
        return Cause("gradient", "", f"{text}: the adapter started with other weights, or a kernel computes otherwise")
    text = f"the {name} of step {step} differs from the record of {title}, and no recorded fact does"
    return Cause("unknown", "", f"{text}: the base weights, a kernel or the code has changed")


def cause_in_setting(keys: Sequence[str], views: tuple[View, View], traces: tuple[Trace, Trace]) -> Cause:
    """Describe what keys change, which alone make the difference: rows, tensors, or the value itself."""
    first, second = views
    values = [format_value(_value(view.config, keys[0])) for view in views]
    text = f"{keys[0]} is {values[0]} in {first.title} and {values[1]} in {second.title}"
    if len(keys) > 1:
        text = f"together, {', '.join(keys)} make the difference: {text}"
    setting = Cause("configuration", keys[0], text)
    section = keys[0].partition(".")[0]
    if section not in ("data", "model") and keys[0] != "lora.start_from":
        return setting
    data = [recorded_facts(trace.record)["data"] for trace in traces]
    if data[0]["data.train"] != data[1]["data.train"]:
        if data[0]["chat_template"] != data[1]["chat_template"]:
            return Cause("chat template", keys[0], f"{text}, which renders the rows with another chat template")
        found = cause_in_rows(*(load_rows(view.title, view.config, view.arguments) for view in views))
        if section == "model":
            return Cause("tokenizer", keys[0], f"{text}, which has another tokenizer: {found.text}")
        return Cause(found.what, found.name, f"{text}: {found.text}", found.commands)
    return cause_in_weights(traces, f"{text}: ") or setting


def cause_in_rows(first: Rows, second: Rows) -> Cause:
    """Describe the first difference between the rows of two runs."""
    found = first_difference(first, second)
    if found is None:
        return Cause("unknown", "", "the training rows differ in their number of answers only")
    commands = tuple(f"finetune preview {rows.arguments} --row {found.row}" for rows in (first, second))
    has_both = first.arguments and second.arguments
    return Cause(found.what, f"row {found.row}", found.text, commands if has_both else ())


def cause_in_weights(traces: tuple[Trace, Trace], before: str = "") -> Cause | None:
    """Name the first tensor that differs before the first step, of the base if possible; None if all are equal."""
    names = [name for name, _ in differing([trace.weights for trace in traces])]
    if not names:
        return None
    of_base = [name for name in names if "lora_" not in name]
    what, first = ("base weights", of_base[0]) if of_base else ("starting weights", names[0])
    for part in _WRAPPERS:
        first = first.replace(part, "")
    number = len({*traces[0].weights, *traces[1].weights})
    text = f"{len(names)} of {number} tensors differ before the first step, the first is {first}"
    return Cause(what, first, f"{before}{text}")


def cause_in_modules(titles: tuple[str, str], traces: tuple[Trace, Trace]) -> Cause | None:
    """Name the packages whose loaded modules differ between two environments; None if all are equal."""
    first, second = (trace.modules for trace in traces)
    packages: dict[str, list[str]] = {}
    for name in first.keys() & second.keys():
        if first[name] != second[name]:
            packages.setdefault(first[name][0], []).append(name)
    each = []
    for package, modules in sorted(packages.items()):
        a, b, module = first[min(modules)][1], second[min(modules)][1], min(modules)
        each.append(f"{package} is {a} and {b}" if a != b else f"{package} {a} has another {module}")
    if not each:
        return None
    text = f"{titles[0]} and {titles[1]} have other packages: {'; '.join(each)}"
    return Cause("package", ", ".join(sorted(packages)), text)


def _differing_fields(first: Steps, second: Steps, bound: float) -> Iterator[tuple[int, str]]:
    """Yield the steps and the names of values that differ beyond rounding, in the order of their computation."""
    for step in sorted(first.keys() & second.keys()):
        for name in FIELDS:
            a, b = first[step].get(name), second[step].get(name)
            if a is not None and b is not None and not _is_equal(name, a, b, bound):
                yield step, name


def _is_equal(name: str, a: float, b: float, bound: float) -> bool:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    if name == "loss":
        return loss_difference(a, b) <= bound
    relative = GRADIENT_BOUND if name == "grad_norm" else 0.0 if name.startswith("num_") else 1e-12
    return abs(a - b) <= max(relative, bound * 100 * (name == "grad_norm")) * abs(a)


def _newer_weights(view: View) -> Path | None:
    """Return a file of weights at `model.path` or `lora.start_from` that was written after a run was first started."""
    starts = view.record.get("starts")
    if not isinstance(starts, list) or not starts:
        return None
    started = datetime.fromisoformat(str(starts[0]))
    for place in (view.config.model.path, view.config.lora.start_from):
        folder = Path(resolve_shipped(place)).expanduser() if place else None
        for file in sorted(folder.rglob("*.safetensors")) if folder is not None and folder.is_dir() else ():
            if datetime.fromtimestamp(file.stat().st_mtime, UTC) > started:
                return file
    return None


def _value(config: Config, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(config, section) if section else config, name)


def _short(digests: Sequence[str]) -> str:
    return " and ".join(digest[:12] for digest in digests)
