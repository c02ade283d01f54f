"""Compute the loss of a micro-batch: packed rows with the engine, padded rows with the model's own forward."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.attention import attention
from finetune.engine.decoder import OFFLOADS, Attention, Decoder, Keep, bare_model
from finetune.engine.layout import PackedMicrobatch
from finetune.engine.loss_head import head_loss_per_target, summed_head_loss
from finetune.engine.reference import cross_entropy_of_padded, in_float64

if TYPE_CHECKING:
    from finetune.engine.microbatch import Microbatch


_in_pinned_memory: Keep = partial(torch.autograd.graph.save_on_cpu, pin_memory=True)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Settings that depend on the device type by default and do not change the loss.

    `finetune plan` sets them to run the engine on one device type as it would run on another.
    """

    attention: Attention = attention
    mlp_chunk_rows: int | None = None
    """See `finetune.engine.mlp.gated_mlp`."""
    logits_chunk_bytes: int | None = None
    """See `finetune.engine.loss_head.summed_head_loss`."""
    offload: Keep = _in_pinned_memory
    """How inputs of layers are kept in main memory, if the model asks for it."""


BY_DEVICE = Choices()


def summed_cross_entropy(model: torch.nn.Module, microbatch: Microbatch, choices: Choices = BY_DEVICE) -> torch.Tensor:
    """Sum the nats of the micro-batch's target tokens, as a float64 scalar with a gradient.

    Args:
        model: a transformers causal language model, or a PEFT model around one; for packed rows a model for which
            `unsupported_reason` returns None.
        microbatch: on the model's device.
        choices: how packed rows are computed.
    """
    if not isinstance(microbatch, PackedMicrobatch):
        return in_float64(cross_entropy_of_padded(model, microbatch)).sum()
    hidden, head = before_head(model, microbatch, choices)
    with torch.autocast(hidden.device.type, enabled=False):
        return summed_head_loss(
            hidden,
            head.weight,
            microbatch.labels,
            bias=head.bias,
            counts=microbatch.counts,
            chunk_bytes=choices.logits_chunk_bytes,
        )


def cross_entropy_per_target(
    model: torch.nn.Module, microbatch: Microbatch, choices: Choices = BY_DEVICE
) -> torch.Tensor:
    """Return nats of each target token, row after row: (num_targets,), fp32, without a gradient for packed rows."""
    if not isinstance(microbatch, PackedMicrobatch):
        return cross_entropy_of_padded(model, microbatch)
    hidden, head = before_head(model, microbatch, choices)
    with torch.autocast(hidden.device.type, enabled=False):
        losses = head_loss_per_target(
            hidden, head.weight, microbatch.labels, bias=head.bias, chunk_bytes=choices.logits_chunk_bytes
        )
    return losses[microbatch.target_term]


def before_head(model: Any, microbatch: PackedMicrobatch, choices: Choices = BY_DEVICE) -> tuple[torch.Tensor, Any]:
    """Return the hidden states at which targets are predicted, (terms, hidden), and the head."""
    bare = bare_model(model)
    # The switch of transformers decides for its own layers and for the engine's.
    again = bare.training and getattr(bare.get_decoder(), "gradient_checkpointing", False)
    decoder = Decoder(
        bare,
        choices.attention,
        checkpoint_layers=again,
        keep_inputs=choices.offload if getattr(bare.get_decoder(), OFFLOADS, False) else nullcontext,
        mlp_chunk_rows=choices.mlp_chunk_rows,
    )
    layout = microbatch.layout
    hidden = decoder.hidden_states(microbatch.input_ids, layout.position_ids, layout, at=microbatch.positions)
    with torch.autocast(hidden.device.type, enabled=False):
        return microbatch.at_terms(hidden), bare.get_output_embeddings()
