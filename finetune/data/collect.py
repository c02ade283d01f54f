"""The rows of one source to flat tensors, in this process or in several: the bytes are the same."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch

from finetune.data.cache import EncodedRows
from finetune.data.parallel import WorkerLostError, choose_processes, encode_in_processes
from finetune.data.rows import BadRowError, Example, Examples, RowProblems
from finetune.data.templates import AnswerTokens, TokenisedRow
from finetune.data.tokenise import encode_batch
from finetune.errors import DataError
from finetune.fallbacks import Fallback, Fallbacks

if TYPE_CHECKING:
    from finetune.config.schema import DataSection

ROWS_AT_ONCE = 512
"""Rows of a batch: one call of the template and of the tokenizer."""

Batches = Iterable[tuple[list[Example], list[TokenisedRow | BadRowError]]]


def encode_rows(examples: Examples, tokens: AnswerTokens, section: DataSection, fallbacks: Fallbacks) -> EncodedRows:
    """All rows of a source, rendered, tokenised and marked.

    Args:
        examples: all rows of a source.
        tokens: of the tokenizer.
        section: `max_length`, `train_on`, `num_processes`.
        fallbacks: told when the processes that were to share the work did not do it.

    Raises:
        DataError: a row cannot be used, or none has a target token.
    """
    rows = examples.rows
    num_processes = choose_processes(rows, section.num_processes, ROWS_AT_ONCE)
    if num_processes > 1:
        try:
            with encode_in_processes(tokens.tokenizer, section.train_on, num_processes) as encode:
                return _collect(examples, encode(_batches(rows)), section.max_length)
        except WorkerLostError as error:
            fallbacks.take(
                Fallback(
                    what="data.num_processes",
                    wanted=f"{num_processes} processes that encode {examples.label}",
                    used="this process alone",
                    why=str(error),
                )
            )
    encoded = ((batch, encode_batch(batch, tokens, section.train_on)) for batch in _batches(rows))
    return _collect(examples, encoded, section.max_length)


def _batches(rows: list[Example]) -> Iterator[list[Example]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, ROWS_AT_ONCE)):
        yield batch


def _collect(examples: Examples, batches: Batches, max_length: int) -> EncodedRows:
    problems = RowProblems()
    collected = Collected(max_length)
    for batch, encoded in batches:
        for example, row in zip(batch, encoded, strict=True):
            if isinstance(row, BadRowError):
                problems.add(example.source, str(row))
            else:
                collected.add(example.number, row)
    problems.raise_if_any(examples.label, len(examples))
    rows = collected.as_tensors(examples[0].kind)._replace(read_as=examples.read_as)
    if not rows.is_target.any():
        raise DataError(
            f"{examples.label}: none of its {len(examples):,} rows has a target token within "
            f"data.max_length={max_length}; the longest row has {int(rows.full_lengths.max())} tokens. Raise "
            "data.max_length, or shorten the rows."
        )
    return rows


class Collected:
    """Rows put end to end.

    Args:
        max_length: where a row is cut on the right.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._token_ids = array("i")
        self._is_target = bytearray()
        self._offsets = array("q", [0])
        self._numbers = array("q")
        self._full_lengths = array("q")

    def add(self, number: int, row: TokenisedRow) -> None:
        """Take a row, cut on the right at the limit."""
        self._token_ids.extend(row.token_ids[: self._max_length])
        self._is_target += row.is_target[: self._max_length]
        self._offsets.append(len(self._token_ids))
        self._numbers.append(number)
        self._full_lengths.append(len(row.token_ids))

    def as_tensors(self, kind: str) -> EncodedRows:
        """The rows taken so far."""
        return EncodedRows(
            token_ids=_tensor(self._token_ids, torch.int32),
            is_target=_tensor(self._is_target, torch.bool),
            offsets=_tensor(self._offsets, torch.int64),
            numbers=_tensor(self._numbers, torch.int64),
            full_lengths=_tensor(self._full_lengths, torch.int64),
            kind=kind,
        )


def _tensor(values: array[int] | bytearray, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype) if values else torch.zeros(0, dtype=dtype)
