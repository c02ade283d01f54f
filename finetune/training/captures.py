"""Which runs replay small micro-batches as CUDA graphs, if `training.graphs` asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune.distributed.device import DTYPES
from finetune.engine.attention import prepared_by_the_host
from finetune.engine.attention_cuda import prepare_varlen
from finetune.engine.captured import CapturedMicrobatches
from finetune.engine.replayed import has_rounded_weights
from finetune.engine.supported import called_layers
from finetune.fallbacks import Fallback
from finetune.training.optim import trainable_parameters

if TYPE_CHECKING:
    from finetune.training.objective import Setup


def captured_microbatches(setup: Setup) -> CapturedMicrobatches | None:
    """Return the object that replays small micro-batches of a run. None is a fallback."""

    def take(why: str) -> None:
        wanted, used = "small micro-batches as CUDA graphs", "one launch for each kernel"
        setup.runtime.fallbacks.take(Fallback(what="training.graphs", wanted=wanted, used=used, why=why))

    reason = why_not_captured(setup)
    if reason is not None:
        take(reason)
        return None
    device, autocast = setup.runtime.device, setup.runtime.placement.autocast
    return CapturedMicrobatches(setup.model, setup.loss, trainable_parameters(setup.model), device, autocast, take)


def why_not_captured(setup: Setup) -> str | None:
    """Return the reason why CUDA graphs replay no micro-batch of a run; None if they do."""
    runtime, model, training = setup.runtime, setup.model, setup.config.training
    trained = (name for name, weight in model.named_parameters() if weight.requires_grad)
    dtype, device = DTYPES[runtime.precision], runtime.device
    reasons = {
        f"the device is {device.type}, and only CUDA has graphs": device.type != "cuda",
        "the run does not compute in 16 bits": dtype == torch.float32,
        f"{training.objective} is not captured, only sft": not setup.config.objective.learns_answers,
        "the loss is the script's own": setup.hooks.loss is not None,
        "other weights than LoRA's are trained": not all("lora_" in name for name in trained),
        "several processes shard the weights or use gradient_sync=ddp": runtime.placement.needs_equal_microbatches,
        "gradients are checkpointed": setup.memory.gradient_checkpointing,
        "training.deterministic=true": training.deterministic,
        "training.profile shows every kernel": training.profile > 0,
        "training.neftune_alpha draws noise": training.neftune_alpha > 0,
        "the base is in 4 bits or in fp8": has_rounded_weights(model),
        "the base has dropout of its own": any(
            getattr(model.config, name, 0) for name in ("resid_pdrop", "embd_pdrop")
        ),
        "the engine does not compute all layers": not setup.is_packed or bool(called_layers(model)),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if reason is None and prepared_by_the_host(device, dtype) is not prepare_varlen:
        return "this GPU or this torch has no variable-length flash attention"
    return reason
