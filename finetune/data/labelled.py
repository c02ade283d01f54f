"""Encode rows with answers that are labelled good or bad, for KTO.

A row has the columns `prompt`, `completion` and `label`, and is encoded like every other row. Each row also gets a
mismatched completion: its own prompt, followed by the answer of another row of the same global batch. On these, KTO
measures how far the model has moved from the base (Ethayarajh et al., 2024, arXiv:2402.01306, section 4.1).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils.data import Dataset

from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExample, EncodedExamples, SplitsOf, digest_tensors
from finetune.data.examples import load_examples
from finetune.data.preferences import refuse_each_turn
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import DataSection
    from finetune.fallbacks import Fallbacks

_log = logging.getLogger(__name__)


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
        DataError: there is one row only, or a row has no target left.
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
        empty = (answers.num_targets == 0).nonzero()[:, 0].tolist()
        if empty:
            raise DataError(
                f"{label}: {len(empty)} rows have no target token, the first is {answers.source(empty[0])}. Raise "
                "data.max_length, or remove them."
            )

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
    if encoded.validation is None:
        return EncodedLabelledSplits(train=train)
    validation = EncodedLabelled(encoded.validation, "validation", max_length=section.max_length)
    return EncodedLabelledSplits(train=train, validation=validation)


def _prompt_length(is_target: torch.Tensor) -> int:
    """Count the tokens before the first that carries loss."""
    return int(is_target.int().argmax())
