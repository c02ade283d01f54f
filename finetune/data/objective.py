"""Read and encode the rows of a run for its objective."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from finetune.config.objectives import OBJECTIVES
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedSplits
from finetune.data.examples import load_examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.data.preferences import EncodedLabelledSplits, EncodedPairSplits
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
    if rows != "answers":
        # Most runs learn answers and need none of these.
        from finetune.data.preferences import encode_labelled, encode_preferences, refuse_each_turn

        if rows == "pairs":
            return encode_preferences(config.data, tokenizer, fallbacks=fallbacks, is_checked=is_checked)
        if rows == "labelled":
            return encode_labelled(config.data, tokenizer, fallbacks=fallbacks, is_checked=is_checked)
        refuse_each_turn(config.data)
    examples = load_examples(config.data, rows)
    return encode_examples(examples, tokenizer, config.data, fallbacks=fallbacks, is_checked=is_checked)
