"""Compare the training rows of two runs, as the model sees them: which row differs, and from which token on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.encoded import EncodedExamples
from finetune.data.objective import encode_for_objective
from finetune.data.row_file import map_rows
from finetune.errors import FinetuneError
from finetune.fallbacks import Fallbacks
from finetune.model.tokens import build_run_tokenizer
from finetune.training.checks import named_splits

if TYPE_CHECKING:
    from finetune.config.schema import Config

_NUM_SHOWN = 8
"""Tokens to show from the first that differs."""


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
    for path in sorted(Path(config.data.cache_dir).expanduser().glob("encoded-*.safetensors")):
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
        tokens = _first_differing_tokens(first.tokenizer, [side[index].input_ids.tolist() for side in (a, b)])
        text = f"{a.source(index)} of {first.title} and {b.source(index)} of {second.title} differ in {tokens}; "
        text += f"{len(indices)} of {max(len(a), len(b))} rows differ{'s' * (len(indices) == 1)}"
    else:
        shorter, longer, rows = (first, second, b) if len(a) < len(b) else (second, first, a)
        text = f"{shorter.title} has only {index} rows, without {rows.source(index)} of {longer.title}"
    return index + 1, text


def _first_differing_tokens(tokenizer: Any, rows: Sequence[list[int]]) -> str:
    """Return the position of the first token that differs, and the text of both rows from there."""
    position = next((position for position, (x, y) in enumerate(zip_longest(*rows)) if x != y), None)
    if position is None:
        return "which of their tokens carry loss, or in their label"
    shown = [json.dumps(tokenizer.decode(row[position : position + _NUM_SHOWN]), ensure_ascii=False) for row in rows]
    return f"token {position + 1}: {shown[0]} and {shown[1]}"
