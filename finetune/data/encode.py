"""Rows to tokens, once: flat tensors with the tokens of all rows, and which of them carry loss."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import Dataset

from finetune.data.cache import EncodedRows, digest_tensors, digest_tokenizer, encoding_key, load_or_encode
from finetune.data.examples import ExampleSplits
from finetune.data.rows import BadRowError, Example, Examples, RowProblems, kind_in_words
from finetune.data.templates import (
    AnswerTokens,
    RenderedRow,
    TokenisedRow,
    mark_targets,
    render_examples,
    tokenize,
)
from finetune.engine.prefixes import Tokens
from finetune.errors import DataError
from finetune.fallbacks import Fallbacks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection
    from finetune.data.readers import RowSource

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE = 512
_MAX_NAMED = 3


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

    def __init__(self, rows: EncodedRows, end_id: int, rows_from: RowSource | None = None) -> None:
        self.rows = rows
        self.end_id = end_id
        self._rows_from = rows_from

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[Sequence[int], Sequence[bool]]], *, end_id: int) -> EncodedExamples:
        """From (token ids, is target) pairs, for tests and benchmarks."""
        collected = _Collected(max_length=max((len(ids) for ids, _ in rows), default=0))
        for number, (ids, is_target) in enumerate(rows, start=1):
            collected.add(number, TokenisedRow(list(ids), bytearray(is_target)))
        return cls(collected.as_tensors("text"), end_id)

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

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, int64, shape (rows,)."""
        return self.rows.offsets.diff()

    @cached_property
    def num_targets(self) -> torch.Tensor:
        """Target tokens of each row, int64, shape (rows,)."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), self.rows.is_target.cumsum(0)])
        return before[self.rows.offsets].diff()

    @property
    def is_truncated(self) -> torch.Tensor:
        """Which rows were cut at data.max_length, bool, shape (rows,)."""
        return self.rows.is_truncated

    @property
    def num_truncated(self) -> int:
        """How many rows were cut at data.max_length."""
        return int(self.rows.is_truncated.sum())

    @property
    def kind(self) -> str:
        """What a row was: messages, prompt_completion or text."""
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
class EncodedSplits:
    """The encoded rows of a run."""

    train: EncodedExamples
    validation: EncodedExamples | None = None
    test: EncodedExamples | None = None


def encode_examples(
    splits: ExampleSplits,
    tokenizer: PreTrainedTokenizerBase,
    section: DataSection,
    *,
    fallbacks: Fallbacks | None = None,
) -> EncodedSplits:
    """Render, tokenise and mark the targets of every split, or read all that from the cache. Logs what there is.

    The first process of a node encodes and the others wait for it, by a file lock: this is no collective.

    Args:
        splits: what `load_examples` found.
        tokenizer: a fast tokenizer; its own chat template is used.
        section: `max_length`, `cache_dir` and how the rows were chosen.
        fallbacks: told when the cache cannot be written.

    Raises:
        DataError: a row cannot be used, a split has no row or no target token, or the tokenizer does not serve.
    """
    taken = fallbacks if fallbacks is not None else Fallbacks()
    found = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    tokens = AnswerTokens(tokenizer)
    tokenizer_digest = digest_tokenizer(tokenizer)
    encoded = {}
    for name, examples in found.items():
        if examples is None:
            continue
        rows = load_or_encode(
            Path(section.cache_dir).expanduser(),
            encoding_key(examples, tokenizer_digest, section),
            partial(_encode_rows, examples, tokens, section.max_length),
            taken,
            examples.label,
        )
        encoded[name] = EncodedExamples(rows, tokens.end_id, examples.source)
    result = EncodedSplits(**encoded)
    for line in describe(result):
        _log.info("%s", line)
    return result


def describe(splits: EncodedSplits) -> list[str]:
    """What each split has, one line each, and which rows teach nothing."""
    lines = []
    for name, examples in (("train", splits.train), ("validation", splits.validation), ("test", splits.test)):
        lines += [f"{name}: off"] if examples is None else _describe_split(name, examples)
    return lines


def _describe_split(name: str, examples: EncodedExamples) -> list[str]:
    lines = [
        f"{name}: {len(examples):,} rows of {kind_in_words(examples.kind)}, "
        f"{int(examples.lengths.sum()):,} tokens, {int(examples.num_targets.sum()):,} target tokens, "
        f"longest row {int(examples.lengths.max()):,} tokens, {examples.num_truncated:,} rows truncated"
    ]
    empty = (examples.num_targets == 0).nonzero()[:, 0].tolist()
    if empty:
        named = ", ".join(examples.source(index) for index in empty[:_MAX_NAMED])
        more = " and others" if len(empty) > _MAX_NAMED else ""
        lines.append(f"{name}: {len(empty):,} rows have no target token after truncation: {named}{more}")
    return lines


def _encode_rows(examples: Examples, tokens: AnswerTokens, max_length: int) -> EncodedRows:
    problems = RowProblems()
    collected = _Collected(max_length)
    for batch in _batches(examples):
        for example, row in zip(batch, _encode_batch(batch, tokens), strict=True):
            if isinstance(row, BadRowError):
                problems.add(example.source, str(row))
            else:
                collected.add(example.number, row)
    problems.raise_if_any(examples.label, len(examples))
    rows = collected.as_tensors(examples[0].kind)
    if not rows.is_target.any():
        raise DataError(
            f"{examples.label}: none of its {len(examples):,} rows has a target token within "
            f"data.max_length={max_length}; the longest row has {collected.longest} tokens. Raise data.max_length, "
            "or shorten the rows."
        )
    return rows


def _batches(examples: Examples) -> Iterator[list[Example]]:
    rows = iter(examples)
    while batch := list(islice(rows, _ROWS_AT_ONCE)):
        yield batch


def _encode_batch(batch: list[Example], tokens: AnswerTokens) -> list[TokenisedRow | BadRowError]:
    """All rows of a batch through the template and the tokenizer in one call each."""
    rendered = render_examples(tokens.tokenizer, batch)
    if batch[0].kind != "text":  # plain text may hold special tokens: it is what a model reads, as it stands
        rendered = [tokens.special_text_in(example) or row for example, row in zip(batch, rendered, strict=True)]
    good = [row for row in rendered if isinstance(row, RenderedRow)]
    encodings = iter(tokenize(tokens.tokenizer, [row.text for row in good]) if good else [])
    return [mark_targets(row, next(encodings), tokens) if isinstance(row, RenderedRow) else row for row in rendered]


class _Collected:
    """Rows put end to end."""

    def __init__(self, max_length: int) -> None:
        self.longest = 0
        self._max_length = max_length
        self._token_ids = array("i")
        self._is_target = bytearray()
        self._offsets = array("q", [0])
        self._numbers = array("q")
        self._is_truncated = bytearray()

    def add(self, number: int, row: TokenisedRow) -> None:
        """Take a row, cut on the right at the limit."""
        self.longest = max(self.longest, len(row.token_ids))
        self._token_ids.extend(row.token_ids[: self._max_length])
        self._is_target += row.is_target[: self._max_length]
        self._offsets.append(len(self._token_ids))
        self._numbers.append(number)
        self._is_truncated.append(len(row.token_ids) > self._max_length)

    def as_tensors(self, kind: str) -> EncodedRows:
        """The rows taken so far."""
        return EncodedRows(
            token_ids=_tensor(self._token_ids, torch.int32),
            is_target=_tensor(self._is_target, torch.bool),
            offsets=_tensor(self._offsets, torch.int64),
            numbers=_tensor(self._numbers, torch.int64),
            is_truncated=_tensor(self._is_truncated, torch.bool),
            kind=kind,
        )


def _tensor(values: array[int] | bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)
