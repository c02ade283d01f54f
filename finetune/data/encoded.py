"""Encoded rows: flat tensors with the tokens of all rows and which of them carry loss."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from finetune.data.row_file import EncodedRows, RowFacts, RowWriter, rows_in_memory
from finetune.data.splits import shuffled
from finetune.data.templates import TokenisedRow
from finetune.engine.prefixes import Tokens
from finetune.errors import DataError

RowsT = TypeVar("RowsT")

_FILLER_TOKEN = 1
_OF_EACH_ROW = (
    *("starts", "lengths", "numbers", "full_lengths", "num_targets"),
    *("loss_kinds", "oddities", "is_good", "raw_digest", "example_of", "subset"),
)
"""The fields of `EncodedExamples` that have an entry for each row."""
_NUMBER_OF_ROW = re.compile(r"(:| row |^row )[0-9]+$")
"""The end of a row's name."""
_PIECE = 1 << 24
"""Tokens that are looked at together."""


def digest_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Compute a SHA-256 over types, shapes and values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        _add_to(digest, tensor.dtype, len(tensor), [tensor])
    return digest.hexdigest()


class EncodedExample(NamedTuple):
    """One row as the model sees it."""

    input_ids: torch.Tensor
    """int64, shape (time,)."""
    is_target: torch.Tensor
    """bool, shape (time,): the model must predict this token from those before it. Never the first."""


class PromptAndAnswer(NamedTuple):
    """A row, split before its last answer."""

    prompt: list[int]
    """All tokens before the answer, with the header of the assistant's turn."""
    answer: list[int]
    """The answer without its end of turn."""


@dataclass(eq=False, repr=False)
class EncodedExamples(Dataset[EncodedExample]):
    """The encoded rows of one split. Selecting rows and joining sources copies no token."""

    sources: tuple[EncodedRows, ...]
    """The tokens, perhaps mapped from files."""
    end_id: int
    """The token that ends an answer."""
    name_row: Callable[[int], str]
    """Names a row in messages, given its number in the source: `orders/train.jsonl:17`."""
    starts: torch.Tensor
    """int64, shape (rows,): the position of the first token of each row in the tokens of all sources, one source after
    the other."""
    lengths: torch.Tensor
    """int64, shape (rows,): tokens of each row."""
    numbers: torch.Tensor
    """int64, shape (rows,): line or row in the source."""
    full_lengths: torch.Tensor
    """int64, shape (rows,): tokens of the row before it was cut at data.max_length."""
    num_targets: torch.Tensor
    """int64, shape (rows,): target tokens of each row."""
    loss_kinds: torch.Tensor
    """int32, shape (rows, 3): target tokens of each row of each of `LOSS_KINDS`."""
    oddities: torch.Tensor
    """bool, shape (rows, 2): which of `ODDITIES` each row has."""
    is_good: torch.Tensor
    """bool, shape (rows,): false for an answer that is labelled as bad."""
    raw_digest: torch.Tensor
    """uint8, shape (rows, 16): the `digest_row` of each row, whatever its tokens."""
    example_of: torch.Tensor
    """int64, shape (rows,): the example of each row, ascending from 0. With `data.train_on=each_turn` the answers of a
    conversation are rows of one example; otherwise each row is one."""
    subset: torch.Tensor
    """int16, shape (rows,): the index of the row's subset in `subset_names`; 0 without subsets."""
    subset_names: tuple[str, ...] = ()
    """The names of the subsets that are measured beside the whole split, see `finetune.data.subsets`."""

    @classmethod
    def of(cls, source: EncodedRows, end_id: int, name_row: Callable[[int], str] = "row {}".format) -> Self:
        """Return all rows of a source, in their order."""
        return cls(
            sources=(source,),
            end_id=end_id,
            name_row=name_row,
            starts=source.offsets[:-1],
            lengths=source.offsets.diff(),
            numbers=source.numbers,
            full_lengths=source.full_lengths,
            num_targets=source.num_targets,
            loss_kinds=source.loss_kinds,
            oddities=source.oddities,
            is_good=source.is_good,
            raw_digest=source.raw_digests,
            example_of=_example_of(source.numbers.diff() != 0),
            subset=torch.zeros(len(source.numbers), dtype=torch.int16),
        )

    @classmethod
    def from_rows(
        cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, end_id: int, row_type: str = "text"
    ) -> Self:
        """Build a split from (token ids, is target) pairs, without a file or a tokenizer."""

        def encode(writer: RowWriter) -> RowFacts:
            for number, (ids, is_target) in enumerate(rows, start=1):
                ends = [(at, at + 1, 2) for at, token_id in enumerate(ids) if token_id == end_id]
                writer.add(number, TokenisedRow(list(ids), bytearray(is_target), ends), max_length=len(ids))
            return RowFacts(row_type)

        return cls.of(rows_in_memory(encode), end_id)

    @classmethod
    def joined(cls, parts: Sequence[EncodedExamples], names: Sequence[str] = ()) -> EncodedExamples:
        """Join the rows of several sources, one source after the other. With names, each source is a subset."""
        if len(parts) == 1:
            return parts[0]
        # The tokens and the row numbers of a part follow those of all parts before it.
        begins = [0, *accumulate(part._begins[-1] for part in parts)]
        numbers = [0, *accumulate(int(part.numbers.max()) + 1 for part in parts)]
        moved = [
            replace(
                part,
                starts=part.starts + begin,
                numbers=part.numbers + number,
                subset=torch.full_like(part.subset, place if names else 0),
            )
            for place, (part, begin, number) in enumerate(zip(parts, begins, numbers, strict=False))
        ]
        rows: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in moved]) for name in _OF_EACH_ROW}
        begins_example = torch.cat([part.begins_example for part in parts])
        talking = [part for part in parts if part.row_type != "text"] or parts
        return replace(
            talking[0],
            sources=tuple(source for part in parts for source in part.sources),
            name_row=partial(_name_joined_row, [part.name_row for part in parts], numbers),
            subset_names=tuple(names),
            **{**rows, "example_of": _example_of(begins_example[1:])},
        )

    def select(self, indices: Sequence[int] | torch.Tensor) -> EncodedExamples:
        """Return the rows at these indices, in their order; a row may come more than once."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        if torch.equal(chosen, torch.arange(len(self))):
            return self
        rows: dict[str, Any] = {name: getattr(self, name)[chosen] for name in _OF_EACH_ROW}
        # An example that comes again begins again, also where it follows itself.
        begins = (rows["example_of"].diff() != 0) | (chosen.diff() <= 0)
        return replace(self, **{**rows, "example_of": _example_of(begins)})

    def select_examples(self, examples: Sequence[int]) -> EncodedExamples:
        """Return the rows of the examples at these indices, in their order; an example may come more than once."""
        if not self.has_branches:
            return self.select(examples)
        rows = self.rows_of_examples
        return self.select([row for example in examples for row in rows[example]])

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> EncodedExample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        source, start, end = self._place(index)
        return EncodedExample(source.token_ids[start:end].long(), source.is_target[start:end])

    def tokens(self, index: int) -> Tokens:
        """Return the token ids of a row, shape (time,), without a copy."""
        source, start, end = self._place(index)
        ids: Tokens = source.token_ids[start:end].numpy()
        return ids

    def pieces(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tokens of all rows in their order, and which are targets, in pieces that are no copies."""
        starts, ends = self.starts, self.starts + self.lengths
        breaks = (ends[:-1] != starts[1:]).nonzero()[:, 0]
        firsts = torch.cat([starts[:1], starts[1:][breaks]])
        lasts = torch.cat([ends[:-1][breaks], ends[-1:]])
        for begin, end in zip(firsts.numpy().data, lasts.numpy().data, strict=True):
            while begin < end:
                source = bisect_right(self._begins, begin, hi=len(self.sources)) - 1
                until = min(end, self._begins[source + 1], begin + _PIECE)
                inside = slice(begin - self._begins[source], until - self._begins[source])
                yield self.sources[source].token_ids[inside], self.sources[source].is_target[inside]
                begin = until

    def tokens_at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens at these positions in all sources and whether they are targets; 0 and false outside."""
        ids, is_target = torch.zeros(len(positions), dtype=torch.int32), torch.zeros(len(positions), dtype=torch.bool)
        for source, (begin, end) in zip(self.sources, pairwise(self._begins), strict=True):
            inside = (begin <= positions) & (positions < end)
            ids[inside] = source.token_ids[positions[inside] - begin]
            is_target[inside] = source.is_target[positions[inside] - begin]
        return ids, is_target

    def digests(self, *, with_targets: bool) -> Iterator[bytes]:
        """Yield a digest of each row: of its tokens, and of which of them are targets if wanted."""
        return (digest.tobytes() for digest in self.digest_rows()[:, int(with_targets)])

    def digest_rows(self) -> NDArray[np.uint8]:
        """Return two digests of each row, shape (rows, 2, 16): of its tokens, and of its tokens and targets."""
        digests, begins = bytearray(), self._begins
        buffers = [(source.token_ids.numpy().data, source.is_target.numpy().data) for source in self.sources]
        for start, length in zip(self.starts.numpy().data, self.lengths.numpy().data, strict=True):
            part = bisect_right(begins, start, hi=len(buffers)) - 1
            row = slice(start - begins[part], start - begins[part] + length)
            digest = blake2b(buffers[part][0][row], digest_size=16)
            digests += digest.digest()
            digest.update(buffers[part][1][row])
            digests += digest.digest()
        return np.frombuffer(digests, np.uint8).reshape(-1, 2, 16)

    def raw_digests(self) -> list[str]:
        """Return the `digest_row` of each row."""
        return [digest.tobytes().hex() for digest in self.raw_digest.numpy()]

    def digests_of_examples(self) -> list[str]:
        """Return the `digest_row` of each example."""
        return self.select(self.begins_example.nonzero()[:, 0]).raw_digests()

    @property
    def begins_example(self) -> torch.Tensor:
        """Whether a row is the first of its example: bool, shape (rows,)."""
        first = torch.ones(min(1, len(self)), dtype=torch.bool)
        return torch.cat([first, self.example_of.diff() != 0])

    @property
    def sides(self) -> tuple[EncodedExamples, ...]:
        """The rows themselves: only pairs of answers have two sides."""
        return (self,)

    @property
    def num_examples(self) -> int:
        """Examples, each of which may have several rows."""
        return int(self.example_of[-1]) + 1 if len(self) else 0

    @cached_property
    def rows_of_examples(self) -> list[range]:
        """The rows of each example."""
        starts = [*self.begins_example.nonzero()[:, 0].tolist(), len(self)]
        return [range(start, end) for start, end in pairwise(starts)]

    @property
    def has_branches(self) -> bool:
        """Whether an example may have several rows."""
        return self.num_examples < len(self)

    @cached_property
    def is_truncated(self) -> torch.Tensor:
        """Whether each row was cut at data.max_length, bool, shape (rows,)."""
        return self.full_lengths > self.lengths

    @property
    def row_type(self) -> str:
        """The type of the rows: messages, prompt_completion, text, or several."""
        types = {source.facts.row_type for source in self.sources}
        return types.pop() if len(types) == 1 else "several"

    @property
    def has_answer(self) -> torch.Tensor:
        """Whether each row has an answer with a target token, bool, shape (rows,). Plain text has no answers."""
        is_talk = torch.zeros(len(self), dtype=torch.bool)
        for source, (begin, end) in zip(self.sources, pairwise(self._begins), strict=True):
            if source.facts.row_type != "text":
                is_talk |= (begin <= self.starts) & (self.starts < end)
        return is_talk & (self.num_targets > 0)

    @property
    def read_as(self) -> list[str]:
        """Descriptions of the sources of the rows: their format, and the columns that are read and not read."""
        return list(dict.fromkeys(source.facts.read_as for source in self.sources if source.facts.read_as))

    @property
    def num_dropped(self) -> int:
        """Rows of the sources that were left out because they cannot be used."""
        return sum(source.facts.num_dropped for source in self.sources)

    @property
    def ignored_keys(self) -> list[tuple[str, int, int]]:
        """The keys that the chat template does not render, each with the number of rows that have it, and the first."""
        return [key for source in self.sources for key in source.facts.ignored_keys]

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 over the tokens and targets of all rows, whatever file they come from."""
        digest, num_tokens = hashlib.sha256(), int(self.lengths.sum())
        _add_to(digest, torch.int32, num_tokens, (ids for ids, _ in self.pieces()))
        _add_to(digest, torch.bool, num_tokens, (is_target for _, is_target in self.pieces()))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        for tensor in [offsets, self.example_of] if self.has_branches else [offsets]:
            _add_to(digest, torch.int64, len(tensor), [tensor])
        return digest.hexdigest()

    def files(self) -> tuple[list[str], torch.Tensor, torch.Tensor]:
        """Return the names of the files, and for each row the index of its file there and its line: int64, (rows,)."""
        numbers, place = torch.unique(self.numbers, return_inverse=True)
        names, firsts, first = list[str](), list[int](), 0

        def file_of(index: int) -> str:
            return _NUMBER_OF_ROW.sub("", self.name_row(int(numbers[index])))

        while first < len(numbers):  # the rows of a file follow each other
            names.append(file_of(first))
            firsts.append(first)
            first = bisect_right(range(len(numbers)), False, first, key=lambda index: file_of(index) != names[-1])
        files = torch.bucketize(place, torch.tensor(firsts), right=True) - 1
        before = [n - int(re.split("[: ]", self.name_row(n))[-1]) for n in numbers[firsts].tolist()]
        return names, files, self.numbers - torch.tensor(before)[files]

    def source(self, index: int) -> str:
        """Name the origin of a row: `orders/train.jsonl:17`."""
        return self.name_row(int(self.numbers[index]))

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

    @cached_property
    def _begins(self) -> list[int]:
        """The position of the first token of each source in the tokens of all sources, and the number of tokens."""
        return [0, *accumulate(len(source.token_ids) for source in self.sources)]

    def _place(self, index: int) -> tuple[EncodedRows, int, int]:
        """Return the source of a row, and where its tokens begin and end there."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        source = bisect_right(self._begins, start, hi=len(self.sources)) - 1
        start -= self._begins[source]
        return self.sources[source], start, start + length


@dataclass(frozen=True)
class Part:
    """The encoded rows that a split has from one source."""

    sides: tuple[EncodedExamples, ...]
    """The rows. Pairs of answers are two sides with equally many rows: the chosen answers and the rejected ones."""
    label: str
    weight: float = 1.0
    name: str = ""
    """The name of the source in a mixture."""
    are_prompts: bool = False

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def examples(self) -> EncodedExamples:
        """The first side."""
        return self.sides[0]

    def select(self, mask: torch.Tensor) -> Part:
        """Return the part with the rows that a bool tensor of shape (rows,) marks, on each side."""
        return replace(self, sides=tuple(side.select(mask.nonzero()[:, 0]) for side in self.sides))

    def digests(self) -> Iterator[set[tuple[int, bytes]]]:
        """Yield a digest of the tokens of each row, with the number of its side: of a pair, two."""
        for of_row in zip(*(side.digests(with_targets=False) for side in self.sides), strict=True):
            yield set(enumerate(of_row))

    def name_row(self, row: int) -> str:
        """Name the origin of a row, and how long its longer side was if it was cut."""
        longest = max(self.sides, key=lambda side: int(side.full_lengths[row]))
        name, full = longest.source(row), int(longest.full_lengths[row])
        return f"{name} ({full:,} tokens)" if bool(longest.is_truncated[row]) else name

    def epoch(self, seed: int) -> Sequence[int]:
        """Return the examples of an epoch: each one int(weight) times, and a random fraction of them once more.

        Raises:
            DataError: the weight selects no row.
        """
        num_rows = self.examples.num_examples
        times, more = divmod(int(self.weight * num_rows + 0.5), num_rows)
        if not times and not more:
            raise DataError(
                f"{self.label}: a weight of {self.weight:g} selects none of its {num_rows:,} rows. Raise the weight, "
                "or leave the source out of data.mixture."
            )
        if not more and times == 1:
            return range(num_rows)
        return sorted([*range(num_rows)] * times + shuffled(num_rows, seed)[:more])


@dataclass(frozen=True)
class SplitsOf(Generic[RowsT]):
    """The splits of a run."""

    train: RowsT
    validation: RowsT | None = None
    test: RowsT | None = None


class EncodedSplits(SplitsOf[EncodedExamples]):
    """The encoded rows of a run."""


def filler_rows(number: int, length: int, *, first: int = 0) -> EncodedExamples:
    """Make rows of this length that carry loss throughout. Each begins with a token of its own, from `first` on."""
    ids = [_FILLER_TOKEN] * (length - 1)
    rows = [([first + row, *ids], [False] + [True] * (length - 1)) for row in range(max(1, number))]
    return EncodedExamples.from_rows(rows, end_id=_FILLER_TOKEN)


def _add_to(digest: hashlib._Hash, dtype: torch.dtype, length: int, pieces: Iterable[torch.Tensor]) -> None:
    """Add the type, the shape and the values of a tensor that comes in pieces."""
    digest.update(f"{dtype}{(length,)}".encode())
    for piece in pieces:
        digest.update(piece.contiguous().numpy().data)


def _example_of(begins: torch.Tensor) -> torch.Tensor:
    """Number the examples, given whether each row but the first begins one: int64, shape (rows,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), begins.long().cumsum(0)])


def _name_joined_row(names: Sequence[Callable[[int], str]], starts: Sequence[int], number: int) -> str:
    """Name a row of joined sources; the numbers of each source begin at its start."""
    part = bisect_right(starts, number) - 1
    return names[part](number - starts[part])
