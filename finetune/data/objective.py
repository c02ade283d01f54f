"""Read and encode the rows of a run for its objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from finetune.config.objectives import OBJECTIVES
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.formats import PROMPTS
from finetune.data.labelled import EncodedLabelledSplits, encode_labelled
from finetune.data.preferences import EncodedPairSplits, encode_preferences, reading_as, refuse_each_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config, DataSection
    from finetune.fallbacks import Fallbacks

AnySplits: TypeAlias = EncodedSplits | EncodedPairSplits | EncodedLabelledSplits


def encode_for_objective(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_checked: bool = True
) -> AnySplits:
    """Read and encode the rows of a run: answers, pairs of answers or labelled answers, as its objective needs them.

    See `encode_examples` for the arguments after the config.

    Raises:
        DataError: a row cannot be used.
    """
    rows = OBJECTIVES[config.training.objective].rows
    if rows == "pairs":
        return encode_preferences(config.data, tokenizer, fallbacks=fallbacks, is_checked=is_checked)
    if rows == "labelled":
        return encode_labelled(config.data, tokenizer, fallbacks=fallbacks, is_checked=is_checked)
    section = config.data
    if rows == "prompts":
        refuse_each_turn(section)
        section = rows_with_prompts(section)
    return encode_examples(load_examples(section), tokenizer, section, fallbacks=fallbacks, is_checked=is_checked)


def rows_with_prompts(section: DataSection) -> DataSection:
    """Return a section that reads prompts, with or without expected answers."""
    return reading_as(section, PROMPTS.name, PROMPTS.may_have)
