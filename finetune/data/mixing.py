"""Encoded rows chosen, repeated and put together: which rows an epoch has depends on the weights and a seed alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from finetune.data.cache import EncodedRows


class Places(Protocol):
    """Where rows were read."""

    def place(self, number: int) -> str:
        """How to name a row, given its number in the source."""
        ...


@dataclass(frozen=True)
class JoinedPlaces:
    """The places of rows from several sources, whose numbers follow each other.

    Attributes:
        sources: one for each part; None where it is not known.
        starts: for each part, what was added to its numbers.
    """

    sources: Sequence[Places | None]
    starts: Sequence[int]

    def place(self, number: int) -> str:
        """See `Places.place`."""
        part = bisect_right(self.starts, number) - 1
        source, own = self.sources[part], number - self.starts[part]
        return source.place(own) if source else f"row {own}"


def select_rows(rows: EncodedRows, indices: Sequence[int]) -> EncodedRows:
    """Some rows, or rows more than once, in the order asked for."""
    if list(indices) == list(range(len(rows.numbers))):
        return rows
    chosen = torch.tensor(indices, dtype=torch.int64)
    lengths = rows.offsets.diff()[chosen]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    # Where each chosen token is in the old tensor: its place in the new one, moved by as much as its row was.
    moved = (rows.offsets[:-1][chosen] - offsets[:-1]).repeat_interleave(lengths)
    tokens = torch.arange(int(offsets[-1])) + moved
    return rows._replace(
        token_ids=rows.token_ids[tokens],
        is_target=rows.is_target[tokens],
        offsets=offsets,
        numbers=rows.numbers[chosen],
        full_lengths=rows.full_lengths[chosen],
    )


def join_rows(parts: Sequence[EncodedRows]) -> tuple[EncodedRows, list[int]]:
    """The rows of several sources one after the other, and what was added to the numbers of each."""
    starts = [0]
    for rows in parts:
        starts.append(starts[-1] + int(rows.numbers.max()) + 1)
    lengths = torch.cat([rows.offsets.diff() for rows in parts])
    kinds = {rows.kind for rows in parts}
    joined = EncodedRows(
        token_ids=torch.cat([rows.token_ids for rows in parts]),
        is_target=torch.cat([rows.is_target for rows in parts]),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        numbers=torch.cat([rows.numbers + start for rows, start in zip(parts, starts, strict=False)]),
        full_lengths=torch.cat([rows.full_lengths for rows in parts]),
        kind=kinds.pop() if len(kinds) == 1 else "several",
        read_as="; ".join(rows.read_as for rows in parts),
    )
    return joined, starts[:-1]
