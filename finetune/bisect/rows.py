"""Compare the training rows of two runs: which row differs, and in which field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.objective import encode_for_objective
from finetune.data.row_file import map_rows
from finetune.errors import FinetuneError
from finetune.fallbacks import Fallbacks
from finetune.model.new_tokens import build_run_tokenizer
from finetune.training.checks import named_splits
from finetune.training.resume import short_texts

if TYPE_CHECKING:
    from finetune.config.schema import Config

_NUM_SHOWN = 8
"""Tokens to show from the first that differs."""


class Rows(NamedTuple):
    """The training rows of a run."""

    title: str
    """Names the run."""
    sides: Sequence[EncodedExamples]
    """The rows as the model sees them: one side, or the chosen and the rejected answers."""
    config: Config
    tokenizer: Any
    is_on_disk: bool = True
    """False if the rows are only in the cache of encoded rows."""


class RowDifference(NamedTuple):
    """The first difference between two lists of rows."""

    what: str
    """`rows` or `order of rows`."""
    row: int
    """Its place among the training rows, from 1."""
    text: str


def load_rows(title: str, config: Config, fingerprint: str) -> Rows | None:
    """Return the training rows with a fingerprint: as their files give them, or else from the cache of encoded rows.

    Returns None if the files have changed and the cache does not hold the earlier rows, or if nothing can be read.
    """
    try:
        tokenizer = build_run_tokenizer(config)
        train: Any = named_splits(encode_for_objective(config, tokenizer, fallbacks=Fallbacks()))["train"]
    except FinetuneError:
        return None
    if train.fingerprint == fingerprint:
        return Rows(title, train.sides, config, tokenizer)
    for path in sorted(Path(config.data.cache_dir).expanduser().glob("encoded-*.safetensors")):
        try:
            rows = EncodedExamples([map_rows(path)], train.sides[0].end_id)
        except (ValueError, LookupError, TypeError, AttributeError, OSError):
            continue  # damaged, or of another version
        if rows.fingerprint == fingerprint:
            return Rows(title, [rows], config, tokenizer, is_on_disk=False)
    return None


def first_difference(first: Rows, second: Rows) -> RowDifference:
    """Describe the first difference between rows that have other fingerprints."""
    sides = list(zip(first.sides, second.sides, strict=False))
    digests = [
        [list(zip(rows.digests(with_targets=True), rows.rows.is_good.tolist(), strict=True)) for rows in side]
        for side in sides
    ]
    (a, b), (in_a, in_b) = next(
        (pair for pair in zip(sides, digests, strict=True) if pair[1][0] != pair[1][1]), (sides[0], digests[0])
    )
    places = [index for index, (x, y) in enumerate(zip_longest(in_a, in_b)) if x != y] or [0]
    index, num_rows = places[0], max(len(a), len(b))
    is_missing = index < len(a) and in_a[index] not in in_b
    is_added = index < len(b) and in_b[index] not in in_a
    if sorted(in_a) == sorted(in_b):
        text = f"both have the same {len(a)} rows, in another order from row {index + 1} on"
        return RowDifference("order of rows", index + 1, f"{text}: {a.source(index)} and {b.source(index)}")
    if is_missing and is_added:
        text = f"{a.source(index)} of {first.title} and {b.source(index)} of {second.title} differ in "
        text += (
            f"{_field(first, second, (a, b), index)}; {len(places)} of {num_rows} rows differ{'s' * (len(places) == 1)}"
        )
    elif is_missing:
        text = f"{second.title} has no row equal to {a.source(index)} of {first.title}"
    else:
        text = f"{first.title} has no row equal to {b.source(min(index, len(b) - 1))} of {second.title}"
    return RowDifference("rows", index + 1, text)


def _field(first: Rows, second: Rows, sides: tuple[EncodedExamples, EncodedExamples], index: int) -> str:
    """Name the first field in which two rows differ; or the first token, if their texts are equal or not known."""
    values = [_raw(rows, side.source(index)) for rows, side in zip((first, second), sides, strict=True)]
    found = None if None in values else _first_field(*values)
    if found is not None:
        name, *both = found
        quoted = [json.dumps(value, ensure_ascii=False, default=str) for value in both]
        return f"{name}: {' and '.join(short_texts(*quoted))}"
    ids = [side[index].input_ids.tolist() for side in sides]
    token = next((number for number, (x, y) in enumerate(zip_longest(*ids)) if x != y), None)
    if token is None:
        return "which of their tokens carry loss"
    shown = [first.tokenizer.decode(row[token : token + _NUM_SHOWN]) for row in ids]
    return f"token {token + 1}: {json.dumps(shown[0])} and {json.dumps(shown[1])}"


def _raw(rows: Rows, place: str) -> Any:
    """Return a row as its file has it; None if that is not known."""
    parts = load_examples(rows.config.data).train.parts if rows.is_on_disk else ()
    each = ((part.source.place(row.number), row.value) for part in parts for row in part.source.rows())
    return next((value for name, value in each if name == place), None)


def _first_field(a: Any, b: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the path and both values of the first difference of two JSON values: `messages[1].content`."""
    inner: Iterable[tuple[str, Any, Any]]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        inner = ((f"{name}.{key}".lstrip("."), a.get(key), b.get(key)) for key in {**a, **b})
    elif isinstance(a, list) and isinstance(b, list):
        inner = ((f"{name}[{index}]", x, y) for index, (x, y) in enumerate(zip_longest(a, b)))
    else:
        return None if a == b else (name, a, b)
    return next((found for key, x, y in inner if (found := _first_field(x, y, key)) is not None), None)
