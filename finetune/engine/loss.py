"""Compute the loss of a micro-batch: packed rows with the engine, padded rows with the model's own forward.

It is the cross-entropy. `engine/loss_of_nats.py` has functions of it, and `engine/given_loss.py` functions of logits
and targets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.engine.attention import attention
from finetune.engine.decoder import OFFLOADS, Attention, Decoder, Keep, bare_model
from finetune.engine.layout import PackedMicrobatch
from finetune.engine.loss_head import head_loss_per_target, summed_head_loss
from finetune.engine.products import in_float64

if TYPE_CHECKING:
    from finetune.engine.microbatch import Microbatch

LossFunction = Callable[[torch.nn.Module, Any], torch.Tensor]

_in_pinned_memory: Keep = partial(torch.autograd.graph.save_on_cpu, pin_memory=True)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Settings that depend on the device type by default and do not change the loss.

    `finetune plan` sets them to run the engine on one device type as it would run on another.
    """

    attention: Attention = attention
    mlp_chunk_rows: int | None = None
    """The rows that `gated_mlp` computes at a time; None: as many as suit the device."""
    logits_chunk_bytes: int | None = None
    """The bytes of logits that the head computes at a time; None: as many as suit the device."""
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
        from finetune.engine.reference import cross_entropy_of_padded

        return in_float64(cross_entropy_of_padded(model, microbatch)).sum()
    return BeforeHead.of(model, microbatch, choices).summed(microbatch.counts)


def cross_entropy_per_target(
    model: torch.nn.Module, microbatch: Microbatch, choices: Choices = BY_DEVICE, *, temperature: float = 1.0
) -> torch.Tensor:
    """Return nats of each target token, row after row: (num_targets,), fp32, without a gradient for packed rows."""
    if not isinstance(microbatch, PackedMicrobatch):
        from finetune.engine.reference import cross_entropy_of_padded

        return cross_entropy_of_padded(model, microbatch, temperature)
    return BeforeHead.of(model, microbatch, choices, temperature).nats()


class BeforeHead(NamedTuple):
    """A packed micro-batch where its targets are predicted."""

    hidden: torch.Tensor
    """(terms, hidden)."""
    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: PackedMicrobatch
    chunk_bytes: int | None

    @classmethod
    def of(cls, model: Any, rows: PackedMicrobatch, choices: Choices, temperature: float = 1.0) -> BeforeHead:
        """Compute the layers before the head; the temperature divides what enters it."""
        hidden, head = before_head(model, rows, choices)
        bias = head.bias
        if temperature != 1:
            hidden, bias = hidden / temperature, None if bias is None else bias / temperature
        return cls(hidden, head.weight, bias, rows, choices.logits_chunk_bytes)

    def nats(self) -> torch.Tensor:
        """Return the nats of each target, row after row, (num_targets,), without a gradient."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            of_term = head_loss_per_target(
                self.hidden.detach(), self.weight, self.rows.labels, bias=self.bias, chunk_bytes=self.chunk_bytes
            )
        return of_term[self.rows.target_term]

    def summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the sum of the nats of all terms, each times its count, (terms,), with a gradient."""
        with torch.autocast(self.hidden.device.type, enabled=False):
            return summed_head_loss(
                self.hidden, self.weight, self.rows.labels, bias=self.bias, counts=counts, chunk_bytes=self.chunk_bytes
            )


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
    ids, at, angles = microbatch.input_ids, microbatch.positions, microbatch.angles
    layout, num_padding = microbatch.layout, microbatch.num_padding
    hidden = decoder.hidden_states(ids, layout.position_ids, layout, at=at, angles=angles, num_padding=num_padding)
    with torch.autocast(hidden.device.type, enabled=False):
        return microbatch.at_terms(hidden), bare.get_output_embeddings()
