"""Rows to tokens, once: flat tensors with the tokens of all rows, and which of them carry loss."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import Dataset

from finetune.data.cache import EncodedRows, digest_tensors, digest_tokenizer, encoding_key, load_or_encode
from finetune.data.collect import Collected, encode_rows
from finetune.data.examples import ExampleSplits
from finetune.data.gates import pass_gates
from finetune.data.mixing import JoinedPlaces, Part, Places, join_rows, select_rows
from finetune.data.rows import Examples, kind_in_words
from finetune.data.templates import AnswerTokens, TokenisedRow
from finetune.engine.prefixes import Tokens
from finetune.errors import DataError
from finetune.fallbacks import Fallbacks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection

_log = logging.getLogger(__name__)

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
    is_gated: bool = True,
) -> EncodedSplits:
    """Render, tokenise and mark the targets of every split, or read all that from the cache. Logs what there is.

    The first process of a node encodes and the others wait for it, by a file lock: this is no collective.

    Args:
        splits: what `load_examples` found.
        tokenizer: a fast tokenizer; its own chat template is used.
        section: `max_length`, `cache_dir`, what the gates do, and how the rows were chosen.
        fallbacks: told when the cache cannot be written.
        is_gated: off: all rows as they are, also those that a run would refuse or leave out.

    Raises:
        DataError: a row cannot be used, a split has no row or no target token, a gate refuses the rows, or the
            tokenizer does not serve.
    """
    taken = fallbacks if fallbacks is not None else Fallbacks()
    encoder = _Encoder(tokenizer, section, taken)
    found = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    parts = {
        split: [encoder.encode(part) for part in examples.parts]
        for split, examples in found.items()
        if examples is not None
    }
    if is_gated:
        parts = pass_gates(parts, section, tokenizer.bos_token_id)
    result = EncodedSplits(**{split: _mix(split, of_split, section.split_seed) for split, of_split in parts.items()})
    for line in describe(result):
        _log.info("%s", line)
    return result


class _Encoder:
    """One tokenizer and one cache for all sources; what splits have in common is read once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: DataSection, fallbacks: Fallbacks) -> None:
        self._tokens = AnswerTokens(tokenizer)
        self._digest = digest_tokenizer(tokenizer)
        self._section = section
        self._fallbacks = fallbacks
        self._done: dict[int, EncodedRows] = {}

    def encode(self, examples: Examples) -> Part:
        """The rows that a split has from one source."""
        whole = examples.whole
        rows = self._done.get(id(whole))
        if rows is None:
            rows = self._done[id(whole)] = self._load_or_encode(whole)
        if examples.choice is not None:
            rows = select_rows(rows, examples.choice.indices(len(rows.numbers)))
        end_id = self._tokens.end_id_of(rows.kind)
        return Part(EncodedExamples(rows, end_id, examples.source), examples.label, examples.weight)

    def _load_or_encode(self, whole: Examples) -> EncodedRows:
        return load_or_encode(
            Path(self._section.cache_dir).expanduser(),
            encoding_key(whole, self._digest, self._section),
            partial(encode_rows, whole, self._tokens, self._section, self._fallbacks),
            self._fallbacks,
            whole.label,
        )


def _mix(split: str, parts: Sequence[Part], seed: int) -> EncodedExamples:
    """A split's rows, those of a source as often as its weight says."""
    chosen = []
    for part in parts:
        rows = part.epoch(seed)
        chosen.append(part.examples.select(rows))
        if split == "train" and (len(parts) > 1 or part.weight != 1):
            _log.info(
                "%s: %s rows an epoch from the %s of %s (weight %g)",
                *(split, f"{len(rows):,}", f"{len(part.examples):,}", part.label, part.weight),
            )
    return EncodedExamples.joined(chosen)


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
