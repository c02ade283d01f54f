"""Find the layers of a model that LoRA adapts."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from finetune.data.rendering import match_patterns
from finetune.errors import ConfigError, ModelError
from finetune.model.unsupported import memory_of_machine
from finetune.units import format_bytes

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from finetune.config.schema import LoraSection

_MOST_SHOWN = 60
FORM_OF_PATTERNS = r"(.*\.)?({})$"
"""The regular expression that PEFT makes of a key in `rank_pattern` and `alpha_pattern`."""
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
        # All experts together are one tensor of three dimensions. So is the weight of a convolution.
        layers_but_conv = (layer for layer in model.modules() if not isinstance(layer, nn.Conv1d))
        in_experts = sum(p.numel() for layer in layers_but_conv for p in layer.parameters(False) if p.ndim == 3)
        if in_experts:
            _log.info("lora.target_modules=auto leaves the experts as they are: %s parameters", f"{in_experts:,}")
    else:
        matches = match_names("lora.target_modules", wish, linear)
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
    adapted = sorted(_names_of(targets, linear_layers(model)))
    for key, patterns in (("rank_pattern", section.rank_pattern), ("alpha_pattern", section.alpha_pattern)):
        for pattern, names in match_names(f"lora.{key}", list(patterns), adapted, FORM_OF_PATTERNS).items():
            if not names:
                raise _no_match(key, pattern, "adapted layer", model, adapted)


def refuse_modules_to_save(model: PreTrainedModel, targets: Sequence[str], names: Sequence[str]) -> None:
    """Refuse names that match no layer, which PEFT would ignore, and layers that are adapted or hold others.

    Raises:
        ModelError: names the layers that there are.
    """
    layers = {name for name, layer in model.named_modules() if not [*layer.children()] and [*layer.parameters()]}
    free = layers - _names_of(targets, layers)
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

    layers = dict(model.named_modules())
    return {isinstance(layers[name], Conv1D) for name in _names_of(targets, layers)} == {True}


def refuse_ranks_that_cannot_fit(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuse a new adapter that has more weights than this machine has memory for, before PEFT allocates them.

    Raises:
        ConfigError: names the highest rank.
    """
    memory, needed = memory_of_machine(), 4 * parameters_of_adapter(config, model)
    if needed > memory and torch.get_default_device().type != "meta":
        raise ConfigError(
            f"lora.r: the highest rank is {highest_rank(config):,}, so the adapter alone would take "
            f"{format_bytes(needed)}, but this machine has {format_bytes(memory)} of main memory, swap included. Lower "
            "lora.r or lora.rank_pattern."
        )


def parameters_of_adapter(config: Any, model: PreTrainedModel) -> int:
    """Count the parameters of the LoRA layers that a configuration of PEFT's describes. Nothing is built."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    ranks, described = config.rank_pattern or {}, 0
    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim > 1 and check_target_module_exists(config, name):
            rows = getattr(layer, "out_features", len(weight))  # weights in 4 bits are packed
            columns = getattr(layer, "in_features", weight[0].numel())
            described += ranks.get(get_pattern_key(list(ranks), name), config.r) * (rows + columns)
    return described


def highest_rank(config: Any) -> int:
    """Return the highest rank of any layer that a configuration of PEFT's describes."""
    return int(max([config.r, *(config.rank_pattern or {}).values()]))


def _returns_product(layer: Any) -> bool:
    with torch.no_grad():
        return isinstance(layer(layer.weight.new_zeros(1, layer.in_features)), torch.Tensor)


def _names_of(targets: Sequence[str], names: Collection[str]) -> set[str]:
    """Return the names that one of these targets matches."""
    return set[str]().union(*match_names("lora.target_modules", targets, list(names)).values())


def match_names(source: str, patterns: Sequence[str], names: Sequence[str], form: str = "{}") -> dict[str, set[str]]:
    """Return the names that each pattern matches: as a regular expression in this form, or as their last components.

    Raises:
        ModelError: a pattern is no regular expression.
        ConfigError: they take too long.
    """
    try:
        hits = match_patterns(patterns, names, form=form, name=source)
    except (re.error, RecursionError, OverflowError) as error:
        formed = getattr(error, "pattern", "")
        pattern = next((pattern for pattern in patterns if form.replace("{}", pattern) == formed), patterns[0])
        raise ModelError(
            f"{source}: {pattern[:_MOST_SHOWN]} is neither a layer's name nor a regular expression ({error})."
        ) from error
    return {
        pattern: {name for name, is_hit in zip(names, row, strict=True) if is_hit or f".{name}".endswith(f".{pattern}")}
        for pattern, row in zip(patterns, hits, strict=True)
    }
