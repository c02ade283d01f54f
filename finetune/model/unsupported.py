"""Refuse models by their config.json, before anything is built from it or any weight is read.

For an unknown model type transformers says "unrecognized model type, set trust_remote_code", which does not help, and a
type that it knows may still train something unintended. Sizes may ask for more memory than there is. All are refused
here with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import ModelError
from finetune.limits import irregular_files, read_regular
from finetune.units import name_first

_REFUSED = {
    ("phi4mm", "phi4_multimodal"): "Phi-4-multimodal is not supported: it takes images and sound through encoders and "
    "adapters of its own, which training on text alone would break. For text take model=phi4_mini "
    "(microsoft/Phi-4-mini-instruct), the same decoder without them",
    ("phi3_v",): "Phi-3-vision and Phi-3.5-vision are not supported: they take images, and transformers has no class "
    "of its own for them. For text take model=phi3_5_mini",
    ("phi3small", "phi3_small"): "Phi-3-small is not supported: its block-sparse attention exists as remote code for "
    "CUDA alone, and transformers has no class of its own for it. Take a model of similar size: model=phi3_5_mini, "
    "model=phi4",
    ("phi4-siglip", "phi4_siglip"): "Phi-4-reasoning-vision is not supported: it takes images through an encoder of "
    "its own, and transformers has no class of its own for it. For text take model=phi4_reasoning",
    ("phi4flash",): "Phi-4-mini-flash is not supported: its state-space layers exist as remote code alone. Take "
    "model=phi4_mini_reasoning or model=phi4_mini",
    ("phi-msft", "mixformer"): "this is the layout of phi-2's first upload, whose layers have other names (mixer.Wqkv "
    "and the like). Take today's microsoft/phi-2, which transformers reads with a class of its own: model=phi2",
    ("slimmoe",): "Phi-mini-MoE and Phi-tiny-MoE are not supported: they call themselves phimoe, but their experts "
    "have a layout that only their own remote code reads. Take model=phi3_5_moe or model=phi4_mini",
    ("use_bidirectional_attention",): "its tokens see later tokens (use_bidirectional_attention in config.json), so it "
    "would learn to copy them. Such models compute embeddings. Take one that predicts the next token",
}
"""By a part of `model_type`, or of a file name in `auto_map`, or a key that is true; as of transformers 5.23."""

_PHI_BY_NAME = re.compile(r"(.*[-_.])?phi[-_.]?\d", re.IGNORECASE)
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


def refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that is known not to work by the content of its config.json, whatever `trust_remote_code` says.

    Raises:
        ModelError: names a model to use instead.
    """
    true_keys = [key for key, value in config.items() if value is True]
    names = " ".join(map(str, [config.get("model_type"), *(config.get("auto_map") or {}).values(), *true_keys]))
    reason = next((reason for parts, reason in _REFUSED.items() if any(part in names for part in parts)), None)
    if reason is not None:
        raise ModelError(f"model.path is {name}: {reason}.")


def describe_split_copy(config: Mapping[str, Any], name: str) -> str | None:
    """Return a warning for a Phi model that was rewritten as another architecture; None for any other model."""
    if config.get("model_type") in ("llama", "mistral") and _PHI_BY_NAME.match(name.rstrip("/").rpartition("/")[2]):
        return (
            f"{name} is a copy of a Phi model with split layers (a {config['model_type']} model: q_proj, k_proj, "
            "v_proj, gate_proj, up_proj). It trains as it is, but an adapter trained on it does not fit Microsoft's "
            "own files, whose layers are fused (qkv_proj, gate_up_proj)"
        )
    return None


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
    """Refuse a folder by the types of its files, and by its config.json, see `refuse_oversized`.

    A file that cannot be read is left to its reader. Raises the errors of `refuse_irregular_folder`.
    """
    refuse_irregular_folder(Path(folder))
    with suppress(OSError, ValueError, RecursionError):
        keys = json.loads(read_regular(Path(folder) / "config.json", follows_links=True))
        refuse_oversized(keys if isinstance(keys, dict) else {}, str(folder))


def refuse_irregular_folder(folder: Path) -> None:
    """Refuse the folder of a model, a tokenizer or an adapter if a library that reads it might never return.

    Raises:
        ModelError: names each FIFO, device, socket or too large file. Links to regular files are accepted.
    """
    if folder.is_dir() and (problems := irregular_files(folder, follows_links=True)):
        raise ModelError(
            f"{folder} is refused before anything in it is read: {name_first(problems, 3, separator='; ')}. Put the "
            "files of the model there, or give another folder."
        )


def memory_of_machine() -> int:
    """Return the bytes of main memory and swap."""
    return psutil.virtual_memory().total + psutil.swap_memory().total


def estimate_parameters(keys: Mapping[str, Any]) -> float:
    """Estimate the parameters of a decoder from the numbers in its config.json: rather too many than too few.

    Sum 2 * hidden for each vocabulary entry, hidden for each position, and for each layer q, k, v and o of the
    attention and three matrices of the MLP for each expert.
    """
    size = {name: next(filter(None, (_number(keys.get(key)) for key in names)), 0.0) for name, names in _SIZES.items()}
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


def _too_large(name: str, actual: str, expected: str) -> ModelError:
    return ModelError(
        f"the sizes of {name} are refused before anything is built: {actual} in its config.json; expected {expected}. "
        "Correct config.json, or give another model in model.path."
    )
