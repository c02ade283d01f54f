"""Shrink a model: a configuration of the same class with the same types of layers, and random weights for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.decoder import family_of
from finetune.units import ceil_div

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HEAD_SIZE = 16
VOCABULARY = 96
WINDOW = 6
"""The sliding window of `shrunken_config`. It is shorter than the rows, so that it matters."""
_ORIGINAL, _WHOLE = "original_max_position_embeddings", "max_position_embeddings"
_SHORT_CONTEXT, _LEAST_CONTEXT = 16, 512
"""The original context, and the fewest positions in all: rows of the shipped data must fit."""
_LEAST_HIDDEN, _LEAST_LAYERS = 64, 2
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ROPES = ("rope_parameters", "rope_scaling")
_MOST = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "linear_num_key_heads"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "mamba_d_head", "mamba_d_state"), HEAD_SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_SIZE),
    **{"q_lora_rank": 24, "qk_rope_head_dim": HEAD_SIZE // 2, "qk_head_dim": HEAD_SIZE * 3 // 2},
    "mamba_chunk_size": 8,
}
"""The largest values of further sizes, as the configurations of transformers name them."""


def in_common_names(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of a configuration by the names that most classes use: GPT-2's n_layer is num_hidden_layers."""
    common = {own: name for name, own in config.attribute_map.items()}
    return {common.get(key, key): value for key, value in config.to_dict().items()}


def in_own_names(config: PretrainedConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys by the names that the class of this configuration uses."""
    return {config.attribute_map.get(key, key): value for key, value in keys.items()}


def shrink(keys: Mapping[str, Any], *, least_width: int = 0) -> dict[str, Any]:
    """Return keys `in_common_names` with small sizes and one layer of each layer type, at least two layers.

    The vocabulary, positions and window are kept. `least_width` is the fewest inputs and outputs of a linear layer.
    """
    depth, heads = keys["num_hidden_layers"], keys["num_attention_heads"]
    ratio = max(1, heads // (keys.get("num_key_value_heads") or heads))
    old_head_size = keys.get("head_dim") or keys["hidden_size"] // heads
    surplus = old_head_size * heads - keys["hidden_size"]  # of the queries over the hidden states
    head_size = HEAD_SIZE if surplus == 0 else HEAD_SIZE * 2 if surplus > 0 else HEAD_SIZE // 2
    # Round up, so that the hidden size is at least _LEAST_HIDDEN, and the keys' width at least least_width.
    narrower = min(head_size, HEAD_SIZE)
    key_value_heads = max(2, ceil_div(_LEAST_HIDDEN, ratio * HEAD_SIZE), ceil_div(least_width, narrower))
    hidden_size = ratio * key_value_heads * HEAD_SIZE
    lists = {key: value for key, value in keys.items() if isinstance(value, list) and len(value) == depth}
    by_layer = {key: value for key, value in lists.items() if value != list(range(depth))}  # not a list of layers
    layer_types = list(zip(*by_layer.values(), strict=True)) or [()] * depth
    first_of_type = sorted(layer_types.index(layer_type) for layer_type in set(layer_types))
    others = [layer for layer in range(depth) if layer not in first_of_type]
    layers = sorted(first_of_type + others[: max(0, _LEAST_LAYERS - len(first_of_type))])
    sizes = {
        **{key: min(most, keys[key]) for key, most in _MOST.items() if keys.get(key)},
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": ratio * key_value_heads,
        "num_key_value_heads": key_value_heads,
        **{key: list(range(len(layers))) for key in lists.keys() - by_layer.keys()},
        **{key: [value[layer] for layer in layers] for key, value in by_layer.items()},
    }
    if keys.get("head_dim") is not None:
        sizes["head_dim"] = head_size = sizes.get("qk_rope_head_dim", head_size)
    if keys.get("mamba_n_heads"):
        sizes["mamba_n_heads"] = keys["mamba_expand"] * hidden_size // sizes["mamba_d_head"]
    if keys.get("query_pre_attn_scalar"):  # a number of dimensions
        sizes["query_pre_attn_scalar"] = round(keys["query_pre_attn_scalar"] * head_size / old_head_size)
    if 0 < (keys.get("attention_multiplier") or 1) < 1:  # a fraction of the number of dimensions
        sizes["attention_multiplier"] = keys["attention_multiplier"] * old_head_size / head_size
    ropes = {name: keys[name] for name in _ROPES if keys.get(name)}
    partial = [each.get("partial_rotary_factor") for each in (keys, *ropes.values())]
    num_pairs = int(head_size * next(filter(None, partial), 1.0)) // 2
    return {**keys, **sizes, **{name: _sample_factors(rope, num_pairs) for name, rope in ropes.items()}}


def shrunken_config(config: PretrainedConfig, vocab_size: int = VOCABULARY) -> PretrainedConfig:
    """Return a tiny configuration of the same class, with the same types of layers and of rotary positions.

    Beside the sizes that `shrink` changes, the vocabulary and the window are small, and a context after which rotary
    positions change is so short that rows of 30 tokens are longer.
    """
    old = in_common_names(config)
    keys = shrink(old) | {"vocab_size": vocab_size, "dtype": None}
    for key, value in old.items():
        if isinstance(value, int | list) and key.endswith(("_token_id", "_token_index")):
            keys[key] = _IDS.get(key, len(_IDS))
    for key in ("sliding_window", "attention_chunk_size"):
        if old.get(key):
            keys[key] = min(WINDOW, old[key])
    uses_long_factors = family_of(config.model_type).uses_long_factors  # otherwise a longer context is refused
    for name in filter(keys.get, _ROPES if uses_long_factors else ()):
        for rope in (keys[name], *(of_type for of_type in keys[name].values() if isinstance(of_type, dict))):
            is_longrope = "longrope" in (rope.get("rope_type"), rope.get("type"))
            original = rope.get(_ORIGINAL) or old.get(_ORIGINAL)
            if original and is_longrope and rope.get("factor") is None:
                rope["factor"] = old[_WHOLE] / original  # as transformers does
            if original and (is_longrope or "llama_4_scaling_beta" in rope):
                _shorten_context(keys, rope, old, original)
    if keys.get(_WHOLE):
        keys[_WHOLE] = max(keys[_WHOLE], _LEAST_CONTEXT)
    rest = {key: value for key, value in keys.items() if key not in ("model_type", "_name_or_path")}
    return type(config)(**in_own_names(config, rest))


def random_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build a seeded random model in fp32 in which every part changes the loss.

    Matrices are larger than transformers initializes them. Norm weights differ from 1 and biases from 0.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = auto.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 1.6 * config.hidden_size**-0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.config.use_cache = False
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _shorten_context(keys: dict[str, Any], rope: dict[str, Any], old: Mapping[str, Any], original: int) -> None:
    """Make the original context _SHORT_CONTEXT long, also in `keys`, and keep its ratio to the whole context."""
    for each, own in ((keys, old), (rope, dict(rope))):
        each |= {key: own[key] * _SHORT_CONTEXT // original for key in (_ORIGINAL, _WHOLE) if own.get(key)}


def _sample_factors(rope: Mapping[str, Any], num_pairs: int) -> dict[str, Any]:
    """Sample LongRoPE's factors evenly: one for each pair of rotated dimensions of a head.

    `rope` may hold a rotation for each type of layer.
    """
    sampled = dict(rope)
    for key, value in rope.items():
        if isinstance(value, list):
            sampled[key] = [value[place * len(value) // num_pairs] for place in range(num_pairs)]
        elif isinstance(value, dict):
            sampled[key] = _sample_factors(value, num_pairs)
    return sampled
