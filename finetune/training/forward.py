"""Which forward a run goes through: the engine's on packed rows, or the model's own on padded ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from finetune.data.batches import Collate, packer, pad
from finetune.distributed.runtime import Runtime
from finetune.engine.supported import own_layers, unsupported_reason
from finetune.fallbacks import Fallback

if TYPE_CHECKING:
    from finetune.config.schema import TrainingSection


def choose_collation(runtime: Runtime, section: TrainingSection, model: torch.nn.Module) -> Collate:
    """How rows become micro-batches; the loss takes either kind. That the engine does not know a model is told.

    Collective: every rank. All go one way, since the rows of a micro-batch depend on it.

    Args:
        runtime: takes the fallback.
        section: `kernels`, `packing` and `share_prefixes`.
        model: placed.

    Raises:
        ConfigError: the engine does not know the model, and the run is strict.
    """
    if section.kernels == "reference":
        return pad
    reason = unsupported_reason(model)
    num_others = int(runtime.sum([float(reason is not None)])[0]) - (reason is not None)
    if reason is None and num_others:
        reason = f"{num_others} of {runtime.world_size} ranks cannot use it; their own logs say why"
    if reason is not None:
        wanted, used = "the engine's own forward", "transformers' own on padded rows"
        runtime.fallbacks.take(Fallback(what="training.kernels", wanted=wanted, used=used, why=reason))
        return pad
    own = own_layers(model)
    if own:
        wanted, used = "the engine's own layers", "layers as PEFT made them for some"
        why = "; ".join(f"{len(names)} linear layers are {what}" for what, names in own.items())
        runtime.fallbacks.take(Fallback(what="training.kernels", wanted=wanted, used=used, why=why))
    return packer(share_prefixes=section.packing and section.share_prefixes)
