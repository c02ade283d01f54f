"""Encoded rows: flat tensors with the tokens of all rows and which of them carry loss."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from finetune.data.shares import shuffled
from finetune.data.templates import TokenisedRow
from finetune.engine.prefixes import Tokens
from finetune.errors import DataError


class EncodedRows(NamedTuple):
    """Rows as flat tensors: row i is `token_ids[offsets[i]:offsets[i + 1]]`."""

    token_ids: torch.Tensor
    """int32, shape (tokens,)."""
    is_target: torch.Tensor
    """bool, shape (tokens,): the model must predict this token."""
    offsets: torch.Tensor
    """int64, shape (rows + 1,)."""
    numbers: torch.Tensor
    """int64, shape (rows,): line or row in the source."""
    full_lengths: torch.Tensor
    """int64, shape (rows,): tokens of the row before it was cut at data.max_length."""
    example_of: torch.Tensor
    """int64, shape (rows,): the example of each row, ascending from 0. With `data.train_on=each_turn` the answers of a
    conversation are rows of one example; otherwise each row is one."""
    is_good: torch.Tensor
    """bool, shape (rows,): false for an answer that is labelled as bad."""
    kind: str = "text"
    """The kind of row: messages, prompt_completion, text, or several."""
    read_as: str = ""
    """The format and the columns that the rows were read from, in words."""
    ignored_keys: Sequence[tuple[str, int, int]] = ()
    """The keys that the chat template does not render: each with the number of rows of the source that have it, and the
    number of the first of them."""


def lay_end_to_end(rows: Iterable[tuple[int, TokenisedRow]], *, max_length: int, kind: str) -> EncodedRows:
    """Put tokenised rows with their numbers in the source into flat tensors; cut each at `max_length` tokens.

    All are good answers, unless the caller knows better.
    """
    token_ids, is_target = array("i"), bytearray()
    offsets, numbers, full_lengths = array("q", [0]), array("q"), array("q")
    for number, row in rows:
        token_ids.extend(row.token_ids[:max_length])
        is_target += row.is_target[:max_length]
        offsets.append(len(token_ids))
        numbers.append(number)
        full_lengths.append(len(row.token_ids))
    return EncodedRows(
        token_ids=_as_tensor(token_ids, torch.int32),
        is_target=_as_tensor(is_target, torch.bool),
        offsets=_as_tensor(offsets, torch.int64),
        numbers=_as_tensor(numbers, torch.int64),
        full_lengths=_as_tensor(full_lengths, torch.int64),
        example_of=_example_of(_as_tensor(numbers, torch.int64).diff() != 0),
        is_good=torch.ones(len(numbers), dtype=torch.bool),
        kind=kind,
    )


def digest_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Compute a SHA-256 over types, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


class EncodedExample(NamedTuple):
    """One row as the model sees it."""

    input_ids: torch.Tensor
    """int64, shape (time,)."""
    is_target: torch.Tensor
    """bool, shape (time,): the model must predict this token from those before it. Never the first."""


class PromptAndAnswer(NamedTuple):
    """A row cut before its last answer."""

    prompt: list[int]
    """All tokens before the answer, with the header of the assistant's turn."""
    answer: list[int]
    """The answer without its end of turn."""


class EncodedExamples(Dataset[EncodedExample]):
    """The encoded rows of one split.

    Args:
        rows: the flat tensors.
        end_id: the token that ends an answer.
        name_row: names a row in messages, given its number in the source: `orders/train.jsonl:17`.
    """

    def __init__(self, rows: EncodedRows, end_id: int, name_row: Callable[[int], str] = "row {}".format) -> None:
        self.rows = rows
        self.end_id = end_id
        self._name_row = name_row

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, end_id: int) -> EncodedExamples:
        """Build a split from (token ids, is target) pairs, without a file or a tokenizer."""
        marked = (TokenisedRow(list(ids), bytearray(is_target)) for ids, is_target in rows)
        longest = max((len(ids) for ids, _ in rows), default=0)
        return cls(lay_end_to_end(enumerate(marked, start=1), max_length=longest, kind="text"), end_id)

    @classmethod
    def joined(cls, parts: Sequence[EncodedExamples]) -> EncodedExamples:
        """Join the rows of several sources, one source after the other."""
        if len(parts) == 1:
            return parts[0]
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + int(part.rows.numbers.max()) + 1)
        kinds = {part.kind for part in parts}
        rows = EncodedRows(
            token_ids=torch.cat([part.rows.token_ids for part in parts]),
            is_target=torch.cat([part.rows.is_target for part in parts]),
            offsets=_offsets(torch.cat([part.lengths for part in parts])),
            numbers=torch.cat([part.rows.numbers + start for part, start in zip(parts, starts, strict=False)]),
            full_lengths=torch.cat([part.rows.full_lengths for part in parts]),
            example_of=_example_of(torch.cat([part._begins_example for part in parts])[1:]),
            is_good=torch.cat([part.rows.is_good for part in parts]),
            kind=kinds.pop() if len(kinds) == 1 else "several",
            read_as="; ".join(part.rows.read_as for part in parts),
        )
        talking = [part for part in parts if part.kind != "text"] or parts
        return cls(rows, talking[0].end_id, partial(_name_joined_row, [part._name_row for part in parts], starts))

    def select(self, indices: Sequence[int]) -> EncodedExamples:
        """Return the rows at these indices, in their order; a row may come more than once."""
        if list(indices) == list(range(len(self))):
            return self
        chosen = torch.tensor(indices, dtype=torch.int64)
        lengths = self.lengths[chosen]
        offsets = _offsets(lengths)
        # The index of each chosen token in the old tensor is its index in the new one plus the shift of its row.
        moved = (self.rows.offsets[:-1][chosen] - offsets[:-1]).repeat_interleave(lengths)
        tokens = torch.arange(int(offsets[-1])) + moved
        rows = self.rows._replace(
            token_ids=self.rows.token_ids[tokens],
            is_target=self.rows.is_target[tokens],
            offsets=offsets,
            numbers=self.rows.numbers[chosen],
            full_lengths=self.rows.full_lengths[chosen],
            # An example that comes again begins again, also where it follows itself.
            example_of=_example_of((self.rows.example_of[chosen].diff() != 0) | (chosen.diff() <= 0)),
            is_good=self.rows.is_good[chosen],
        )
        return EncodedExamples(rows, self.end_id, self._name_row)

    def select_examples(self, examples: Sequence[int]) -> EncodedExamples:
        """Return the rows of the examples at these indices, in their order; an example may come more than once."""
        rows = self.rows_of_examples
        return self.select([row for example in examples for row in rows[example]])

    def __len__(self) -> int:
        return len(self.rows.numbers)

    def __getitem__(self, index: int) -> EncodedExample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start, end = self.rows.offsets[index % len(self) :][:2].tolist()
        return EncodedExample(self.rows.token_ids[start:end].long(), self.rows.is_target[start:end])

    def tokens(self, index: int) -> Tokens:
        """Return the token ids of a row, shape (time,), without a copy."""
        start, end = self.rows.offsets[index], self.rows.offsets[index + 1]
        ids: Tokens = self.rows.token_ids[start:end].numpy()
        return ids

    @property
    def sides(self) -> tuple[EncodedExamples, ...]:
        """The rows themselves: only pairs of answers have two sides."""
        return (self,)

    @cached_property
    def rows_of_examples(self) -> list[range]:
        """The rows of each example."""
        starts = [*self._begins_example.nonzero()[:, 0].tolist(), len(self)]
        return [range(start, end) for start, end in pairwise(starts)]

    @property
    def has_branches(self) -> bool:
        """Whether an example may have several rows."""
        return len(self.rows_of_examples) < len(self)

    @property
    def _begins_example(self) -> torch.Tensor:
        first = torch.ones(min(1, len(self)), dtype=torch.bool)
        return torch.cat([first, self.rows.example_of.diff() != 0])

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, int64, shape (rows,)."""
        return self.rows.offsets.diff()

    @cached_property
    def num_targets(self) -> torch.Tensor:
        """Target tokens of each row, int64, shape (rows,)."""
        return _offsets(self.rows.is_target)[self.rows.offsets].diff()

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """Whether each row was cut at data.max_length, bool, shape (rows,)."""
        return self.rows.full_lengths > self.lengths

    @property
    def kind(self) -> str:
        """The kind of row: messages, prompt_completion, text, or several."""
        return self.rows.kind

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 over the tokens and targets of all rows, whatever file they come from."""
        tensors = [self.rows.token_ids, self.rows.is_target, self.rows.offsets]
        return digest_tensors([*tensors, self.rows.example_of] if self.has_branches else tensors)

    def source(self, index: int) -> str:
        """Name the origin of a row: `orders/train.jsonl:17`."""
        return self.place(int(self.rows.numbers[index]))

    def place(self, number: int) -> str:
        """Name the origin of the row with this number in the source."""
        return self._name_row(number)

    def prompt_and_answer(self, index: int) -> PromptAndAnswer:
        """Split a row into its last answer and everything before it, for generation.

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
        """Return the examples of an epoch: each as often as the weight's integer part, and a share of them once more.

        Raises:
            DataError: the weight selects no row.
        """
        num_rows = len(self.examples.rows_of_examples)
        times, more = divmod(int(self.weight * num_rows + 0.5), num_rows)
        if not times and not more:
            raise DataError(
                f"{self.label}: a weight of {self.weight:g} selects none of its {num_rows:,} rows. Raise the weight, "
                "or leave the source out of data.mixture."
            )
        return sorted([*range(num_rows)] * times + shuffled(num_rows, seed)[:more])


@dataclass(frozen=True)
class EncodedSplits:
    """The encoded rows of a run."""

    train: EncodedExamples
    validation: EncodedExamples | None = None
    test: EncodedExamples | None = None


def _as_tensor(values: array[int] | bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """Return the sums of the counts before each, and of all: int64, shape (counts + 1,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _example_of(begins: torch.Tensor) -> torch.Tensor:
    """Number the examples, given whether each row but the first begins one: int64, shape (rows,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), begins.long().cumsum(0)])


def _name_joined_row(names: Sequence[Callable[[int], str]], starts: Sequence[int], number: int) -> str:
    """Name a row of joined sources; the numbers of each source begin at its start."""
    part = bisect_right(starts, number) - 1
    return names[part](number - starts[part])
