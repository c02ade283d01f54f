"""Decide which changed keys change the curve of a resumed run. The schema says for each key when it does."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.config.schema import Config


def effects_that_count(before: Config, now: Config, *, has_same_rows: bool) -> set[str]:
    """Return the values of `OnResume.matters` that apply to two configurations. Unknown rows count as changed."""
    sides = (before, now)
    has_adapter = any(side.training.method == "lora" for side in sides)
    # A rate that is constant after a warm-up of a fixed length does not depend on the end of the run.
    is_rate_scaled = all(side.optim.schedule != "constant" or 0 < side.optim.warmup_steps < 1 for side in sides)
    has_max_steps = all(side.training.max_steps is not None for side in sides)
    counts = {
        "always": True,
        "rows": not has_same_rows,
        "adapter": has_adapter,
        "noise": any(side.masks_follow_microbatches for side in sides),
        "steps": is_rate_scaled,
        "epochs": is_rate_scaled and not has_max_steps,
    }
    return {name for name, holds in counts.items() if holds}


def is_allowed(key: str, allowed: Sequence[str]) -> bool:
    """Return whether `resume.allow` names a key or its section."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed)
