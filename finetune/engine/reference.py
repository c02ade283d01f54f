"""Compute losses of padded rows with a model's own forward, which the engine must match and which can replace it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.decoder import bare_model, family_of, logit_scale
from finetune.engine.loss_head import nats_and_softmax

if TYPE_CHECKING:
    from finetune.engine.padded import PaddedMicrobatch


def cross_entropy_of_padded(
    model: torch.nn.Module, microbatch: PaddedMicrobatch, temperature: float = 1.0
) -> torch.Tensor:
    """Return nats of each target token, row after row: shape (num_targets,), fp32.

    Logits are computed only where there is a target. No mask is needed: rows are padded on the right, where a causal
    model does not look.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        microbatch: on the model's device.
        temperature: logits are divided by it.
    """
    logits, labels = logits_of_padded(model, microbatch)
    logits = logits.float()
    nats: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits if temperature == 1 else logits / temperature, labels.unsqueeze(1)
    )
    return nats.squeeze(1)


def logits_of_padded(model: torch.nn.Module, microbatch: PaddedMicrobatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (num_targets, vocabulary) and labels (num_targets,). See `cross_entropy_of_padded`."""
    predicts = microbatch.is_target[:, 1:]  # the position before a target predicts it
    return _logits_at(model, microbatch.input_ids, predicts), microbatch.input_ids[:, 1:][predicts]


class _CrossEntropy(torch.autograd.Function):
    """`functional.cross_entropy`, with the probabilities of `nats_and_softmax`."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nats, softmax = nats_and_softmax(logits, labels)
        ctx.save_for_backward(softmax, labels)
        return nats

    @staticmethod
    def backward(ctx: Any, factors: torch.Tensor) -> tuple[torch.Tensor, None]:
        softmax, labels = ctx.saved_tensors
        return (softmax * factors).scatter_add_(1, labels, -factors), None


def _logits_at(model: torch.nn.Module, input_ids: torch.Tensor, predicts: torch.Tensor) -> torch.Tensor:
    """Return logits (num_targets, vocabulary) where `predicts` (batch, time - 1) is True."""
    bare = bare_model(model)
    config = bare.config
    caps = getattr(config, "final_logit_softcapping", None) is not None
    if family_of(config.model_type).is_computed and logit_scale(config) == 1 and not caps:  # others do more to logits
        hidden = bare.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        return bare.get_output_embeddings()(hidden[:, :-1][predicts])  # type: ignore[no-any-return]
    if "logits_to_keep" not in inspect.signature(bare.forward).parameters:
        logits = bare(input_ids=input_ids, use_cache=False).logits
        return logits[:, :-1][predicts]  # type: ignore[no-any-return]
    # `logits_to_keep` is one list for all rows: the positions at which any row has a target to predict.
    positions = predicts.any(dim=0).nonzero().squeeze(1)
    logits = bare(input_ids=input_ids, use_cache=False, logits_to_keep=positions).logits
    return logits[predicts[:, positions]]  # type: ignore[no-any-return]
