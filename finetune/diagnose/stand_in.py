"""Write a tiny random model of the same family as a real model, for `finetune rehearse`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from finetune.model.base import build_base_model, count_parameters, read_generation_config, read_model_config
from finetune.model.from_hub import with_sizes_here
from finetune.units import ceil_div, counted

if TYPE_CHECKING:
    from finetune.config.schema import ModelSection

HEAD_SIZE = 16
_LEAST_HIDDEN, _LEAST_LAYERS, _MOST_EXPERTS = 64, 2, 4


def write_stand_in(section: ModelSection, folder: Path, *, seed: int, least_width: int = 0) -> str:
    """Write a tiny random model into a folder that a rehearsal uses as `model.path`, and return its description.

    The tiny model keeps the vocabulary, positions, window, tied embeddings, dtype, stop ids, ratio of heads to
    key-value heads and layer names of the real model.

    Args:
        section: describes the real model.
        folder: is created.
        seed: of the random weights.
        least_width: the fewest inputs and outputs of a layer. PiSSA needs as many as its rank.

    Raises:
        ModelError: there is no such model, or its sizes can neither be read nor are shipped with finetune.
    """
    sized, why_shipped = with_sizes_here(section)
    real = read_model_config(sized)
    keys = shrink(real.to_dict(), least_width=least_width)
    torch.manual_seed(seed)
    model: Any = build_base_model(section.model_copy(update={"init": "random", "config": keys}))
    model.config.use_cache = True
    generation_config = read_generation_config(sized) if sized.config is None else None
    model.generation_config.eos_token_id = getattr(generation_config or real, "eos_token_id", None)
    model.to(real.dtype or torch.float32).save_pretrained(folder)
    num_parameters = count_parameters(model)[1]
    layers = counted(keys["num_hidden_layers"], "layer")
    sizes = f"{layers}, hidden size {keys['hidden_size']}, {num_parameters:,} parameters"
    return f"{real.model_type}, {sizes}" + (f"; {why_shipped}" if why_shipped else "")


def shrink(keys: Mapping[str, Any], *, least_width: int = 0) -> dict[str, Any]:
    """Return the keys of a config.json with small sizes and one layer of each layer type, at least two layers."""
    depth, heads = keys["num_hidden_layers"], keys["num_attention_heads"]
    ratio = max(1, heads // (keys.get("num_key_value_heads") or heads))
    # Round up, so that the hidden size is at least _LEAST_HIDDEN, and the keys' width at least least_width.
    key_value_heads = max(2, ceil_div(_LEAST_HIDDEN, ratio * HEAD_SIZE), ceil_div(least_width, HEAD_SIZE))
    hidden_size = ratio * key_value_heads * HEAD_SIZE
    by_layer = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == depth}
    layer_types = list(zip(*by_layer.values(), strict=True)) or [()] * depth
    first_of_type = sorted(layer_types.index(layer_type) for layer_type in set(layer_types))
    others = [layer for layer in range(depth) if layer not in first_of_type]
    layers = sorted(first_of_type + others[: max(0, _LEAST_LAYERS - len(first_of_type))])
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": ratio * key_value_heads,
        "num_key_value_heads": key_value_heads,
        **{key: [value[layer] for layer in layers] for key, value in by_layer.items()},
    }
    if keys.get("head_dim") is not None:
        sizes["head_dim"] = HEAD_SIZE
    if keys.get("num_local_experts"):
        sizes["num_local_experts"] = min(_MOST_EXPERTS, keys["num_local_experts"])
    ropes = {name: keys[name] for name in ("rope_parameters", "rope_scaling") if keys.get(name)}
    partial = [each.get("partial_rotary_factor") for each in (keys, *ropes.values())]
    num_pairs = int(HEAD_SIZE * next(filter(None, partial), 1.0)) // 2
    return {**keys, **sizes, **{name: _sample_factors(rope, num_pairs) for name, rope in ropes.items()}}


def _sample_factors(rope: Mapping[str, Any], num_pairs: int) -> dict[str, Any]:
    """Sample LongRoPE's factors evenly: one for each pair of rotated dimensions of a head."""
    return {
        key: [value[place * len(value) // num_pairs] for place in range(num_pairs)]
        if isinstance(value, list)
        else value
        for key, value in rope.items()
    }
