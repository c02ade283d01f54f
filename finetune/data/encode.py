"""Encode the rows of a run: render, tokenise and mark each row once, then apply the gates."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.data.cache import encoding_key, load_or_encode
from finetune.data.cells import BadRowError
from finetune.data.chat_template import ChatTemplate, key_in_words, use_chat_template
from finetune.data.encoded import EncodedExamples, EncodedRows, EncodedSplits, Part, lay_end_to_end
from finetune.data.examples import ExampleSplits
from finetune.data.formats import Example
from finetune.data.gates import name_some, pass_gates
from finetune.data.parallel import Encoded, WorkerLostError, choose_processes, encode_in_processes
from finetune.data.rows import Examples, RowProblems, kind_in_words
from finetune.data.templates import AnswerTokens, TokenisedRow, TrainOn, digest_tokenizer, encode_batch
from finetune.data.turns import Dialogue
from finetune.errors import DataError
from finetune.fallbacks import Fallback, Fallbacks
from finetune.logs import waiting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection

_log = logging.getLogger(__name__)

ROWS_AT_ONCE = 512
"""Rows of a batch: one call of the template and of the tokenizer."""


@waiting("reading and encoding the rows")
def encode_examples(
    splits: ExampleSplits,
    tokenizer: PreTrainedTokenizerBase,
    section: DataSection,
    *,
    fallbacks: Fallbacks | None = None,
    is_gated: bool = True,
) -> EncodedSplits:
    """Encode every split, or read it from the cache, and log a summary of each.

    The first process of a node encodes and the others wait for it, by a file lock: this is no collective.

    Args:
        splits: the result of `load_examples`.
        tokenizer: a fast tokenizer; its own chat template is used, or that of `data.chat_template`, which it is given.
        section: `max_length`, `cache_dir`, the gates, and how the rows were chosen.
        fallbacks: records that the cache cannot be written.
        is_gated: whether the gates refuse or drop rows; False keeps all.

    Raises:
        DataError: a row cannot be used, a split has no row or no target token, a gate refuses the rows, or the
            tokenizer cannot encode them.
        ConfigError: there is no template of the name in `data.chat_template`.
    """
    use_chat_template(tokenizer, section.chat_template)
    encoder = _Encoder(tokenizer, section, Fallbacks() if fallbacks is None else fallbacks)
    parts = {
        split: [encoder.encode(part) for part in examples.parts]
        for split, examples in vars(splits).items()
        if examples is not None
    }
    if is_gated:
        parts = pass_gates(parts, section, tokenizer.bos_token_id, encoder.tokens.template.name)
    result = EncodedSplits(**{split: _mix(split, of_split, section.split_seed) for split, of_split in parts.items()})
    for line in describe(result):
        _log.info("%s", line)
    return result


def describe(splits: EncodedSplits) -> list[str]:
    """Summarise each split on one line, and name the rows without a target token."""
    lines = []
    for name, examples in vars(splits).items():
        lines += [f"{name}: off"] if examples is None else _describe_split(name, examples)
    return lines


def encode_rows(examples: Examples, tokens: AnswerTokens, section: DataSection, fallbacks: Fallbacks) -> EncodedRows:
    """Encode all rows of a source, in this process or in several: the bytes are the same.

    Args:
        examples: all rows of a source.
        tokens: the tokenizer and its special tokens.
        section: `max_length`, `train_on`, `num_processes`.
        fallbacks: records that the other processes were lost.

    Raises:
        DataError: a row cannot be used, or none has a target token.
    """
    rows, train_on = _rows_to_encode(examples, section.train_on)
    num_processes = choose_processes(rows, section.num_processes, ROWS_AT_ONCE)
    if num_processes > 1:
        try:
            with encode_in_processes(tokens, train_on, num_processes) as encode:
                return _collect(examples, encode(_batches(rows)), tokens, section.max_length)
        except WorkerLostError as error:
            fallbacks.take(
                Fallback(
                    what="data.num_processes",
                    wanted=f"{num_processes} processes that encode {examples.label}",
                    used="this process alone",
                    why=str(error),
                )
            )
    encoded = ((batch, encode_batch(batch, tokens, train_on)) for batch in _batches(rows))
    return _collect(examples, encoded, tokens, section.max_length)


def _rows_to_encode(examples: Examples, train_on: str) -> tuple[list[Example], TrainOn]:
    """Return the rows to encode. For `each_turn` these are the conversations up to each answer, which ends them."""
    if train_on != "each_turn":
        return examples.rows, "last" if train_on == "last" else "all"
    return [
        row._replace(messages=row.messages[: answer + 1], learnt=(answer,)) if row.kind == "messages" else row
        for row in examples.rows
        for answer in row.learnt or (0,)
    ], "all"


class _Encoder:
    """Encodes all sources with one tokenizer. Splits that share a source share its encoded rows."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: DataSection, fallbacks: Fallbacks) -> None:
        self.tokens = AnswerTokens(tokenizer, section.chat_template or "")
        self._digest = digest_tokenizer(tokenizer)
        self._section = section
        self._fallbacks = fallbacks
        self._done: dict[int, EncodedExamples] = {}

    def encode(self, examples: Examples) -> Part:
        """Encode the rows that a split has from one source."""
        whole = examples.whole
        if id(whole) not in self._done:
            rows = load_or_encode(
                Path(self._section.cache_dir).expanduser(),
                encoding_key(whole, self._digest, self._section),
                partial(encode_rows, whole, self.tokens, self._section, self._fallbacks),
                self._fallbacks,
                whole.label,
            )
            end_id = self.tokens.end_id_of(rows.kind)
            self._done[id(whole)] = EncodedExamples(rows, end_id, whole.source.place)
        encoded = self._done[id(whole)]
        if examples.choose is not None:
            encoded = encoded.select_examples(examples.choose(len(encoded.rows_of_examples)))
        return Part(encoded, examples.label, examples.weight)


def _batches(rows: list[Example]) -> Iterator[list[Example]]:
    remaining = iter(rows)
    while batch := list(islice(remaining, ROWS_AT_ONCE)):
        yield batch


def _collect(examples: Examples, batches: Iterable[Encoded], tokens: AnswerTokens, max_length: int) -> EncodedRows:
    problems = RowProblems()
    rows = lay_end_to_end(_good_rows(batches, problems), max_length=max_length, kind=examples[0].kind)
    problems.raise_if_any(examples.label, len(examples))
    if not rows.is_target.any():
        raise DataError(
            f"{examples.label}: none of its {len(examples):,} rows has a target token within "
            f"data.max_length={max_length}; the longest row has {int(rows.full_lengths.max())} tokens. Raise "
            "data.max_length, or shorten the rows."
        )
    return rows._replace(
        is_good=torch.tensor([example.is_good for example in examples], dtype=torch.bool)[rows.example_of],
        read_as=examples.read_as,
        ignored_keys=_ignored_keys(examples, tokens.template),
    )


def _ignored_keys(examples: Examples, template: ChatTemplate) -> list[tuple[str, int, int]]:
    """Count the rows with each key that the template does not render, beside the number of the first of them."""
    found: dict[str, tuple[int, int]] = {}
    for example in examples.rows if examples[0].kind == "messages" else ():
        for key in template.ignored(Dialogue(example.messages, example.learnt, example.tools)):
            count, first = found.get(key_in_words(key), (0, example.number))
            found[key_in_words(key)] = count + 1, first
    return [(key, *where) for key, where in sorted(found.items())]


def _good_rows(batches: Iterable[Encoded], problems: RowProblems) -> Iterator[tuple[int, TokenisedRow]]:
    """Yield the rows that could be encoded, with their numbers, and note the problems of the others."""
    bad = -1  # the answers of a conversation count as one row
    for batch, encoded in batches:
        for example, row in zip(batch, encoded, strict=True):
            if isinstance(row, BadRowError):
                if example.number != bad:
                    problems.add(example.source, str(row))
                bad = example.number
            else:
                yield example.number, row


def _mix(split: str, parts: Sequence[Part], seed: int) -> EncodedExamples:
    """Join the sources of a split, the rows of each as often as its weight says."""
    chosen = []
    for part in parts:
        rows = part.epoch(seed)
        chosen.append(part.examples.select_examples(rows))
        if split == "train" and (len(parts) > 1 or part.weight != 1):
            _log.info(
                "%s: %s rows an epoch from the %s of %s (weight %g)",
                *(split, f"{len(rows):,}", f"{len(part.examples.rows_of_examples):,}", part.label, part.weight),
            )
    return EncodedExamples.joined(chosen)


def _count(examples: EncodedExamples) -> str:
    if not examples.has_branches:
        return f"{len(examples):,} rows"
    return f"{len(examples.rows_of_examples):,} rows with {len(examples):,} answers, each with the turns before it,"


def _describe_split(name: str, examples: EncodedExamples) -> list[str]:
    lines = [
        f"{name}: {_count(examples)} of {kind_in_words(examples.kind)}, "
        f"{int(examples.lengths.sum()):,} tokens, {int(examples.num_targets.sum()):,} target tokens, "
        f"longest row {int(examples.lengths.max()):,} tokens, {int(examples.is_truncated.sum()):,} rows truncated"
    ]
    empty = (examples.num_targets == 0).nonzero()[:, 0].tolist()
    if empty:
        named = name_some(examples.source(index) for index in empty)
        lines.append(f"{name}: {len(empty):,} rows have no target token after truncation: {named}")
    return lines
