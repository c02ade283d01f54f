"""Find the layers of a model that LoRA adapts."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from finetune.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from finetune.config.schema import LoraSection

_log = logging.getLogger(__name__)


def resolve_targets(
    model: PreTrainedModel, wish: Literal["auto"] | list[str], layers: Sequence[int] | None = None
) -> list[str]:
    """Return the names of the layers to adapt as PEFT takes them: last components if these are exact, else full names.

    `wish` is `auto` for all linear layers except the head, or names and regular expressions, each of which must match a
    layer. `layers` are the decoder layers to adapt, from 0 on; None: all.

    Raises:
        ModelError: one of them matches no layer, or there are fewer layers; lists the layers that there are.
    """
    linear = linear_layers(model)
    if wish == "auto":
        chosen = set(linear)
        _log_experts(model)
    else:
        matches = {pattern: {name for name in linear if _is_match(name, pattern)} for pattern in wish}
        useless = [pattern for pattern, names in matches.items() if not names]
        if useless or not matches:
            raise _no_match("target_modules", ", ".join(useless) or "the empty list", "linear layer", model, linear)
        chosen = set().union(*matches.values())
    if layers is not None:
        chosen = _in_layers(chosen, layers)
    if not chosen:
        raise ModelError(f"this {model.config.model_type} model has no linear layer that LoRA could adapt.")
    last = {name.rpartition(".")[2] for name in chosen}
    # PEFT looks at all modules: a name that a router or the head has too must be given in full.
    exact = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in last} == chosen
    return sorted(last if exact else chosen)


def _in_layers(names: set[str], layers: Sequence[int]) -> set[str]:
    """Keep the names in these decoder layers: the first number in a name is its layer's."""
    by_layer: dict[int, set[str]] = {}
    for name in names:
        number = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if number is not None:
            by_layer.setdefault(number, set()).add(name)
    if not layers or not set(layers) <= by_layer.keys():
        raise ModelError(
            f"lora.layers is {list(layers)}, and the decoder layers that lora.target_modules matches are "
            f"{sorted(by_layer)}. Use some of these, or lora.layers=null for all."
        )
    return set().union(*(by_layer[number] for number in layers))


def refuse_useless_patterns(model: PreTrainedModel, targets: Sequence[str], section: LoraSection) -> None:
    """Refuse patterns that no adapted layer matches, which PEFT would ignore.

    Raises:
        ModelError: names the pattern and the layers that there are.
    """
    adapted = [name for name in linear_layers(model) if any(_is_match(name, target) for target in targets)]
    for key, patterns in (("rank_pattern", section.rank_pattern), ("alpha_pattern", section.alpha_pattern)):
        for pattern in patterns:
            try:
                # As PEFT matches them (peft.utils.get_pattern_key).
                is_used = any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted)
            except re.error as error:
                raise ModelError(
                    f"lora.{key}: {pattern} is neither a layer's name nor a regular expression ({error})."
                ) from error
            if not is_used:
                raise _no_match(key, pattern, "adapted layer", model, adapted)


def refuse_modules_to_save(model: PreTrainedModel, targets: Sequence[str], names: Sequence[str]) -> None:
    """Refuse names that match no layer, which PEFT would ignore, and layers that are adapted or hold others.

    Raises:
        ModelError: names the layers that there are.
    """
    layers = {name for name, layer in model.named_modules() if not [*layer.children()] and [*layer.parameters()]}
    free = [name for name in layers if not any(_is_match(name, target) for target in targets)]
    for name in names:
        if name not in {layer.rpartition(".")[2] for layer in free}:
            raise _no_match("modules_to_save", name, "layer that LoRA leaves as it is", model, free)


def _no_match(key: str, pattern: str, layer: str, model: PreTrainedModel, names: Iterable[str]) -> ModelError:
    there = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
    return ModelError(
        f"lora.{key}: {pattern} matches no {layer} of this {model.config.model_type} model. There are: {there}. Use "
        "one of these names; docs/methods.md says which keys take regular expressions."
    )


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the full names of all linear layers except the head.

    GPT-2's transposed layers are included. A model's own subclass is included if it returns only the product, like
    Falcon's, and not if it returns more, like Phi-3.5-MoE's router.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    own_code = type(model).__module__
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D))
        and layer is not head
        and (type(layer).__module__ != own_code or _returns_product(layer))
    ]


def has_transposed_targets(model: PreTrainedModel, targets: list[str]) -> bool:
    """Return whether the layers store their weights transposed, like GPT-2's. PEFT's configuration must say so."""
    from transformers.pytorch_utils import Conv1D

    adapted = [layer for name, layer in model.named_modules() if any(_is_match(name, target) for target in targets)]
    return bool(adapted) and all(isinstance(layer, Conv1D) for layer in adapted)


def refuse_foreign_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Refuse an adapter with layers that the model lacks. PEFT's own error would name no cause.

    Raises:
        ModelError: names the layers of both.
    """
    try:
        record = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError):
        return  # PEFT says what is wrong with the file
    if not isinstance(record, dict):
        return
    _refuse_unstored_rank(record, folder)
    targets = record.get("target_modules")
    if not isinstance(targets, list):
        return
    there = linear_layers(model)
    missing = sorted(target for target in targets if not any(_is_match(name, target) for name in there))
    if missing:
        short = sorted({name.rpartition(".")[2] for name in there})
        raise ModelError(
            f"the adapter in {folder} has layers that this {model.config.model_type} model lacks: "
            f"{', '.join(missing)}. The model has: {', '.join(short)}. Give the model that the adapter was trained on."
        )


def _refuse_unstored_rank(record: Mapping[str, Any], folder: Path) -> None:
    """Refuse a rank that no tensor of the adapter has: PEFT would first allocate layers of that rank."""
    pattern = record.get("rank_pattern")
    ranks = [record.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    rank = max((rank for rank in ranks if isinstance(rank, int)), default=0)
    try:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            largest = max((size for name in file.keys() for size in file.get_slice(name).get_shape()), default=0)  # noqa: SIM118
    except (OSError, SafetensorError):
        return  # PEFT says what is wrong with the file
    if rank > largest:
        raise ModelError(
            f"the adapter in {folder} is damaged: adapter_config.json says rank {rank:,}, but the largest dimension "
            f"of its tensors is {largest:,}. Use an undamaged copy."
        )


def _returns_product(layer: Any) -> bool:
    with torch.no_grad():
        return isinstance(layer(layer.weight.new_zeros(1, layer.in_features)), torch.Tensor)


def _log_experts(model: PreTrainedModel) -> None:
    """Log that `all linear layers` leaves out the experts, whose weights are one tensor over all experts."""
    inside = [p.numel() for p in model.parameters() if p.ndim == 3]
    if inside:
        _log.info("lora.target_modules=auto leaves the experts as they are: %s parameters", f"{sum(inside):,}")


def _is_match(name: str, pattern: str) -> bool:
    if name == pattern or name.endswith(f".{pattern}"):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ModelError(
            f"lora.target_modules: {pattern} is neither a layer's name nor a regular expression ({error})."
        ) from error
