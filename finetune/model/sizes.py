"""Refuse the sizes of a model by the numbers in its config.json, before anything is built from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.errors import ModelError

MOST_LAYERS = 2_000
"""The most layers of a model, and the most experts of a layer: each may become a module."""
MOST_PARAMETERS = 10**13
_COUNTS_MODULES = re.compile(r"(layers?|experts|blocks)$")
_SIZES = {
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "inner": ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "groups": ("num_key_value_heads",),
    "head": ("head_dim",),
    "rows": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
}


def refuse_oversized(keys: Mapping[str, Any], name: str) -> None:
    """Refuse the content of a config.json that asks for more layers or parameters than any model has.

    Raises:
        ModelError: names the key and its value.
    """
    for part in _parts(keys):
        for key, value in part.items():
            if _COUNTS_MODULES.search(str(key)) and _number(value) > MOST_LAYERS:
                raise _too_large(name, f"{key} is {value:,}", f"at most {MOST_LAYERS:,} layers, or experts in a layer")
        if (count := estimate_parameters(part)) > MOST_PARAMETERS:
            read = [key for names in _SIZES.values() for key in names if _number(part.get(key))]
            sizes = ", ".join(f"{key} {part[key]:,}" for key in sorted(read, key=lambda key: -_number(part[key]))[:3])
            raise _too_large(name, f"{count:.0e} parameters ({sizes})", f"at most {MOST_PARAMETERS:.0e} parameters")


def refuse_oversized_folder(folder: Path | str) -> None:
    """Refuse a folder by its config.json, see `refuse_oversized`. A file that cannot be read is left to its reader."""
    with suppress(OSError, ValueError):
        keys = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        refuse_oversized(keys if isinstance(keys, dict) else {}, str(folder))


def estimate_parameters(keys: Mapping[str, Any]) -> float:
    """Estimate the parameters of a decoder from the numbers in its config.json: rather too many than too few."""
    size = {what: next(filter(None, (_number(keys.get(key)) for key in names)), 0.0) for what, names in _SIZES.items()}
    hidden, heads = size["hidden"], size["heads"]
    head = size["head"] or (hidden / heads if heads else 0.0)
    attention = 2 * hidden * head * (heads + (size["groups"] or heads))
    mlp = 3 * hidden * (size["inner"] or 4 * hidden) * max(1.0, size["experts"])
    return hidden * (2 * size["rows"] + size["positions"]) + size["layers"] * (attention + mlp)


def _parts(keys: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a configuration and the configurations inside it, of its text model for example."""
    yield keys
    for value in keys.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


def _number(value: Any) -> float:
    """Return a positive number, and 0 for everything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return float(min(value, 1e300)) if is_number else 0.0


def _too_large(name: str, found: str, expected: str) -> ModelError:
    return ModelError(
        f"the sizes of {name} are refused before anything is built: {found} in its config.json; expected {expected}. "
        "Correct config.json, or give another model in model.path."
    )
