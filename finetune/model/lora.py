"""Add a LoRA adapter to a base model, or load a saved one."""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ConfigError, ModelError, first_line
from finetune.model.base import count_parameters
from finetune.model.targets import (
    has_transposed_targets,
    refuse_foreign_adapter,
    refuse_modules_to_save,
    refuse_ranks_that_cannot_fit,
    refuse_useless_patterns,
    resolve_targets,
)

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.config.schema import LoraSection

_log = logging.getLogger(__name__)
_OF_AN_ADAPTER = (".lora_", ".trainable_tokens_", ".modules_to_save.")
"""Parts of the names of PEFT's own weights."""
_VALUES_OF_AN_END = 256


def add_lora(
    model: PreTrainedModel, section: LoraSection, tokenizer: PreTrainedTokenizerBase | None = None
) -> PeftModel:
    """Freeze the base and add an adapter to its target modules, new or read from `lora.start_from`.

    The base is on the CPU; with `lora.quantize` it is the one from `build_quantized_base`. `lora.new_tokens` needs the
    tokenizer after `add_tokens`.

    Raises:
        ConfigError: the recipe has not quantized the base or added the tokens that the section asks for.
        ModelError: a target matches no linear layer, or `lora.start_from` does not fit.
    """
    if section.quantize != "none":
        from finetune.model.quantized import refuse_unquantized

        refuse_unquantized(model, section)
    ids = ids_of_new_tokens(tokenizer, section)
    if ids:
        grow_embeddings(model, ids[-1] + 1)
    targets = resolve_targets(model, section.target_modules, section.layers)
    adapted = attach_adapter(model, section, targets, ids)
    if ids:
        _start_from_mean_row(adapted, ids)
    if section.init != "default":
        from finetune.model.adapter_start import start_from_principal_values

        start_from_principal_values(adapted, section.r, section.init)
    if section.start_from is not None:
        from finetune.model.adapter_start import start_from_adapter

        trained_in_fp32(adapted)  # as the layers of the adapter are that were trained whole
        start_from_adapter(adapted, section)
    trainable, total = count_parameters(adapted)
    _log.info(
        "%s r=%d%s on %s%s: %s of %s parameters train (%.2f %%)%s",
        _describe_method(section),
        section.r,
        " (some layers have other ranks)" if section.rank_pattern else "",
        ", ".join(targets),
        "".join(f", and the whole {name}" for name in section.modules_to_save),
        f"{trainable:,}",
        f"{total:,}",
        100 * trainable / total,
        "; half of them are frozen: they subtract the start values from the base" if section.init != "default" else "",
    )
    return adapted


def attach_adapter(
    model: PreTrainedModel, section: LoraSection, targets: list[str], ids: Sequence[int] = ()
) -> PeftModel:
    """Freeze the base and add an adapter to these layers as the section describes it, with PEFT's initial weights.

    The rows of the embedding of these token ids train too. On the meta device nothing takes memory.

    Raises:
        ModelError: PEFT refuses to adapt these layers, as it does those of Mamba, or a pattern matches none of them.
        ConfigError: the adapter has more weights than this machine has memory for.
    """
    from peft import get_peft_model

    refuse_useless_patterns(model, targets, section)
    refuse_modules_to_save(model, targets, section.modules_to_save)
    config = _adapter_config(model, section, targets, list(ids))
    refuse_ranks_that_cannot_fit(model, config)
    try:
        with quiet_peft():
            adapted: PeftModel = get_peft_model(model, config)
    except ValueError as error:
        raise ModelError(
            f"PEFT does not adapt the layers {', '.join(targets)} of this {model.config.model_type} model "
            f"({first_line(error)}). Name others in lora.target_modules, or set training.method=full."
        ) from error
    return adapted


def load_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Put a saved adapter on its base. The adapter is trainable, so that `Placement.place` keeps it in fp32.

    Raises the errors of `refuse_foreign_adapter`.
    """
    from peft import PeftModel

    tokens = refuse_foreign_adapter(base, folder).get("trainable_token_indices") or {}
    rows = tokens.values() if isinstance(tokens, dict) else [tokens]
    grow_embeddings(base, max((max(ids) + 1 for ids in rows), default=0))
    with quiet_peft():
        model = PeftModel.from_pretrained(base, str(folder), is_trainable=True)
    trained_in_fp32(model)
    return model


def trained_in_fp32(model: torch.nn.Module) -> None:
    """Convert the weights that train to fp32. PEFT keeps whole layers in the type of the base."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


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


def fingerprint_base(model: torch.nn.Module, section: LoraSection) -> str:
    """Return a SHA-256 of the names, types, shapes and ends of the weights under an adapter, within milliseconds.

    Weights in 4 bits do not count, because another device may round some of them differently, and neither do layers
    that `lora.init` has changed. The model is as it was built: neither converted nor placed.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        is_changed = section.init != "default" and ".base_layer." in name
        if not any(part in name for part in _OF_AN_ADAPTER) and weight.is_floating_point() and not is_changed:
            values = weight.detach().reshape(-1)
            ends = torch.cat([values[:_VALUES_OF_AN_END], values[-_VALUES_OF_AN_END:]]).cpu().view(torch.uint8)
            digest.update(f"{name} {weight.dtype} {list(weight.shape)} ".encode() + ends.numpy().tobytes())
    return digest.hexdigest()


def without_adapter(model: Any) -> PreTrainedModel:
    """Return the base without its adapter. It shares its weights with the model, which does not change."""
    if not hasattr(model, "peft_config"):
        base: PreTrainedModel = model
        return base
    tensors = [*model.parameters(), *model.buffers()]
    shared = {id(tensor): tensor for tensor in tensors}
    base = copy.deepcopy(model, shared).unload()
    return base  # noqa: RET504  # the assignment gives it its type


def _adapter_config(model: PreTrainedModel, section: LoraSection, targets: list[str], ids: list[int]) -> LoraConfig:
    """Build PEFT's configuration. PiSSA doubles the rank and keeps the scale, see `start_from_principal_values`."""
    from peft import LoraConfig
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    is_tied = getattr(model.config, "tie_word_embeddings", False)
    rank, alpha, is_root = section.r, section.alpha, section.rslora
    if section.init != "default":
        from finetune.model.adapter_start import update_scale

        rank, alpha, is_root = 2 * rank, 2 * rank * update_scale(rank, alpha, is_root), False
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        rank_pattern=dict(section.rank_pattern),
        alpha_pattern=dict(section.alpha_pattern),
        lora_alpha=alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=section.dropout,
        use_rslora=is_root,
        use_dora=section.dora,
        target_modules=targets,
        fan_in_fan_out=has_transposed_targets(model, targets),
        trainable_token_indices=_rows_to_train(model, ids),
        modules_to_save=list(section.modules_to_save) or None,
        # PEFT warns if there is nothing to tie.
        ensure_weight_tying=is_tied and not set(EMBEDDING_LAYER_NAMES).isdisjoint(section.modules_to_save),
        base_model_name_or_path=model.config._name_or_path or None,
    )


def _describe_method(section: LoraSection) -> str:
    names = {(False, False): "LoRA", (True, False): "rsLoRA", (False, True): "DoRA", (True, True): "DoRA with rsLoRA"}
    start = {"default": "", "pissa": " from PiSSA", "pissa_fast": " from fast PiSSA"}[section.init]
    return names[section.rslora, section.dora] + start


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Silence the warning that peft 0.21 causes by using a deprecated name of transformers 5."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


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


def _rows_to_train(model: Any, ids: list[int]) -> dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices` for these tokens: for both embeddings, or for the tied one.

    The base's own rows stay as they are, and the adapter's file holds the new rows. See
    https://huggingface.co/docs/peft/package_reference/trainable_tokens.

    Raises:
        ModelError: the head has a bias, which PEFT's layer would leave out.
    """
    if not ids:
        return None
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


def _start_from_mean_row(model: Any, ids: list[int]) -> None:
    """Start the new rows as the mean of the rows that the base's tokenizer uses, without those in reserve.

    The model is a PEFT model that trains these rows. Ids before the first new one are the tokenizer's own.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for layer in model.modules():
        if not isinstance(layer, TrainableTokensLayer) or layer.tied_adapter is not None:
            continue
        base: Any = layer.get_base_layer()
        known = base.weight[: ids[0]].detach()
        for delta in layer.trainable_tokens_delta.values():
            delta.data.copy_(known.float().mean(dim=0).expand(len(ids), -1))
