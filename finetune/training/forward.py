"""The forward pass of a run: the engine's on packed rows, or the model's own on padded ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import Collate, pad
from finetune.distributed.device import DTYPES
from finetune.engine import products
from finetune.engine.attention import prepared_by_the_host
from finetune.engine.decoder import FAMILIES, bare_model, layer_windows
from finetune.engine.fused import switch_fused, why_not_fused
from finetune.engine.layout import pack
from finetune.engine.products import PROCESSOR, make_room_for_bf16
from finetune.engine.supported import called_layers, unsupported_reason
from finetune.fallbacks import Fallback

if TYPE_CHECKING:
    from finetune.config.schema import TrainingSection
    from finetune.distributed.runtime import Runtime
    from finetune.engine.loss import Choices, LossFunction

_log = logging.getLogger(__name__)
_WIDE = 512
"""The least hidden size of a model for which a run on a CPU mentions bf16."""


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward pass that a run uses."""

    collate: Collate
    """Makes a micro-batch of rows, padded or packed. The loss takes both."""
    why_not_engine: str | None = None
    """Why rows are padded for the model's own forward; None if the engine computes packed rows."""
    called_layers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of the linear layers that the engine calls as PEFT made them, by reason."""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """How a run computes a step, as far as memory depends on it.

    Attributes:
        loss_of: the loss of the run, given how the engine computes packed rows.
        device_type: the type of device to predict for: cpu or cuda.
        dtype: the type in which the run computes.
        is_fused: the engine's functions are fused, so their intermediate tensors are not counted.
        accumulates: a rank has several micro-batches in a step, so a pass adds to gradients that are there already.
        learns: there is a backward pass. Without one, the forward pass runs in evaluation mode, as in a validation.
    """

    loss_of: Callable[[Choices], LossFunction]
    device_type: str
    dtype: torch.dtype = torch.float32
    is_fused: bool = False
    accumulates: bool = True
    learns: bool = True


def choose_forward(
    section: TrainingSection,
    model: torch.nn.Module,
    prepare_attention: Callable[..., Any] | None = None,
    *,
    pads: bool = False,
) -> Forward:
    """Choose the forward of a model for this process alone, without communication and without recording a fallback.

    With `pads`, small micro-batches of an adapter that the engine computes whole are padded, see `wants_padding`.
    """
    if section.kernels == "reference":
        return Forward(collate=pad, why_not_engine="training.kernels=reference")
    if (reason := unsupported_reason(model)) is not None:
        return Forward(collate=pad, why_not_engine=reason)
    called = called_layers(model)
    # Dropout of the base would draw numbers for padding, which would change the masks of all layers.
    draws_for_padding = any(getattr(model.config, name, 0) for name in ("resid_pdrop", "embd_pdrop"))
    collate = partial(
        pack,
        share_prefixes=section.packing and section.share_prefixes,
        to_bucket=pads and not called and not draws_for_padding,
        prepare_attention=prepare_attention,
        windows=layer_windows(model),
    )
    return Forward(collate=collate, called_layers=called)


def wants_padding(section: TrainingSection, device_type: str, dtype: torch.dtype) -> bool:
    """Return whether micro-batches get few sizes: with an adapter in 16 bits on CUDA, if `training.graphs` is true."""
    return section.graphs is True and section.method == "lora" and device_type == "cuda" and dtype != torch.float32


def agree_on_forward(runtime: Runtime, section: TrainingSection, model: torch.nn.Module) -> Forward:
    """Choose one forward for all ranks and record any fallback. The rows of a micro-batch depend on the choice.

    `fused` is applied until `launch` ends. Collective: every rank, with a placed model.
    """
    dtype = DTYPES[runtime.precision]
    pads = wants_padding(section, runtime.device.type, dtype)
    forward = choose_forward(section, model, prepared_by_the_host(runtime.device, dtype), pads=pads)
    if section.kernels == "reference":
        return forward
    reason = forward.why_not_engine
    num_others = int(runtime.collectives.sum([float(reason is not None)])[0]) - (reason is not None)
    if reason is None and num_others:
        reason = f"{num_others} of {runtime.world_size} ranks cannot use it; their own logs say why"
    if reason is not None:
        wanted, used = "the engine's own forward", "transformers' own on padded rows"
        fallback = Fallback(what="training.kernels", wanted=wanted, used=used, why=reason)
        is_slow = runtime.device.type == "cpu" and dtype in products.WIDENED
        fix = ". On this CPU, transformers' forward is much faster with training.precision=fp32" * is_slow
        runtime.fallbacks.take(fallback, warning=f"{fallback}{fix}{_how_to_prove(bare_model(model).config)}")
        return Forward(collate=pad, why_not_engine=reason)
    _record_attention(runtime)
    if runtime.device.type == "cpu" and runtime.precision == "bf16":
        make_room_for_bf16()
    _fuse(runtime, section)
    if forward.called_layers:
        wanted, used = "the engine's own layers", "layers as PEFT made them for some"
        why = "; ".join(f"{len(names)} linear layers are {why}" for why, names in forward.called_layers.items())
        runtime.fallbacks.take(Fallback(what="training.kernels", wanted=wanted, used=used, why=why))
    return forward


def _how_to_prove(config: Any) -> str:
    """Return a sentence about `finetune doctor --model` for a family that the package knows nothing of."""
    command = f"finetune doctor --model {config.name_or_path or config.model_type!r}"
    proves = "losses, resumed runs, two processes, merged models and answers, on a tiny model with the same layers"
    return "" if config.model_type in FAMILIES else f". `{command}` proves in minutes: {proves}"


def _record_attention(runtime: Runtime) -> None:
    """Record that this GPU or this torch lacks the engine's attention for the run's type."""
    if runtime.device.type != "cuda":
        return
    from finetune.engine.attention_cuda import attention_fallback

    if (fallback := attention_fallback(runtime.device, DTYPES[runtime.precision])) is not None:
        wanted, used, why = fallback
        runtime.fallbacks.take(Fallback(what="training.kernels", wanted=wanted, used=used, why=why))


def mention_bf16(runtime: Runtime, model: Any) -> None:
    """Log what bf16 would change, in an fp32 run of a wide model on a CPU that multiplies in bf16."""
    is_fp32_on_cpu = runtime.device.type == "cpu" and runtime.precision == "fp32"
    if is_fp32_on_cpu and PROCESSOR.bf16_products and model.config.hidden_size >= _WIDE:
        _log.info(
            "this CPU multiplies in bf16 (%s): training.precision=bf16 trained SmolLM2-135M's shape 1.4 times as fast "
            "on an AMD EPYC, and halves the memory of the base; its logits differed by 1.3 %% of their norm",
            PROCESSOR.bf16_products,
        )


def wants_fused(section: TrainingSection, device_type: str) -> bool:
    """Return whether the engine's functions should be fused on a device type, if torch.compile works there."""
    return device_type == "cuda" if section.fused == "auto" else section.fused


def _fuse(runtime: Runtime, section: TrainingSection) -> None:
    """Turn fused functions on if they should be, and record a fallback if torch.compile does not work."""
    is_wanted = wants_fused(section, runtime.device.type)
    why = why_not_fused(runtime.device) if is_wanted else None
    if why is not None:
        wanted, used = "fused functions", "one kernel for each operation"
        runtime.fallbacks.take(Fallback(what="training.fused", wanted=wanted, used=used, why=why))
    switch_fused(is_wanted and why is None)
