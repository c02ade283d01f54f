"""Add the tokens of `lora.new_tokens` to the tokenizer, and their rows to the embedding and to the adapter."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ConfigError, ModelError
from finetune.runs.verification import ADAPTER_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import LoraSection

_log = logging.getLogger(__name__)


def add_tokens(tokenizer: PreTrainedTokenizerBase, section: LoraSection) -> None:
    """Add the tokens of `lora.new_tokens` to the tokenizer, before any row is encoded.

    They are not special tokens: rows may contain them as text, and decoded answers show them.

    Raises:
        ConfigError: one of them is a token already.
    """
    from tokenizers import AddedToken

    known = tokenizer.get_vocab()
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    # The tokenizer beside an adapter was given the tokens of its run.
    is_of_run = (Path(tokenizer.name_or_path) / ADAPTER_FILES[0]).is_file()
    given = {token for token, token_id in known.items() if is_of_run and token_id >= tokenizer.vocab_size}
    there = [token for token in section.new_tokens if token in special or token in known.keys() - given]
    if there:
        raise ConfigError(
            f"lora.new_tokens: {', '.join(there)} is already a token of this tokenizer (id {known[there[0]]}). "
            "Remove it from the list."
        )
    added = [AddedToken(token, special=False, normalized=False) for token in section.new_tokens]
    if added:
        tokenizer.add_tokens(added)


def grow_embeddings(model: Any, num_rows: int) -> None:
    """Give the embedding at least `num_rows` rows. It is never made smaller, since models keep rows in reserve.

    Added rows are the mean of the present ones, the same on every rank.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    if num_rows <= rows:
        return
    with torch.no_grad():
        model.resize_token_embeddings(num_rows, mean_resizing=False)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            if layer is not None:
                layer.weight[rows:] = layer.weight[:rows].float().mean(dim=0).to(layer.weight.dtype)
    _log.warning(
        "the embedding grew from %d to %d rows for new tokens: before the adapter is loaded elsewhere, "
        "base.resize_token_embeddings(%d) is needed there",
        rows,
        num_rows,
        num_rows,
    )


def ids_of_new_tokens(tokenizer: PreTrainedTokenizerBase | None, section: LoraSection) -> list[int]:
    """Return the ids that `add_tokens` gave, ascending; empty if the configuration adds none.

    Raises:
        ConfigError: the recipe has not added them.
    """
    known = tokenizer.get_vocab() if tokenizer is not None and section.new_tokens else {}
    missing = [token for token in section.new_tokens if token not in known]
    if missing:
        raise ConfigError(
            f"lora.new_tokens is {', '.join(section.new_tokens)}, but this recipe does not add them to its tokenizer. "
            "Use recipes/finetune_new_tokens.py, or call add_tokens(tokenizer, config.lora) before the rows are "
            "encoded and add_lora(model, config.lora, tokenizer)."
        )
    return sorted(known[token] for token in section.new_tokens)


def rows_to_train(model: Any, ids: list[int]) -> dict[str, list[int]]:
    """Return PEFT's `trainable_token_indices` for these tokens: for both embeddings, or for the tied one.

    The base's own rows stay as they are, and the adapter's file holds the new rows. See
    https://huggingface.co/docs/peft/package_reference/trainable_tokens.

    Raises:
        ModelError: the head has a bias, which PEFT's layer would leave out.
    """
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ModelError(
            f"lora.new_tokens: the head of this {model.config.model_type} model has a bias, which PEFT's trainable "
            "tokens leave out. Remove lora.new_tokens, and use texts that the tokenizer knows."
        )
    is_tied = head.weight is embedding.weight
    layers = [embedding] if is_tied else [embedding, head]
    return {names[id(layer)].rpartition(".")[2]: ids for layer in layers}


def start_from_mean_row(model: Any, ids: list[int]) -> None:
    """Start the new rows as the mean of the rows that the base's tokenizer uses, without those in reserve.

    The model is a PEFT model that trains these rows. Ids before the first new one are the tokenizer's own.
    """
    for rows, deltas in _rows_and_deltas(model):
        for delta in deltas:
            delta.copy_(rows[: ids[0]].float().mean(dim=0).expand(len(ids), -1))


def start_base_from_mean_row(model: Any, ids: list[int]) -> None:
    """Give the base the rows with which the new tokens start, so that it is the model before its first step.

    No token of the base's tokenizer uses these rows. New rows that have not trained get the rounding of the base.
    """
    for rows, deltas in _rows_and_deltas(model):
        mean = rows[: ids[0]].float().mean(dim=0)
        rows[ids] = mean.to(rows.dtype)
        for delta in deltas:
            if torch.equal(delta, mean.to(delta.dtype).expand(len(ids), -1)):
                delta.copy_(rows[ids])


def _rows_and_deltas(model: Any) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield the base's rows and the adapter's new rows of each embedding, of tied ones once."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for layer in model.modules():
        if isinstance(layer, TrainableTokensLayer) and layer.tied_adapter is None:
            base: Any = layer.get_base_layer()
            yield base.weight.data, [delta.data for delta in layer.trainable_tokens_delta.values()]
