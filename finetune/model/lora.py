"""Put a LoRA adapter on a base model; its targets come from the modules that are really there."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from finetune.errors import ModelError
from finetune.model.base import count_parameters

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from finetune.config.schema import LoraSection

_log = logging.getLogger(__name__)


def add_lora(model: PreTrainedModel, section: LoraSection) -> PeftModel:
    """Freeze the base and add an adapter to its targets.

    Raises:
        ModelError: a target that matches no linear layer.
    """
    from peft import LoraConfig, get_peft_model

    targets = resolve_targets(model, section.targets)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # any number will do
        lora_dropout=section.dropout,
        target_modules=targets,
        base_model_name_or_path=model.config._name_or_path or None,
    )
    with _quiet_peft():
        adapted: PeftModel = get_peft_model(model, config)
    trainable, total = count_parameters(adapted)
    _log.info(
        "LoRA r=%d on %s: %s of %s parameters train (%.2f %%)",
        section.r,
        ", ".join(targets),
        f"{trainable:,}",
        f"{total:,}",
        100 * trainable / total,
    )
    return adapted


def load_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Put a saved adapter on its base; it can be trained on, and so `Runtime.place` leaves it in fp32."""
    from peft import PeftModel

    with _quiet_peft():
        return PeftModel.from_pretrained(base, str(folder), is_trainable=True)


def without_adapter(model: Any) -> PreTrainedModel:
    """The base as it was before `add_lora`. It shares its weights with the model, which stays as it is."""
    if not hasattr(model, "peft_config"):
        base: PreTrainedModel = model
        return base
    tensors = [*model.parameters(), *model.buffers()]
    shared = {id(tensor): tensor for tensor in tensors}
    base = copy.deepcopy(model, shared).unload()
    return base  # noqa: RET504  # the assignment gives it its type


def resolve_targets(model: PreTrainedModel, wish: Literal["auto"] | list[str]) -> list[str]:
    """The names to adapt, as PEFT takes them: last components where these say it exactly, else full names.

    Args:
        model: the base model.
        wish: `auto` for all linear layers but the head, or names and regular expressions of which each must match.

    Raises:
        ModelError: lists what is there.
    """
    linear = linear_layers(model)
    if wish == "auto":
        chosen = set(linear)
    else:
        matches = {pattern: {name for name in linear if _is_match(name, pattern)} for pattern in wish}
        useless = [pattern for pattern, names in matches.items() if not names]
        if useless or not matches:
            there = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelError(
                f"lora.targets: {', '.join(useless) or 'the empty list'} matches no linear layer of this "
                f"{model.config.model_type} model. There are: {', '.join(there)}. Use some of these, or "
                "lora.targets=auto."
            )
        chosen = set().union(*matches.values())
    if not chosen:
        raise ModelError(f"this {model.config.model_type} model has no linear layer that LoRA could adapt.")
    last = {name.rpartition(".")[2] for name in chosen}
    exact = {name for name in linear if name.rpartition(".")[2] in last} == chosen
    return sorted(last if exact else chosen)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Full names of all linear layers but the head."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Inside, peft 0.21 may ask transformers 5 under a name that the latter is about to drop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        yield


def _is_match(name: str, pattern: str) -> bool:
    if name == pattern or name.endswith(f".{pattern}"):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ModelError(
            f"lora.targets: {pattern} is neither a layer's name nor a regular expression ({error})."
        ) from error
