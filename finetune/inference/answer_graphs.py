"""Decide whether CUDA graphs replay the answers of a run, as `training.graphs` asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.engine.fused import switch_replays
from finetune.fallbacks import Fallback
from finetune.inference.decoding import engine_continues

if TYPE_CHECKING:
    from finetune.config.schema import TrainingSection
    from finetune.distributed.runtime import Runtime


def wants_replays(section: TrainingSection, device_type: str) -> bool:
    """Return whether `training.graphs` asks for replayed answers, and this type of device has graphs."""
    return section.graphs is True and device_type == "cuda" and not section.deterministic


def agree_on_replays(runtime: Runtime, section: TrainingSection, model: Any) -> None:
    """Replay the answers of a placed model until `launch` ends if `training.graphs` asks for it.

    A model, a device or a setting that does not allow it is a fallback.
    """
    if section.graphs is not True:
        return
    if runtime.device.type != "cuda":
        reason: str | None = f"the device is {runtime.device.type}, and only CUDA has graphs"
    elif section.deterministic:
        reason = "training.deterministic=true: CUDA has no running sum with a fixed order, which sampling needs"
    elif runtime.placement.shard_size is not None:
        reason = "the weights are sharded"
    else:
        from finetune.inference.replayed_answers import why_not_replayed

        reason = why_not_replayed(model)
    if reason is not None:
        used = "the engine without graphs" if engine_continues(model) else "transformers' generate"
        runtime.fallbacks.take(
            Fallback(what="training.graphs", wanted="answers replayed as CUDA graphs", used=used, why=reason)
        )
    switch_replays(reason is None)
