"""Summarize the encoded rows of a split: lengths, tokens with loss, truncated rows and duplicates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from finetune.data.encoded import EncodedExamples
from finetune.data.labelled import EncodedLabelled
from finetune.data.preferences import EncodedPairs
from finetune.data.row_checks import is_answer_truncated
from finetune.diagnose.preview_tokens import on_one_line

Rows: TypeAlias = EncodedExamples | EncodedPairs | EncodedLabelled
"""The rows of a split. A pair of answers has two sides, every other row has one."""

MOST_NAMED = 20
"""The most rows, or groups of rows, that a summary names; it counts all of them."""
_MOST_BINS = 12


@dataclass(frozen=True)
class RowLocation:
    """One row and where it was read."""

    row: int
    """Its number in its split, counted from 1."""
    source: str
    """For example `orders/train.jsonl:17`. Safe to print on a terminal."""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The number of rows that have something in common, and the first of them."""

    count: int
    first: list[RowLocation]


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
    percentile_90: int
    percentile_99: int
    longest: int
    histogram: list[Bin]
    truncated: RowGroup
    """Rows that data.max_length cuts."""
    answers_cut: RowGroup
    """Rows that are cut inside an answer, so that its end of turn is not trained."""
    without_targets: RowGroup
    duplicates: RowGroup
    """Rows that repeat an earlier row of the split, token for token."""
    duplicate_groups: list[RowGroup]
    """Rows that are equal, the largest groups first."""
    in_training: RowGroup
    """Rows that the training split has too, token for token. Empty for the training split."""


def summarize(rows: Rows, digests: Sequence[bytes], training: Iterable[bytes] = ()) -> SplitSummary:
    """Summarize a split of at least one row.

    `digests` belong to its rows. `training` are the digests of the training split, if this is another split.
    """
    ordered = rows.lengths.sort().values
    num_tokens = sum(int(side.lengths.sum()) for side in rows.sides)
    num_targets = sum(int(side.num_targets.sum()) for side in rows.sides)
    equal = _equal_rows(digests, rows.sides[0].rows.numbers.tolist())
    known = set(training)

    def having(find: Callable[[EncodedExamples], torch.Tensor]) -> RowGroup:
        is_found = torch.stack([find(side) for side in rows.sides]).any(dim=0)
        return _group(rows, is_found.nonzero()[:, 0].tolist())

    return SplitSummary(
        kind=rows.row_type,
        rows=len(rows),
        tokens=num_tokens,
        target_tokens=num_targets,
        target_share=num_targets / num_tokens if num_tokens else 0.0,
        shortest=int(ordered[0]),
        median=_percentile(ordered, 0.5),
        percentile_90=_percentile(ordered, 0.9),
        percentile_99=_percentile(ordered, 0.99),
        longest=int(ordered[-1]),
        histogram=histogram(rows.lengths),
        truncated=having(lambda side: side.is_truncated),
        answers_cut=having(is_answer_truncated),
        without_targets=having(lambda side: side.num_targets == 0),
        duplicates=_group(rows, sorted(row for group in equal for row in group[1:])),
        duplicate_groups=[_group(rows, group) for group in equal[:MOST_NAMED]],
        in_training=_group(rows, [row for row, digest in enumerate(digests) if digest in known]),
    )


def row_digests(rows: Rows) -> list[bytes]:
    """Return a digest of each row: of its tokens, and of which of them carry loss."""
    of_sides = (side.digests(with_targets=True) for side in rows.sides)
    return [b"".join(of_row) for of_row in zip(*of_sides, strict=True)]


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


def _equal_rows(digests: Sequence[bytes], numbers: Sequence[int]) -> list[list[int]]:
    """Group equal rows, the largest groups first. A row that a mixture repeats is not equal to itself."""
    groups: dict[bytes, dict[int, int]] = {}
    for row, (digest, number) in enumerate(zip(digests, numbers, strict=True)):
        groups.setdefault(digest, {}).setdefault(number, row)
    equal = [list(rows.values()) for rows in groups.values() if len(rows) > 1]
    return sorted(equal, key=lambda rows: (-len(rows), rows))


def _group(rows: Rows, indices: Sequence[int]) -> RowGroup:
    return RowGroup(count=len(indices), first=[location(rows, row) for row in indices[:MOST_NAMED]])
