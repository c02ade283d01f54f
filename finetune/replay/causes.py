"""Name the cause of a difference between two runs: first from facts and rows, then from values computed again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

from finetune.config.config_files import local_path
from finetune.config.keys import on_resume, values
from finetune.config.schema import Config
from finetune.data.encoded import EncodedExamples
from finetune.data.row_file import map_rows
from finetune.errors import FinetuneError
from finetune.fallbacks import Fallbacks
from finetune.model.tokens import build_run_tokenizer
from finetune.replay.trace import FIELDS, Trace
from finetune.runs.comparison import differing, format_value, loss_difference, recorded_facts
from finetune.runs.recorded_run import RecordedRun
from finetune.runs.row_comparison import compare_renderings
from finetune.training.checks import named_splits
from finetune.training.objective import encode_for_objective

_NUM_SHOWN = 8
"""Tokens to show from the first that differs."""
_MACHINE = ("device", "precision", "threads")
_ROUNDING = {"num_targets": 0.0, "num_tokens": 0.0, "grad_norm": 1e-4, "learning_rate": 1e-12}
"""The largest relative difference of two values that counts as rounding."""
_ADDED_BY_PEFT = ("base_model.model.", ".base_layer")
"""Parts of the names of a base's tensors."""


class TrainingRows(NamedTuple):
    """The training rows of a run."""

    title: str
    """The name of the run in messages."""
    sides: Sequence[EncodedExamples]
    """One side, or the chosen and the rejected answers."""
    tokenizer: Any


def load_rows(title: str, config: Config, fingerprint: str) -> TrainingRows | None:
    """Return the training rows with a fingerprint: from their files, or else from the cache of encoded rows.

    Returns None if the files have changed and the cache does not hold the earlier rows, or if nothing can be read.
    """
    try:
        tokenizer = build_run_tokenizer(config)
        train: Any = named_splits(encode_for_objective(config, tokenizer, fallbacks=Fallbacks()))["train"]
    except FinetuneError:
        return None
    if train.fingerprint == fingerprint:
        return TrainingRows(title, train.sides, tokenizer)
    for path in sorted(local_path(config.data.cache_dir).glob("encoded-*.safetensors")):
        try:
            rows = EncodedExamples.of(map_rows(path), train.sides[0].end_id)
        except (ValueError, OSError):
            continue  # damaged, or of another version
        if rows.fingerprint == fingerprint:
            return TrainingRows(title, [rows], tokenizer)
    return None


def first_differing_row(first: TrainingRows, second: TrainingRows) -> tuple[int, str]:
    """Return the number of the first differing row, from 1, and a sentence. The rows have other fingerprints."""
    sides = list(zip(first.sides, second.sides, strict=False))
    digests = [
        [list(zip(rows.digests(with_targets=True), rows.is_good.tolist(), strict=True)) for rows in side]
        for side in sides
    ]
    number = next((number for number, (in_a, in_b) in enumerate(digests) if in_a != in_b), 0)
    (a, b), (in_a, in_b) = sides[number], digests[number]
    indices = [index for index, (x, y) in enumerate(zip_longest(in_a, in_b)) if x != y] or [0]
    index = indices[0]
    if sorted(in_a) == sorted(in_b):
        text = f"both have the same {len(a)} rows, in another order from row {index + 1} on"
        text += f": {a.source(index)} and {b.source(index)}"
    elif index < min(len(a), len(b)):
        tokenizers = (first.tokenizer, second.tokenizer)
        tokens = _first_differing_tokens(tokenizers, [side[index].input_ids.tolist() for side in (a, b)])
        text = f"{a.source(index)} of {first.title} and {b.source(index)} of {second.title} differ in {tokens}; "
        text += f"{len(indices)} of {max(len(a), len(b))} rows differ{'s' * (len(indices) == 1)}"
    else:
        shorter, longer, rows = (first, second, b) if len(a) < len(b) else (second, first, a)
        text = f"{shorter.title} has only {index} rows, without {rows.source(index)} of {longer.title}"
    return index + 1, text


def _first_differing_tokens(tokenizers: Sequence[Any], rows: Sequence[list[int]]) -> str:
    """Return the position of the first token that differs, and the text of both rows from there."""
    position = next((position for position, (x, y) in enumerate(zip_longest(*rows)) if x != y), None)
    if position is None:
        return "which of their tokens carry loss, or in their label"
    texts = [
        tokenizer.decode(row[position : position + _NUM_SHOWN]) for tokenizer, row in zip(tokenizers, rows, strict=True)
    ]
    shown = [json.dumps(text, ensure_ascii=False) for text in texts]
    return f"token {position + 1}: {shown[0]} and {shown[1]}"


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
    """The configuration by which the steps are computed again."""
    trace: Trace
    settings: Sequence[str] = ()
    """The settings of `--set`, as `key=value`. The configuration has them already."""


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
    sides = (first, second)
    a, b = (load_rows(side.title, side.config, digest) for side, digest in zip(sides, fingerprints, strict=True))
    because = "the chat template differs, and with it the training rows" if other_template else ""
    if a is None or b is None:
        recorded = compare_renderings(first.run.folder, second.run.folder)
        if recorded is not None:
            return Cause("row", f"line {recorded.line}", f"{because}{': ' * other_template}{recorded}")
        if because:
            return Cause("row", "", because)
        text = "the training rows differ, with the fingerprints " + " and ".join(digest[:12] for digest in fingerprints)
        missing = (first if a is None else second).title
        return Cause("row", "", f"{text}. The rows of {missing} are no longer on this machine, so no row can be named")
    row, text = first_differing_row(a, b)
    return Cause("row", f"row {row}", f"{because}{': ' * other_template}{text}")


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
