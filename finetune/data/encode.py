"""Rows to tokens, once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.cache import EncodedRows, digest_tokenizer, encoding_key, load_or_encode
from finetune.data.collect import encode_rows
from finetune.data.encoded import EncodedExamples, EncodedSplits, Part
from finetune.data.examples import ExampleSplits
from finetune.data.gates import pass_gates
from finetune.data.mixing import select_rows
from finetune.data.rows import Examples, kind_in_words
from finetune.data.templates import AnswerTokens
from finetune.fallbacks import Fallbacks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection

_log = logging.getLogger(__name__)

_MAX_NAMED = 3


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
