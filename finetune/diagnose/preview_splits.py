"""Summarize the encoded rows of a split: lengths, tokens with loss, truncated rows and duplicates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from finetune.data.encoded import EncodedExamples
from finetune.data.preferences import EncodedLabelled
from finetune.data.preferences import EncodedPairs
from finetune.diagnose.preview_splits import on_one_line

Rows: TypeAlias = EncodedExamples | EncodedPairs | EncodedLabelled
"""The rows of a split. A pair of answers has two sides, every other row has one."""

_MOST_NAMED = 20
_MOST_BINS = 12


@dataclass(frozen=True)
class RowLocation:
    """One row and where it was read."""

    row: int
    """Its number in its split, counted from 1."""
    source: str
    """For example `orders/train.jsonl:17`. Safe to print on a terminal."""


@dataclass(frozen=True, kw_only=True)
class NamedRows:
    """The number of rows that have something in common, and the first 20 of them."""

    count: int
    first: list[RowLocation]

    @classmethod
    def of(cls, rows: Rows, indices: Sequence[int]) -> NamedRows:
        """Return the group of the rows with these indices, counted from 0."""
        return cls(count=len(indices), first=[location(rows, row) for row in indices[:_MOST_NAMED]])


@dataclass(frozen=True)
class Bin:
    """A bar of the histogram: the rows with `shortest` to `longest` tokens, both included."""

    shortest: int
    longest: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class SplitSummary:
    """The counts and lengths of a split as the model will see it."""

    kind: str
    """The format of its rows: messages, prompt_completion, text, several, or preference for pairs of answers."""
    rows: int
    tokens: int
    """A pair counts with both sides."""
    target_tokens: int
    target_share: float
    shortest: int
    """The length of a pair is the length of its longer side."""
    median: int
    percentile_99: int
    longest: int
    histogram: list[Bin]
    truncated: NamedRows
    """Rows that data.max_length cuts."""
    duplicates: NamedRows
    """Rows that repeat an earlier row of the split, token for token. A row that a mixture repeats does not count."""


def summarize_split(rows: Rows) -> SplitSummary:
    """Summarize a split of at least one row."""
    ordered = rows.lengths.sort().values
    num_tokens = sum(int(side.lengths.sum()) for side in rows.sides)
    num_targets = sum(int(side.num_targets.sum()) for side in rows.sides)
    is_truncated = torch.stack([side.is_truncated for side in rows.sides]).any(dim=0)
    return SplitSummary(
        kind=rows.row_type,
        rows=len(rows),
        tokens=num_tokens,
        target_tokens=num_targets,
        target_share=num_targets / num_tokens if num_tokens else 0.0,
        shortest=int(ordered[0]),
        median=_percentile(ordered, 0.5),
        percentile_99=_percentile(ordered, 0.99),
        longest=int(ordered[-1]),
        histogram=histogram(rows.lengths),
        truncated=NamedRows.of(rows, is_truncated.nonzero()[:, 0].tolist()),
        duplicates=NamedRows.of(rows, _duplicates(rows)),
    )


def _duplicates(rows: Rows) -> list[int]:
    """Return the rows that have the tokens and the loss of an earlier row, but are another row of their file."""
    numbers_of: dict[tuple[bytes, ...], set[int]] = {}
    duplicates = []
    digests = zip(*(side.digests(with_targets=True) for side in rows.sides), strict=True)
    for row, (digest, number) in enumerate(zip(digests, rows.sides[0].numbers.tolist(), strict=True)):
        numbers = numbers_of.setdefault(digest, set())
        if numbers and number not in numbers:
            duplicates.append(row)
        numbers.add(number)
    return duplicates


def location(rows: Rows, row: int) -> RowLocation:
    """Return the place from which a row was read, given its index from 0."""
    return RowLocation(row + 1, on_one_line(rows.sides[0].source(row)))


def histogram(lengths: torch.Tensor) -> list[Bin]:
    """Count rows by length, in at most a dozen bins of equal, round width, from the shortest row to the longest.

    Args:
        lengths: int64, shape (rows,), at least one.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    width = _round_width(longest - shortest + 1)
    first = shortest // width
    counts = torch.bincount(lengths // width - first).tolist()
    return [Bin((first + index) * width, (first + index + 1) * width - 1, rows) for index, rows in enumerate(counts)]


def _round_width(span: int) -> int:
    """Return the smallest 1, 2 or 5 times a power of ten that divides a span into few enough bins."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if math.ceil(span / (factor * power)) < _MOST_BINS:
                return factor * power
        power *= 10


def _percentile(ordered: torch.Tensor, fraction: float) -> int:
    """Return the smallest length that this fraction of the rows does not exceed."""
    return int(ordered[max(0, math.ceil(fraction * len(ordered)) - 1)])
