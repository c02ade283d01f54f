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


class TrainingRows(NamedTuple):
    """The training rows of a run."""

    title: str
    """The name of the run in messages."""
    sides: Sequence[EncodedExamples]
    """The rows as the model sees them: one side, or the chosen and the rejected answers."""
    config: Config
    tokenizer: Any
    is_on_disk: bool = True
    """False if the rows are only in the cache of encoded rows."""

    def value(self, place: str) -> Any:
        """Return the row at a place as its file has it; None if the files have changed."""
        parts = load_examples(self.config.data).train.parts if self.is_on_disk else ()
        rows = ((part.source.place(row.number), row.value) for part in parts for row in part.source.rows())
        return next((value for name, value in rows if name == place), None)


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
        return TrainingRows(title, train.sides, config, tokenizer)
    for path in sorted(Path(config.data.cache_dir).expanduser().glob("encoded-*.safetensors")):
        try:
            rows = EncodedExamples([map_rows(path)], train.sides[0].end_id)
        except (ValueError, LookupError, TypeError, AttributeError, OSError):
            continue  # damaged, or of another version
        if rows.fingerprint == fingerprint:
            return TrainingRows(title, [rows], config, tokenizer, is_on_disk=False)
    return None


def first_difference(first: TrainingRows, second: TrainingRows) -> tuple[int, str]:
    """Return the number of the first differing row, from 1, and a sentence. The rows have other fingerprints."""
    sides = list(zip(first.sides, second.sides, strict=False))
    digests = [
        [list(zip(rows.digests(with_targets=True), rows.rows.is_good.tolist(), strict=True)) for rows in side]
        for side in sides
    ]
    differing = (number for number, (in_a, in_b) in enumerate(digests) if in_a != in_b)
    number = next(differing, 0)
    (a, b), (in_a, in_b) = sides[number], digests[number]
    indices = [index for index, (x, y) in enumerate(zip_longest(in_a, in_b)) if x != y] or [0]
    index = indices[0]
    if sorted(in_a) == sorted(in_b):
        text = f"both have the same {len(a)} rows, in another order from row {index + 1} on"
        text += f": {a.source(index)} and {b.source(index)}"
    elif index < min(len(a), len(b)):
        field = _first_differing_field(first, second, (a, b), index)
        text = f"{a.source(index)} of {first.title} and {b.source(index)} of {second.title} differ in {field}; "
        text += f"{len(indices)} of {max(len(a), len(b))} rows differ{'s' * (len(indices) == 1)}"
    else:
        shorter, longer, rows = (first, second, b) if len(a) < len(b) else (second, first, a)
        text = f"{shorter.title} has only {index} rows, without {rows.source(index)} of {longer.title}"
    return index + 1, text


def _first_differing_field(
    first: TrainingRows, second: TrainingRows, sides: tuple[EncodedExamples, EncodedExamples], index: int
) -> str:
    """Name the first field in which two rows differ, or the first token if their texts are equal or not known."""
    values = [rows.value(side.source(index)) for rows, side in zip((first, second), sides, strict=True)]
    difference = None if None in values else _first_json_difference(*values)
    if difference is not None:
        path, *both = difference
        quoted = [json.dumps(value, ensure_ascii=False, default=str) for value in both]
        return f"{path}: {' and '.join(short_texts(*quoted))}"
    ids = [side[index].input_ids.tolist() for side in sides]
    token = next((number for number, (x, y) in enumerate(zip_longest(*ids)) if x != y), None)
    if token is None:
        return "which of their tokens carry loss"
    shown = [first.tokenizer.decode(row[token : token + _NUM_SHOWN]) for row in ids]
    return f"token {token + 1}: {json.dumps(shown[0])} and {json.dumps(shown[1])}"


def _first_json_difference(a: Any, b: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the path and both values of the first difference of two JSON values: `messages[1].content`."""
    items: Iterable[tuple[str, Any, Any]]
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        items = ((f"{path}.{key}".lstrip("."), a.get(key), b.get(key)) for key in {**a, **b})
    elif isinstance(a, list) and isinstance(b, list):
        items = ((f"{path}[{index}]", x, y) for index, (x, y) in enumerate(zip_longest(a, b)))
    else:
        return None if a == b else (path, a, b)
    differences = (_first_json_difference(x, y, inner) for inner, x, y in items)
    return next((difference for difference in differences if difference is not None), None)
