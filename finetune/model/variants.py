"""Recognise models that are known not to work by their configuration, before any weight is read.

For an unknown model type transformers says "unrecognized model type, set trust_remote_code", which does not help, and a
type that it knows may still train something unintended. Both are refused here with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.errors import ModelError

_MULTIMODAL = (
    "it takes images and sound through encoders and adapters of its own, which training on text alone would break. "
    "For text take model=phi4_mini (microsoft/Phi-4-mini-instruct), the same decoder without them"
)
_REASONING_VISION = (
    "Phi-4-reasoning-vision is not supported: it takes images through an encoder of its own, and transformers has no "
    "class of its own for it. For text take model=phi4_reasoning"
)
_FIRST_PHI_2 = (
    "this is the layout of phi-2's first upload, whose layers have other names (mixer.Wqkv and the like). Take today's "
    "microsoft/phi-2, which transformers reads with a class of its own: model=phi2"
)
_REFUSED_TYPES = {
    "phi4mm": f"Phi-4-multimodal is not supported: {_MULTIMODAL}",
    "phi4_multimodal": f"Phi-4-multimodal is not supported: {_MULTIMODAL}",
    "phi3_v": "Phi-3-vision and Phi-3.5-vision are not supported: they take images, and transformers has no class of "
    "its own for them. For text take model=phi3_5_mini",
    "phi3small": "Phi-3-small is not supported: its block-sparse attention exists as remote code for CUDA alone, and "
    "transformers has no class of its own for it. Take a model of similar size: model=phi3_5_mini, model=phi4",
    "phi4-siglip": _REASONING_VISION,
    "phi4_siglip": _REASONING_VISION,
    "phi4flash": "Phi-4-mini-flash is not supported: its state-space layers exist as remote code alone. Take "
    "model=phi4_mini_reasoning or model=phi4_mini",
    "phi-msft": _FIRST_PHI_2,
    "mixformer-sequential": _FIRST_PHI_2,
}
"""By `model_type` in config.json, as of transformers 5.23."""

_REFUSED_CODE = {
    "phi3_small": _REFUSED_TYPES["phi3small"],
    "phi4mm": _REFUSED_TYPES["phi4mm"],
    "phi3_v": _REFUSED_TYPES["phi3_v"],
    "phi4flash": _REFUSED_TYPES["phi4flash"],
    "mixformer": _FIRST_PHI_2,
    "slimmoe": "Phi-mini-MoE and Phi-tiny-MoE are not supported: they call themselves phimoe, but their experts have a "
    "layout that only their own remote code reads. Take model=phi3_5_moe or model=phi4_mini",
}
"""By a part of a file name in `auto_map`."""

_PHI_BY_NAME = re.compile(r"(.*[-_.])?phi[-_.]?\d", re.IGNORECASE)
_SPLIT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_FUSED = ("qkv_proj", "gate_up_proj")


def refuse_unsupported(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model that is known not to work by the content of its config.json, whatever `trust_remote_code` says.

    Raises:
        ModelError: names a model to use instead.
    """
    code = " ".join(map(str, (config.get("auto_map") or {}).values()))
    by_code = (why for part, why in _REFUSED_CODE.items() if part in code)
    why = _REFUSED_TYPES.get(str(config.get("model_type"))) or next(by_code, None)
    if why is not None:
        raise ModelError(f"model.path is {name}: {why}.")


def describe_split_copy(config: Mapping[str, Any], name: str) -> str | None:
    """Return a warning for a Phi model that was rewritten as another architecture; None for any other model."""
    if config.get("model_type") in ("llama", "mistral") and _PHI_BY_NAME.match(name.rstrip("/").rpartition("/")[2]):
        return (
            f"{name} is a copy of a Phi model with split layers (a {config['model_type']} model: q_proj, k_proj, "
            "v_proj, gate_proj, up_proj). It trains as it is, but an adapter trained on it does not fit Microsoft's "
            "own files, whose layers are fused (qkv_proj, gate_up_proj)"
        )
    return None


def explain_missing(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Explain by the names of weights why they do not fit their config.json; empty if the names do not show it."""
    if _any_layer(missing, _FUSED) and _any_layer(unexpected, _SPLIT):
        return (
            " They are those of a copy with split layers (q_proj, k_proj, v_proj, gate_proj, up_proj), but its "
            "config.json says phi3, whose layers are fused. Take Microsoft's own files, or a copy whose config.json "
            "says llama."
        )
    return ""


def explain_foreign_targets(targets: Iterable[str], there: Iterable[str]) -> str:
    """Explain by the names of layers why the model lacks an adapter's; empty if the names do not show it."""
    names, present = set(targets), set(there)
    if names & set(_SPLIT) and present & set(_FUSED):
        return " It was trained on a copy of the model with split layers: give that copy in model.path."
    if names & set(_FUSED) and present & set(_SPLIT):
        return " It was trained on a model with fused layers, and this is a copy with split ones: give Microsoft's own."
    return ""


def _any_layer(names: Iterable[str], layers: Iterable[str]) -> bool:
    wanted = tuple(f".{layer}." for layer in layers)
    return any(part in name for name in names for part in wanted)
