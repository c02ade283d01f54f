"""What the encoded rows of a split are like as a whole: lengths, shares, rows that were cut or come twice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import torch

from finetune.data.encoded import EncodedExamples
from finetune.data.gates import is_answer_truncated
from finetune.diagnose.preview_tokens import on_one_line

MOST_NAMED = 20
"""Rows or groups of rows that a summary names; all are counted."""
_MOST_BINS = 12


@dataclass(frozen=True)
class RowPlace:
    """One row."""

    row: int
    """In its split, from 1."""
    source: str
    """Where it was read: `orders/train.jsonl:17`. Nothing in it steers a terminal."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """Rows that have something in common: how many there are, and the first of them."""

    count: int
    first: list[RowPlace]


@dataclass(frozen=True)
class Bin:
    """A bar of the histogram: rows with `shortest` to `longest` tokens, both included."""

    shortest: int
    longest: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """A split as the model will see it."""

    kind: str
    """What a row was: messages, prompt_completion, text, or several."""
    rows: int
    tokens: int
    target_tokens: int
    target_share: float
    shortest: int
    median: int
    percentile_90: int
    percentile_99: int
    longest: int
    histogram: list[Bin]
    truncated: RowGroup
    """Cut at data.max_length."""
    answers_cut: RowGroup
    """Of these, the ones that end inside of an answer: its end of turn is not trained."""
    without_targets: RowGroup
    duplicates: RowGroup
    """Rows that repeat an earlier row of the split, token for token."""
    duplicate_groups: list[RowGroup]
    """Rows that are equal, the largest groups first."""
    in_training: RowGroup
    """Rows that the training split has too, token for token. Always empty for the training split itself."""


def summarize(examples: EncodedExamples, digests: Sequence[bytes], training: Iterable[bytes] = ()) -> SplitSummary:
    """Look at every row of a split.

    Args:
        examples: the split.
        digests: of its rows, see `row_digests`.
        training: those of the training split, where this is another.
    """
    lengths = examples.lengths
    ordered = lengths.sort().values
    num_tokens, num_targets = int(lengths.sum()), int(examples.num_targets.sum())
    equal = _equal_rows(digests, examples.rows.numbers.tolist())
    repeated = sorted(row for rows in equal for row in rows[1:])
    known = set(training)
    return SplitSummary(
        kind=examples.kind,
        rows=len(examples),
        tokens=num_tokens,
        target_tokens=num_targets,
        target_share=num_targets / num_tokens if num_tokens else 0.0,
        shortest=int(ordered[0]),
        median=_percentile(ordered, 0.5),
        percentile_90=_percentile(ordered, 0.9),
        percentile_99=_percentile(ordered, 0.99),
        longest=int(ordered[-1]),
        histogram=histogram(lengths),
        truncated=_group(examples, _true(examples.is_truncated)),
        answers_cut=_group(examples, _true(is_answer_truncated(examples))),
        without_targets=_group(examples, _true(examples.num_targets == 0)),
        duplicates=_group(examples, repeated),
        duplicate_groups=[_group(examples, rows) for rows in equal[:MOST_NAMED]],
        in_training=_group(examples, [row for row, digest in enumerate(digests) if digest in known]),
    )


def row_digests(examples: EncodedExamples) -> list[bytes]:
    """For each row a digest of its tokens and of which of them carry loss."""
    ids, targets = examples.rows.token_ids.numpy(), examples.rows.is_target.numpy()
    edges = examples.rows.offsets.tolist()
    return [
        blake2b(ids[start:end].tobytes() + targets[start:end].tobytes(), digest_size=16).digest()
        for start, end in pairwise(edges)
    ]


def place(examples: EncodedExamples, row: int) -> RowPlace:
    """Where a row is, given its index from 0."""
    return RowPlace(row + 1, on_one_line(examples.source(row)))


def histogram(lengths: torch.Tensor) -> list[Bin]:
    """Rows by length, in at most a dozen bins of equal and round width, from the shortest row to the longest.

    Args:
        lengths: int64, shape (rows,), at least one.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = _round_width(longest - shortest + 1)
    first = shortest // width
    counts = torch.bincount(lengths // width - first).tolist()
    return [Bin((first + index) * width, (first + index + 1) * width - 1, rows) for index, rows in enumerate(counts)]


def _round_width(span: int) -> int:
    """1, 2 or 5 times a power of ten: the least that cuts a span into few enough bins, wherever it begins."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if math.ceil(span / (factor * power)) < _MOST_BINS:
                return factor * power
        power *= 10


def _percentile(ordered: torch.Tensor, share: float) -> int:
    """The least length that so many of the rows do not exceed."""
    return int(ordered[max(0, math.ceil(share * len(ordered)) - 1)])


def _equal_rows(digests: Sequence[bytes], numbers: Sequence[int]) -> list[list[int]]:
    """Groups of equal rows, the largest first. A row that a mixture repeats is one row of its source."""
    groups: dict[bytes, dict[int, int]] = {}
    for row, (digest, number) in enumerate(zip(digests, numbers, strict=True)):
        groups.setdefault(digest, {}).setdefault(number, row)
    equal = [list(rows.values()) for rows in groups.values() if len(rows) > 1]
    return sorted(equal, key=lambda rows: (-len(rows), rows))


def _true(mask: torch.Tensor) -> list[int]:
    rows: list[int] = mask.nonzero()[:, 0].tolist()
    return rows


def _group(examples: EncodedExamples, rows: Sequence[int]) -> RowGroup:
    return RowGroup(count=len(rows), first=[place(examples, row) for row in rows[:MOST_NAMED]])
