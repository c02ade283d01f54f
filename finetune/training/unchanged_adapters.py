"""Refuse adapters that do not train. Adapters of experts that no token has reached are only warned of."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from finetune.errors import RunFailedError
from finetune.units import name_first

_log = logging.getLogger(__name__)
_EXPERT = re.compile(r"(.*experts?)\.[0-9]+(\..*)?")
"""A layer of one expert, as model classes name them: `model.layers.0.mlp.experts.3.up_proj`."""
_MAX_SHOWN = 5


def refuse_unchanged(unchanged: Collection[str], adapted: Collection[str], *, step: int, highest_rate: float) -> None:
    """Raise RunFailedError if adapted layers that have not changed since the start should have changed until `step`.

    `adapted` has the names of all layers with an adapter. `highest_rate` is the highest learning rate so far.
    """
    changed = [name for name in adapted if name not in unchanged]
    idle_experts = [name for name in unchanged if _is_idle_expert(name, changed)]
    if idle_experts:
        _log.warning(
            "no token has reached the adapters of %s until step %d: they are not trained yet",
            name_first(sorted(idle_experts), _MAX_SHOWN),
            step,
        )
    untrained = [name for name in unchanged if name not in idle_experts]
    if untrained:
        raise RunFailedError(
            f"step {step}: {len(untrained)} of {len(adapted)} adapters have not changed since the start: "
            f"{name_first(untrained, _MAX_SHOWN)}. Expected: each of them trains. Either the model's forward does not "
            "call these layers, or it detaches their results, or a hook or a script freezes them, or the learning rate "
            f"is too small (the highest so far was {highest_rate:g}). Correct that, or leave these layers out of "
            "lora.target_modules."
        )


def _is_idle_expert(name: str, changed: Collection[str]) -> bool:
    """Return whether a layer belongs to an expert, and the same layer of another expert has changed."""
    match = _EXPERT.fullmatch(name)
    others = (_EXPERT.fullmatch(other) for other in changed)
    return match is not None and any(other and other.groups() == match.groups() for other in others)
