"""Write a tiny random model of the same family as a real model, for `finetune rehearse`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.model.base import build_base_model, count_parameters, read_generation_config, read_model_config
from finetune.model.published import with_sizes_here

if TYPE_CHECKING:
    from finetune.config.schema import ModelSection

HEAD_SIZE = 16
_LEAST_HIDDEN, _LEAST_LAYERS, _MOST_EXPERTS = 64, 2, 4


def write_stand_in(section: ModelSection, folder: Path, *, seed: int, least_width: int = 0) -> str:
    """Write a tiny random model into a folder that a rehearsal uses as `model.path`, and return its description.

    The tiny model keeps the vocabulary, positions, window, tied embeddings, dtype, ratio of heads to key-value heads
    and layer names of the real model, with a layer of each layer type. LongRoPE factors are sampled for smaller heads.

    No layer has fewer inputs or outputs than `least_width`: PiSSA needs as many as its rank.

    Raises:
        ModelError: there is no such model, or its sizes can neither be read nor are shipped with finetune.
    """
    sized, why = with_sizes_here(section)
    real = read_model_config(sized)
    keys = shrink(real.to_dict(), least_width=least_width)
    torch.manual_seed(seed)
    model: Any = build_base_model(section.model_copy(update={"init": "random", "config": keys}))
    model.config.use_cache = True
    model.generation_config.eos_token_id = _ids_that_end(sized, real)
    model.to(real.dtype or torch.float32).save_pretrained(folder)
    count = count_parameters(model)[1]
    sizes = f"{keys['num_hidden_layers']} layers, hidden size {keys['hidden_size']}, {count:,} parameters"
    return f"{real.model_type}, {sizes}" + (f"; {why}" if why else "")


def shrink(keys: Mapping[str, Any], *, least_width: int = 0) -> dict[str, Any]:
    """Return the keys of a config.json with small sizes and few layers; see `write_stand_in`."""
    depth, heads = keys["num_hidden_layers"], keys["num_attention_heads"]
    groups = keys.get("num_key_value_heads") or heads
    ratio = max(1, heads // groups)
    few = max(2, -(-_LEAST_HIDDEN // (ratio * HEAD_SIZE)), -(-least_width // HEAD_SIZE))
    hidden = ratio * few * HEAD_SIZE
    by_layer = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == depth}
    layers = _one_of_each(list(zip(*by_layer.values(), strict=True)) or [()] * depth)
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": ratio * few,
        "num_key_value_heads": few,
        **{key: [value[layer] for layer in layers] for key, value in by_layer.items()},
    }
    if keys.get("head_dim") is not None:
        sizes["head_dim"] = HEAD_SIZE
    if keys.get("num_local_experts"):
        sizes["num_local_experts"] = min(_MOST_EXPERTS, keys["num_local_experts"])
    partial = keys.get("partial_rotary_factor") or _rope_of(keys).get("partial_rotary_factor") or 1.0
    ropes = {
        name: _with_fewer_factors(keys[name], int(HEAD_SIZE * partial) // 2)
        for name in ("rope_parameters", "rope_scaling")
        if keys.get(name)
    }
    return {**keys, **sizes, **ropes}


def _ids_that_end(section: ModelSection, config: Any) -> Any:
    """Return the stop ids of the model's generation_config.json, or without one those of its config.json."""
    found = read_generation_config(section) if section.config is None else None
    return getattr(found or config, "eos_token_id", None)


def _rope_of(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    return keys.get("rope_parameters") or keys.get("rope_scaling") or {}


def _one_of_each(layer_types: list[Any]) -> list[int]:
    """Return the first layer of each layer type, and the next layers until there are two."""
    first = {layer_type: layer for layer, layer_type in reversed(list(enumerate(layer_types)))}
    chosen = set(first.values())
    chosen |= set(
        [layer for layer in range(len(layer_types)) if layer not in chosen][: max(0, _LEAST_LAYERS - len(chosen))]
    )
    return sorted(chosen)


def _with_fewer_factors(rope: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Sample LongRoPE's factors evenly: one for each pair of rotated dimensions of a head."""
    return {
        key: [value[place * len(value) // count] for place in range(count)] if isinstance(value, list) else value
        for key, value in rope.items()
    }
