"""The forward pass of a run: the engine's on packed rows, or the model's own on padded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from finetune.data.batches import Collate, packer, pad
from finetune.engine.supported import own_layers, unsupported_reason
from finetune.fallbacks import Fallback

if TYPE_CHECKING:
    from finetune.config.schema import TrainingSection
    from finetune.distributed.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward pass that a run uses."""

    collate: Collate
    """Makes a micro-batch of rows; the loss takes either kind of micro-batch."""
    why_not_engine: str | None = None
    """The reason to pad rows for the model's own forward; None where the engine computes them packed."""
    called_layers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the linear layers that the engine calls as PEFT made them, by reason."""


def choose_forward(section: TrainingSection, model: torch.nn.Module) -> Forward:
    """Choose the forward of a model for this process alone, without communication and without recording a fallback.

    Args:
        section: `kernels`, `packing` and `share_prefixes`.
        model: a transformers causal language model or a PEFT model around one, on any device.
    """
    if section.kernels == "reference":
        return Forward(collate=pad, why_not_engine="training.kernels=reference")
    reason = unsupported_reason(model)
    if reason is not None:
        return Forward(collate=pad, why_not_engine=reason)
    collate = packer(share_prefixes=section.packing and section.share_prefixes)
    return Forward(collate=collate, called_layers=own_layers(model))


def agree_on_forward(runtime: Runtime, section: TrainingSection, model: torch.nn.Module) -> Forward:
    """Choose one forward for all ranks and record any fallback. The rows of a micro-batch depend on the choice.

    Collective: every rank.

    Args:
        runtime: records the fallback.
        section: see `choose_forward`.
        model: placed.

    Raises:
        ConfigError: the engine does not know the model, and the run is strict.
    """
    forward = choose_forward(section, model)
    if section.kernels == "reference":
        return forward
    reason = forward.why_not_engine
    num_others = int(runtime.sum([float(reason is not None)])[0]) - (reason is not None)
    if reason is None and num_others:
        reason = f"{num_others} of {runtime.world_size} ranks cannot use it; their own logs say why"
    if reason is not None:
        wanted, used = "the engine's own forward", "transformers' own on padded rows"
        runtime.fallbacks.take(Fallback(what="training.kernels", wanted=wanted, used=used, why=reason))
        return Forward(collate=pad, why_not_engine=reason)
    if forward.called_layers:
        wanted, used = "the engine's own layers", "layers as PEFT made them for some"
        why = "; ".join(f"{len(names)} linear layers are {kind}" for kind, names in forward.called_layers.items())
        runtime.fallbacks.take(Fallback(what="training.kernels", wanted=wanted, used=used, why=why))
    return forward
