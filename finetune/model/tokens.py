"""Build a tokenizer, and make it and its model agree on the stop tokens, the padding token and the number of tokens."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.chat_template import read_template_file, use_chat_template
from finetune.data.templates import stop_ids
from finetune.errors import DataError, ModelError
from finetune.model.base import read_config_json
from finetune.model.from_hub import load_part, locate, locate_model
from finetune.model.unsupported import refuse_oversized, refuse_oversized_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config, ModelSection

_NEW_PAD = "<|pad|>"
_MADE_TO_PAD = frozenset({_NEW_PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>"})
_KEPT_FREE = re.compile(r"<\|(dummy|placeholder|reserved|unused)[\w-]*\|>")
"""Tokens that Phi's tokenizers keep in reserve: `<|placeholder6|>` (Phi-3), `<|dummy_85|>` (phi-4)."""
_log = logging.getLogger(__name__)


def build_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and give it `model.chat_template` if it has no template of its own.

    Raises:
        ModelError: there is no tokenizer, or the template cannot be read.
    """
    from transformers import AutoTokenizer

    where = locate_model(section) if section.tokenizer is None else locate(section.tokenizer, "model.tokenizer")
    refuse_oversized_folder(where)  # transformers may look for the tokenizer's class in this config.json
    if section.tokenizer is None:
        _num_rows(section)  # refuses the config.json of the hub
    tokenizer: PreTrainedTokenizerBase = load_part(
        section,
        lambda: AutoTokenizer.from_pretrained(
            where, revision=section.revision, trust_remote_code=section.trust_remote_code
        ),
        where=where,
        part="tokenizer",
    )
    if not tokenizer.vocab_size:  # transformers makes an empty one if there are no files
        raise ModelError(f"{where} holds no tokenizer. Name a folder or a hub id that has one in model.tokenizer.")
    if tokenizer.chat_template is None and section.chat_template is not None:
        tokenizer.chat_template = _read_template(section.chat_template)
    elif section.chat_template is not None:
        _log.warning("model.chat_template is not used: the tokenizer has a template. data.chat_template replaces it")
    choose_pad_token(tokenizer, _num_rows(section))
    return tokenizer


def build_run_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Build the base's tokenizer with the chat template and the tokens that the run gives it.

    Raises:
        ModelError: there is no tokenizer.
        ConfigError: see `add_tokens` and `use_chat_template`.
    """
    tokenizer = build_tokenizer(config.model)
    use_chat_template(tokenizer, config.data.chat_template, config.data.template_date)
    if config.training.method == "lora" and config.lora.new_tokens:
        from finetune.model.new_tokens import add_tokens

        add_tokens(tokenizer, config.lora)
    return tokenizer


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

    The tokenizer has its final chat template. `num_rows` are the rows of the model's embedding, into which a new token
    must fit; None if unknown.
    """
    ends = _end_ids(tokenizer)
    own = tokenizer.pad_token_id
    if own is not None and own not in ends:
        return
    special = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    known = [text for text in special if text in _MADE_TO_PAD]
    free = [text for text in special if _KEPT_FREE.fullmatch(text)]
    unknown = [str(tokenizer.unk_token)] if tokenizer.unk_token_id not in {None, *ends} else []
    # The last of the free ones, as in Microsoft's later uploads.
    pad = next(iter([*known, *free[::-1], *unknown]), None)
    if pad is None and num_rows is not None and len(tokenizer) < num_rows:
        pad = _NEW_PAD
    if pad is None:
        _log.info("%s stays the padding token, though it also ends text: no other is free", tokenizer.pad_token)
        return
    was = tokenizer.pad_token
    tokenizer.add_special_tokens({"pad_token": pad})
    _log.info("padding token: %s, in place of %s", pad, f"{was}, which also ends text" if was else "none")


def _end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    if tokenizer.is_fast:
        try:
            return set(stop_ids(tokenizer))
        except DataError:  # said where rows are encoded, with what to do
            pass
    return {tokenizer.eos_token_id} - {None}


def _num_rows(section: ModelSection) -> int | None:
    """Return the rows of the model's embedding; None if no model is named or its configuration lacks the number."""
    if section.config is not None:
        refuse_oversized(section.config, str(section.path or "model.config"))
        return section.config.get("vocab_size")
    return None if section.path is None else read_config_json(section, locate_model(section)).get("vocab_size")


def _read_template(template: str) -> str:
    if not template.endswith((".jinja", ".j2")):
        if "{" not in template:  # the tokenizer would render every row as this word
            raise ModelError(
                f"model.chat_template is {template}, which is neither a template in Jinja nor the path of a .jinja "
                "file. The names of shipped templates are values of data.chat_template."
            )
        return template
    try:
        return read_template_file(Path(template).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ModelError(f"model.chat_template is {template}, which cannot be read: {reason}.") from error
