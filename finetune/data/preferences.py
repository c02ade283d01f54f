"""Encode pairs of answers to one prompt, a chosen answer and a rejected answer.

A row has the columns `prompt`, `chosen` and `rejected`, texts or lists of turns. Each side is encoded as prompt and
completion, like every other row.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset

from finetune.data.encode import encode_sides
from finetune.data.encoded import EncodedExample, EncodedExamples, SplitsOf
from finetune.data.examples import load_examples
from finetune.data.row_checks import ROW_CHECKS
from finetune.engine.prefixes import Tokens, num_shared
from finetune.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection
    from finetune.fallbacks import Fallbacks


class EncodedPair(NamedTuple):
    """The two sides of a pair."""

    chosen: EncodedExample
    rejected: EncodedExample


class EncodedPairs(Dataset[EncodedPair]):
    """The encoded pairs of one split, both sides in the same order. `label` names the file or split in messages.

    Attributes:
        sides: the chosen and the rejected answers, each with its prompt.
        lengths: tokens of the longer side of each pair, int64, shape (pairs,).

    Raises:
        DataError: the sides have different rows, or one has no target left.
    """

    row_type = "preference"

    def __init__(self, chosen: EncodedExamples, rejected: EncodedExamples, label: str) -> None:
        self.chosen, self.rejected = chosen, rejected
        self.sides = chosen, rejected
        self.label = label
        if chosen.numbers.tolist() != rejected.numbers.tolist():
            raise DataError(f"{label}: {len(chosen)} rows have a chosen answer and {len(rejected)} a rejected one.")
        empty = ((chosen.num_targets == 0) | (rejected.num_targets == 0)).nonzero()[:, 0].tolist()
        if empty:
            raise DataError(
                f"{label}: {len(empty)} pairs have a side without a target token, the first is "
                f"{chosen.source(empty[0])}. Raise data.max_length, or remove them."
            )
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


def _refuse_drops(section: DataSection) -> None:
    """Refuse checks that drop rows: each side is checked separately, so the two could lose different rows."""
    drops = [
        f"data.{key}" for key in (*(check.key for check in ROW_CHECKS), "on_overlap") if getattr(section, key) == "drop"
    ]
    if drops:
        raise ConfigError(
            f"{' and '.join(drops)} {'are' if len(drops) > 1 else 'is'} drop, but each side of a pair is checked "
            "separately, so one of the two could be left out. Set refuse, which names the rows, and remove them from "
            "the file, or set warn to keep them."
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
        ConfigError: `data.train_on=each_turn`, which has no meaning for pairs, or a check that is set to drop rows.
    """
    refuse_each_turn(section)
    if is_checked:
        _refuse_drops(section)
    sides = [load_examples(section, "chosen"), load_examples(section, "rejected")]
    chosen, rejected = encode_sides(sides, tokenizer, section, fallbacks=fallbacks, is_checked=is_checked)
    train = EncodedPairs(chosen.train, rejected.train, sides[0].train.label)
    if chosen.validation is None or rejected.validation is None:
        return EncodedPairSplits(train=train)
    return EncodedPairSplits(train=train, validation=EncodedPairs(chosen.validation, rejected.validation, "validation"))
