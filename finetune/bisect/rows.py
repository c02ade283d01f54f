"""Compare the training rows of two configurations: which row differs, and in which field."""

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

_AROUND = 8
"""Tokens to show from the first that differs."""


class Rows(NamedTuple):
    """The training rows of a run.

    Attributes:
        title: names the run.
        arguments: of `finetune preview`, which show these rows; empty if they are only in the cache of encoded rows.
        sides: as the model sees them: one side, or the chosen and the rejected answers.
        fingerprint: of all of them, as in run.json.
        config: where to read them as text.
        tokenizer: decodes them.
    """

    title: str
    arguments: str
    sides: Sequence[EncodedExamples]
    fingerprint: str
    config: Config
    tokenizer: Any


class RowDifference(NamedTuple):
    """The first difference between two lists of rows."""

    what: str
    """`rows`, or `order of rows`."""
    text: str
    """A sentence without a full stop."""
    row: int
    """Place of the row among the training rows, from 1."""


def load_rows(title: str, config: Config, arguments: str) -> Rows:
    """Encode the training rows of a configuration, or read them from the cache.

    Raises:
        FinetuneError: the rows or the tokenizer cannot be read.
    """
    tokenizer = build_run_tokenizer(config)
    train: Any = named_splits(encode_for_objective(config, tokenizer, fallbacks=Fallbacks()))["train"]
    return Rows(title, arguments, train.sides, train.fingerprint, config, tokenizer)


def recorded_rows(title: str, config: Config, arguments: str, fingerprint: str) -> Rows | None:
    """Return the training rows with a recorded fingerprint, from their files or else from the cache of encoded rows.

    Returns None if the files have changed and the cache does not hold the earlier rows.
    """
    try:
        now = load_rows(title, config, arguments)
    except FinetuneError:
        return None
    if now.fingerprint == fingerprint:
        return now
    for path in sorted(Path(config.data.cache_dir).expanduser().glob("encoded-*.safetensors")):
        try:
            rows = EncodedExamples([map_rows(path)], now.sides[0].end_id)
        except (ValueError, LookupError, TypeError, AttributeError, OSError):
            continue  # damaged, or of another version
        if rows.fingerprint == fingerprint:
            return Rows(title, "", [rows], fingerprint, config, now.tokenizer)
    return None


def first_difference(first: Rows, second: Rows) -> RowDifference | None:
    """Return the first difference between the rows of two runs; None if they are equal."""
    for a, b in zip(first.sides, second.sides, strict=False):
        digests = [list(rows.digests(with_targets=True)) for rows in (a, b)]
        if digests[0] != digests[1]:
            return _describe(first, second, (a, b), digests)
    return None


def _describe(
    first: Rows, second: Rows, sides: tuple[EncodedExamples, EncodedExamples], digests: list[list[bytes]]
) -> RowDifference:
    a, b = sides
    pairs = list(zip_longest(*digests))
    places = [index for index, (x, y) in enumerate(pairs) if x != y]
    index = places[0]
    in_first, in_second = pairs[index][1] in digests[0], pairs[index][0] in digests[1]
    if sorted(digests[0]) == sorted(digests[1]):
        text = f"both have the same {len(a)} rows, in another order from row {index + 1} on"
        return RowDifference("order of rows", f"{text}: {a.source(index)} and {b.source(index)}", index + 1)
    if index < len(a) and not in_second and (in_first or index == len(b)):
        return RowDifference(
            "rows", f"{second.title} has no row equal to {a.source(index)} of {first.title}", index + 1
        )
    if index < len(b) and not in_first and (in_second or index == len(a)):
        return RowDifference(
            "rows", f"{first.title} has no row equal to {b.source(index)} of {second.title}", index + 1
        )
    where = f"{a.source(index)} of {first.title} and {b.source(index)} of {second.title} differ"
    count = f"{len(places)} of {len(pairs)} rows differ" if len(places) > 1 else f"the other {len(pairs) - 1} are equal"
    text = f"{where} in {_field(first, second, sides, index)}; {count}"
    return RowDifference("rows", text, index + 1)


def _field(first: Rows, second: Rows, sides: tuple[EncodedExamples, EncodedExamples], index: int) -> str:
    """Name the first field in which two rows differ; or the first token, if their texts are equal or not known."""
    a, b = sides
    values = [_raw(rows, side.source(index)) for rows, side in zip((first, second), sides, strict=True)]
    found = None if None in values else _first_field(*values)
    if found is not None:
        name, *both = found
        quoted = [json.dumps(value, ensure_ascii=False, default=str) for value in both]
        return f"{name}: {' and '.join(short_texts(*quoted))}"
    ids, others = a[index].input_ids.tolist(), b[index].input_ids.tolist()
    token = next((n for n, (x, y) in enumerate(zip_longest(ids, others)) if x != y), None)
    if token is None:
        return "which of their tokens carry loss"
    shown = [
        json.dumps(rows.tokenizer.decode(row[token : token + _AROUND]), ensure_ascii=False)
        for rows, row in zip((first, second), (ids, others), strict=True)
    ]
    return f"token {token + 1}: {shown[0]} and {shown[1]}"


def _raw(rows: Rows, place: str) -> Any:
    """Return a row as its file has it; None if that is not known."""
    if not rows.arguments:
        return None
    for part in load_examples(rows.config.data).train.parts:
        for row in part.source.rows():
            if part.source.place(row.number) == place:
                return row.value
    return None


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
