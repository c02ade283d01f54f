"""Encode rows for preference learning: pairs of answers to one prompt, or single answers labelled good or bad.

A pair has the columns `prompt`, `chosen` and `rejected`, texts or lists of turns. Each side is encoded as prompt and
completion, like every other row.

A labelled row has the columns `prompt`, `completion` and `label`. Each also gets a mismatched completion: its own
prompt, followed by the answer of another row of the same global batch. On these, KTO measures how far the model has
moved from the base (Ethayarajh et al., 2024, arXiv:2402.01306, section 4.1).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset

from finetune.data import row_checks
from finetune.data.encode import encode_examples, encode_sides
from finetune.data.encoded import EncodedExample, EncodedExamples, SplitsOf, digest_tensors
from finetune.data.examples import load_examples
from finetune.engine.prefixes import Tokens, num_shared
from finetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection
    from finetune.fallbacks import Fallbacks
_log = logging.getLogger(__name__)


class EncodedPair(NamedTuple):
    """The two sides of a pair."""

    chosen: EncodedExample
    rejected: EncodedExample


class EncodedPairs(Dataset[EncodedPair]):
    """The encoded pairs of one split, both sides in the same order. `label` names the file or split in messages.

    Attributes:
        sides: the chosen and the rejected answers, each with its prompt.
        lengths: tokens of the longer side of each pair, int64, shape (pairs,).
    """

    row_type = "preference"

    def __init__(self, chosen: EncodedExamples, rejected: EncodedExamples, label: str) -> None:
        self.chosen, self.rejected = chosen, rejected
        self.sides = chosen, rejected
        self.label = label
        self.lengths = torch.maximum(chosen.lengths, rejected.lengths)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> EncodedPair:
        return EncodedPair(self.chosen[index], self.rejected[index])

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprints of both sides."""
        return f"{self.chosen.fingerprint}/{self.rejected.fingerprint}"

    def tokens(self, index: int) -> Tokens:
        """Return the tokens of a pair, shape (time,): the chosen side and the rejected one after the shared prefix."""
        chosen, rejected = self.chosen.tokens(index), self.rejected.tokens(index)
        return numpy.concatenate([chosen, rejected[self.num_shared(index) :]])

    def num_shared(self, index: int) -> int:
        """Count the tokens that both sides of a pair begin with."""
        return num_shared(self.chosen.tokens(index), self.rejected.tokens(index))


class EncodedPairSplits(SplitsOf[EncodedPairs]):
    """The encoded pairs of a run. There is no test phase for pairs: `test` is always None."""


def refuse_each_turn(section: DataSection) -> None:
    """Raise a ConfigError for `data.train_on=each_turn`, which has no meaning for answers that are compared."""
    if section.train_on == "each_turn":
        raise ConfigError(
            "data.train_on is each_turn, but a row of preferences has one answer to learn from, or one on each side. "
            "Set data.train_on=all, or training.objective=sft."
        )


def encode_preferences(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    fallbacks: Fallbacks | None = None,
    is_checked: bool = True,
) -> EncodedPairSplits:
    """Read and encode the pairs of the training and the validation split.

    See `encode_examples` for the arguments.

    Raises:
        DataError: a row cannot be used.
        ConfigError: `data.train_on=each_turn`, which has no meaning for pairs.
    """
    refuse_each_turn(section)
    sides = [load_examples(section, "chosen"), load_examples(section, "rejected")]
    chosen, rejected = encode_sides(sides, tokenizer, section, fallbacks=fallbacks, is_checked=is_checked)
    train = EncodedPairs(chosen.train, rejected.train, sides[0].train.label)
    if chosen.validation is None or rejected.validation is None:
        return EncodedPairSplits(train=train)
    return EncodedPairSplits(train=train, validation=EncodedPairs(chosen.validation, rejected.validation, "validation"))


class LabelledExample(NamedTuple):
    """A row, the mismatched completion of its prompt, and whether its own answer is good."""

    answer: EncodedExample
    mismatched: EncodedExample
    is_good: bool


class EncodedLabelled(Dataset[LabelledExample]):
    """The encoded labelled rows of one split.

    An index is a row, or a pair of rows: the second supplies the mismatched completion. A row without a second one
    takes the completion of the row before it.

    Args:
        answers: the rows.
        label: the file or split, for messages.
        max_length: the most tokens of a prompt with a mismatched completion; the rest is cut off.

    Attributes:
        is_good: the label of each row, bool, shape (rows,).
        lengths, sides, tokens: those of the rows, see `EncodedExamples`.

    Raises:
        DataError: there is one row only.
    """

    row_type = "labelled"

    def __init__(self, answers: EncodedExamples, label: str, *, max_length: int) -> None:
        self.answers = answers
        self.is_good = answers.is_good
        self.lengths, self.sides, self.tokens = answers.lengths, answers.sides, answers.tokens
        self.label = label
        self.max_length = max_length
        if len(answers) < 2:
            raise DataError(f"{label} has {len(answers)} row, but KTO compares answers to different prompts. Add rows.")

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, index: int | tuple[int, int]) -> LabelledExample:
        row, other = index if isinstance(index, tuple) else (index, index - 1)
        ids, is_target = self.answers[row]
        prompt = _prompt_length(is_target)
        other_ids, is_other_target = self.answers[other]
        answer = slice(_prompt_length(is_other_target), None)
        mismatched = EncodedExample(
            torch.cat([ids[:prompt], other_ids[answer]])[: self.max_length],
            torch.cat([is_target[:prompt], is_other_target[answer]])[: self.max_length],
        )
        return LabelledExample(EncodedExample(ids, is_target), mismatched, bool(self.is_good[row]))

    @staticmethod
    def with_rows_before(rows: Sequence[int], before: Sequence[int]) -> list[tuple[int, int]]:
        """Return the indices of rows that take their mismatched completions from the rows in `before`."""
        return list(zip(rows, before, strict=True))

    @cached_property
    def longest_mismatched(self) -> int:
        """An upper limit for the tokens of a mismatched completion: the longest prompt with the longest answer."""
        prompts = torch.tensor([_prompt_length(self.answers[row].is_target) for row in range(len(self))])
        return min(self.max_length, int(prompts.max()) + int((self.lengths - prompts).max()))

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the rows, and one of their labels."""
        return f"{self.answers.fingerprint}/{digest_tensors([self.is_good])}"


class EncodedLabelledSplits(SplitsOf[EncodedLabelled]):
    """The encoded labelled rows of a run. There is no test phase for them: `test` is always None."""


def encode_labelled(
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    fallbacks: Fallbacks | None = None,
    is_checked: bool = True,
) -> EncodedLabelledSplits:
    """Read and encode the labelled rows of the training and the validation split.

    See `encode_examples` for the arguments.

    Raises:
        DataError: a row cannot be used.
    """
    refuse_each_turn(section)
    examples = load_examples(section, "labelled")
    encoded = encode_examples(examples, tokenizer, section, fallbacks=fallbacks, is_checked=is_checked)
    train = EncodedLabelled(encoded.train, examples.train.label, max_length=section.max_length)
    num_good = int(train.is_good.sum())
    _log.info("train: %s good and %s bad answers", f"{num_good:,}", f"{len(train) - num_good:,}")
    if is_checked:
        _warn_of_both_labels(train)
    if encoded.validation is None:
        return EncodedLabelledSplits(train=train)
    validation = EncodedLabelled(encoded.validation, "validation", max_length=section.max_length)
    return EncodedLabelledSplits(train=train, validation=validation)


def _warn_of_both_labels(train: EncodedLabelled) -> None:
    """Warn of rows that are labelled good and bad. Their gradients cancel each other."""
    rows: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
    for row, digest in enumerate(train.answers.digests(with_targets=True)):
        rows[int(train.is_good[row])].setdefault(digest, row)
    bad, good = rows
    both = [(bad[digest], good[digest]) for digest in bad.keys() & good.keys()]
    if both:
        named = row_checks.name_some(
            f"{train.answers.source(second)} is {train.answers.source(first)}"
            for first, second in sorted(map(sorted, both))
        )
        logging.getLogger(row_checks.__name__).warning(  # where `finetune preview` looks for warnings
            "train: %s of %s rows have the prompt and the answer of a row with the other label: %s. Remove one of "
            "the two: the answer would be learned as good and as bad.",
            *(f"{len(both):,}", f"{len(train):,}", named),
        )


def _prompt_length(is_target: torch.Tensor) -> int:
    """Count the tokens before the first that carries loss: all of them if none does."""
    return int(is_target.int().argmax()) if bool(is_target.any()) else len(is_target)
