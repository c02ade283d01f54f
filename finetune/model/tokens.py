"""Make a model and its tokenizer agree on the stop tokens, the padding token and the number of tokens."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from finetune.data.templates import stop_ids
from finetune.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NEW_PAD = "<|pad|>"
_MADE_TO_PAD = frozenset({_NEW_PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>"})
_KEPT_FREE = re.compile(r"<\|(dummy|placeholder|reserved|unused)[\w-]*\|>")
"""Tokens that Phi's tokenizers keep in reserve: `<|placeholder6|>` (Phi-3), `<|dummy_85|>` (phi-4)."""
_log = logging.getLogger(__name__)


def set_stop_and_pad_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Put the stop ids and the padding id into the model's configurations, and return the stop ids.

    `generate` and saving find them there. The stop ids are the template's end of turn, eos, and those of the model's
    own generation_config.json. With eos alone, a chat model does not stop after its answer.

    Raises:
        ModelError: the tokenizer has more tokens than the model has rows; tokens are never removed.
        DataError: nothing ends an answer.
    """
    rows = len(model.get_input_embeddings().weight)
    if len(tokenizer) > rows:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding {rows} rows: its last tokens "
            "would have no vector. Take the model's own tokenizer (model.tokenizer), or a model with as many rows."
        )
    generation = model.generation_config
    # A configuration for random weights may name an id without a row.
    ids = [token_id for token_id in stop_ids(tokenizer, generation.eos_token_id) if token_id < rows]
    for config in (generation, model.config):
        config.eos_token_id = list(ids)
        if tokenizer.pad_token_id is not None:
            config.pad_token_id = tokenizer.pad_token_id
    return ids


def choose_pad_token(tokenizer: PreTrainedTokenizerBase, num_rows: int | None) -> None:
    """Give the tokenizer a padding token that is not a stop token, in place.

    finetune's own training does not need it, because it identifies padding by position. But the tokenizer is saved with
    the model, and other programs mask every padding id in their labels. If the padding token were also the end of turn,
    a model trained by such a program would never learn to stop.

    Args:
        tokenizer: with its final chat template.
        num_rows: rows of the model's embedding, or None if unknown. A new token must fit into them.
    """
    ends = _end_ids(tokenizer)
    own = tokenizer.pad_token_id
    if own is not None and own not in ends:
        return
    special = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    made = [text for text in special if text in _MADE_TO_PAD]
    free = [text for text in special if _KEPT_FREE.fullmatch(text)]
    unknown = [str(tokenizer.unk_token)] if tokenizer.unk_token_id not in {None, *ends} else []
    # The last of the free ones, as in Microsoft's later uploads.
    found = next(iter([*made, *free[::-1], *unknown]), None)
    if found is None and num_rows is not None and len(tokenizer) < num_rows:
        found = _NEW_PAD
    if found is None:
        _log.info("%s stays the padding token, though it also ends text: no other is free", tokenizer.pad_token)
        return
    was = tokenizer.pad_token
    tokenizer.add_special_tokens({"pad_token": found})
    _log.info("padding token: %s, in place of %s", found, f"{was}, which also ends text" if was else "none")


def _end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    if tokenizer.is_fast:
        try:
            return set(stop_ids(tokenizer))
        except DataError:  # said where rows are encoded, with what to do
            pass
    return {tokenizer.eos_token_id} - {None}
