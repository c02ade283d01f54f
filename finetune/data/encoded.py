"""Encoded rows: flat tensors with the tokens of all rows, and which of them carry loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from finetune.data.cache import EncodedRows, digest_tensors
from finetune.data.collect import Collected
from finetune.data.mixing import JoinedPlaces, Places, join_rows, select_rows
from finetune.data.shares import shuffled
from finetune.data.templates import TokenisedRow
from finetune.engine.prefixes import Tokens
from finetune.errors import DataError


class EncodedExample(NamedTuple):
    """One row as the model sees it."""

    input_ids: torch.Tensor
    """int64, shape (time,)."""
    is_target: torch.Tensor
    """bool, shape (time,): this token carries loss: the model must predict it from those before. Never the first."""


class PromptAndAnswer(NamedTuple):
    """A row cut before its last answer."""

    prompt: list[int]
    """What the model is given, the header of the assistant's turn included."""
    answer: list[int]
    """What it should say, without the end of turn."""


class EncodedExamples(Dataset[EncodedExample]):
    """The encoded rows of one split.

    Args:
        rows: the flat tensors.
        end_id: the token that ends an answer.
        rows_from: where the rows were read, for messages.
    """

    def __init__(self, rows: EncodedRows, end_id: int, rows_from: Places | None = None) -> None:
        self.rows = rows
        self.end_id = end_id
        self._rows_from = rows_from

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, end_id: int) -> EncodedExamples:
        """From (token ids, is target) pairs, for tests and benchmarks."""
        collected = Collected(max_length=max((len(ids) for ids, _ in rows), default=0))
        for number, (ids, is_target) in enumerate(rows, start=1):
            collected.add(number, TokenisedRow(list(ids), bytearray(is_target)))
        return cls(collected.as_tensors("text"), end_id)

    @classmethod
    def joined(cls, parts: Sequence[EncodedExamples]) -> EncodedExamples:
        """The rows of several sources, one source after the other."""
        if len(parts) == 1:
            return parts[0]
        rows, starts = join_rows([part.rows for part in parts])
        talking = [part for part in parts if part.kind != "text"] or parts
        return cls(rows, talking[0].end_id, JoinedPlaces([part._rows_from for part in parts], starts))

    def select(self, indices: Sequence[int]) -> EncodedExamples:
        """Some of the rows, or rows more than once, in the order asked for."""
        rows = select_rows(self.rows, indices)
        return self if rows is self.rows else EncodedExamples(rows, self.end_id, self._rows_from)

    def __len__(self) -> int:
        return len(self.rows.offsets) - 1

    def __getitem__(self, index: int) -> EncodedExample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = self.rows.offsets[index % len(self) :][:2].tolist()
        return EncodedExample(self.rows.token_ids[start:end].long(), self.rows.is_target[start:end])

    def tokens(self, index: int) -> Tokens:
        """The token ids of a row, shape (time,), without a copy."""
        start, end = self.rows.offsets[index], self.rows.offsets[index + 1]
        ids: Tokens = self.rows.token_ids[start:end].numpy()
        return ids

    @property
    def sides(self) -> tuple[EncodedExamples, ...]:
        """Itself: a pair of answers has two sides, other rows have one."""
        return (self,)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, int64, shape (rows,)."""
        return self.rows.offsets.diff()

    @cached_property
    def num_targets(self) -> torch.Tensor:
        """Target tokens of each row, int64, shape (rows,)."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.rows.is_target.cumsum(0)])
        return before[self.rows.offsets].diff()

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """Which rows were cut at data.max_length, bool, shape (rows,)."""
        return self.rows.full_lengths > self.lengths

    @property
    def num_truncated(self) -> int:
        """How many rows were cut at data.max_length."""
        return int(self.is_truncated.sum())

    @property
    def kind(self) -> str:
        """What a row was: messages, prompt_completion, text, or several."""
        return self.rows.kind

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 over the tokens and targets of all rows, wherever they were read."""
        return digest_tensors([self.rows.token_ids, self.rows.is_target, self.rows.offsets])

    def source(self, index: int) -> str:
        """Where a row was read: `orders/train.jsonl:17`."""
        number = int(self.rows.numbers[index])
        return self._rows_from.place(number) if self._rows_from else f"row {number}"

    def prompt_and_answer(self, index: int) -> PromptAndAnswer:
        """A row's last answer and all that comes before it, for generation.

        Raises:
            DataError: the row has no target token.
        """
        ids, is_target = self[index]
        targets = is_target.nonzero()[:, 0].tolist()
        if not targets:
            raise DataError(f"{self.source(index)} has no answer left to compare with. Raise data.max_length.")
        last = first = targets[-1]
        while first and is_target[first - 1]:
            first -= 1
        end = last if int(ids[last]) == self.end_id else last + 1
        return PromptAndAnswer(ids[:first].tolist(), ids[first:end].tolist())


@dataclass(frozen=True)
class Part:
    """The encoded rows that a split has from one source."""

    examples: EncodedExamples
    label: str
    weight: float = 1.0

    def epoch(self, seed: int) -> list[int]:
        """The rows of an epoch: each as often as the weight's whole part, and so many of them once more.

        Raises:
            DataError: the weight takes not one row.
        """
        num_rows = len(self.examples)
        times, more = divmod(int(self.weight * num_rows + 0.5), num_rows)
        if not times and not more:
            raise DataError(
                f"{self.label}: a weight of {self.weight:g} takes none of its {num_rows:,} rows. Raise the weight, or "
                "leave the source out of data.mixture."
            )
        return sorted([*range(num_rows)] * times + shuffled(num_rows, seed)[:more])


@dataclass(frozen=True)
class EncodedSplits:
    """The encoded rows of a run."""

    train: EncodedExamples
    validation: EncodedExamples | None = None
    test: EncodedExamples | None = None
