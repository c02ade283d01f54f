"""Read and encode the rows of a run for its objective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.preferences import EncodedPairSplits, encode_preferences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks


def encode_for_objective(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_gated: bool = True
) -> EncodedSplits | EncodedPairSplits:
    """Read and encode the rows of a run: pairs of answers for `training.objective=dpo`.

    Args:
        config: the whole run.
        tokenizer: the model's.
        fallbacks: see `encode_examples`.
        is_gated: see `encode_examples`.

    Raises:
        DataError: a row cannot be used.
    """
    if config.training.objective == "dpo":
        return encode_preferences(config.data, tokenizer, fallbacks=fallbacks, is_gated=is_gated)
    examples = load_examples(config.data)
    return encode_examples(examples, tokenizer, config.data, fallbacks=fallbacks, is_gated=is_gated)
