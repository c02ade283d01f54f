"""Add a LoRA adapter to a base model."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ConfigError, ModelError, first_line
from finetune.model.base import count_parameters
from finetune.model.targets import (
    has_transposed_targets,
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
OF_AN_ADAPTER = (".lora_", ".trainable_tokens_", ".modules_to_save.")
"""Parts of the names of PEFT's own weights."""
_VALUES_OF_AN_END = 256
_NOT_OF_A_FORWARD = ("_token_id", "_or_path", "dtype", "quantization_config", "_version", "use_cache", "vocab_size")


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
    if section.quantize != "none" and not getattr(model, "is_loaded_in_4bit", False):
        raise ConfigError(
            f"lora.quantize is {section.quantize}, but this recipe builds its base without quantizing it. Use "
            "recipes/finetune_qlora.py, or set lora.quantize=none."
        )
    ids: list[int] = []
    if section.new_tokens:
        from finetune.model.new_tokens import grow_embeddings, ids_of_new_tokens

        ids = ids_of_new_tokens(tokenizer, section)
        grow_embeddings(model, ids[-1] + 1)
    targets = resolve_targets(model, section.target_modules, section.layers)
    adapted = attach_adapter(model, section, targets, ids)
    if ids:
        from finetune.model.new_tokens import start_from_mean_row

        start_from_mean_row(adapted, ids)
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


def trained_in_fp32(model: torch.nn.Module) -> None:
    """Convert the weights that train to fp32. PEFT keeps whole layers in the type of the base."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


def fingerprint_base(model: torch.nn.Module, section: LoraSection) -> str:
    """Return a SHA-256 of the names, types, shapes and ends of the weights under an adapter, within milliseconds.

    Weights in 4 bits do not count, because another device may round some of them differently, and neither do layers
    that `lora.init` has changed. The model is as it was built: neither converted nor placed.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        is_changed = section.init != "default" and ".base_layer." in name
        if not any(part in name for part in OF_AN_ADAPTER) and weight.is_floating_point() and not is_changed:
            values = weight.detach().reshape(-1)
            ends = torch.cat([values[:_VALUES_OF_AN_END], values[-_VALUES_OF_AN_END:]]).cpu().view(torch.uint8)
            digest.update(f"{name} {weight.dtype} {list(weight.shape)} ".encode() + ends.numpy().tobytes())
    return digest.hexdigest()


def describe_architecture(model: PreTrainedModel | PeftModel) -> str:
    """Return the model's configuration as JSON, without values that no forward depends on or that the weights tell."""
    values = {name: value for name, value in model.config.to_dict().items() if not name.endswith(_NOT_OF_A_FORWARD)}
    return json.dumps(values, sort_keys=True, default=str)


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
    rank, alpha, is_root, rows = section.r, section.alpha, section.rslora, None
    if ids:
        from finetune.model.new_tokens import rows_to_train

        rows = rows_to_train(model, ids)
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
        trainable_token_indices=rows,
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
