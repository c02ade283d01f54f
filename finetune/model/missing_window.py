"""Refuse a model without a sliding window if its class in transformers needs one."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from finetune.errors import ModelError
from finetune.model.shrunken import random_model, shrunken_config


def refuse_missing_window(config: Any, name: str) -> None:
    """Refuse a configuration with `sliding_window: null` if a tiny model of it fails in transformers.

    Some classes build the mask of sliding layers even if no layer uses it. The engine would train such a model, but
    nothing else could compute the result. Other errors of the tiny model are left to the run.

    Raises:
        ModelError: says what to set in config.json.
    """
    if getattr(config, "sliding_window", 0) is not None or not getattr(config, "layer_types", None):
        return
    why = ""
    with suppress(Exception):  # of any class of transformers
        model = random_model(shrunken_config(config))
        try:
            with torch.no_grad():
                model(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=False)
        except ValueError as error:
            why = str(error)
    if "sliding_window" in why:
        raise ModelError(
            f"{name} has no sliding window (sliding_window is null), and transformers' own {config.model_type} class "
            "computes no model without one, so the result could not be merged or served. In its config.json, set "
            f'"sliding_window": {config.max_position_embeddings}: a window as long as the context hides no token.'
        )
