"""Compute losses of padded rows with a model's own forward, which the engine must match and which can replace it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from finetune.engine.decoder import bare_model, family_of, logit_scale

if TYPE_CHECKING:
    from finetune.engine.microbatch import PaddedMicrobatch

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Device types without float64. Sums in float64 are computed on the CPU instead."""


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


def nats_and_softmax(
    logits: torch.Tensor, labels: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return nats of each label, (rows, 1), and the probabilities of each row, (rows, vocabulary).

    On a CPU, torch's softmax adds up a row term by term in a few lanes, and each lane drops terms below half a rounding
    of its sum. A large vocabulary has many: the probabilities then add up to as much as 1 + 4e-5. torch's
    `sum` adds pairwise and drops none, so dividing by it corrects the probabilities.

    Args:
        logits: (rows, vocabulary), in fp32 or better.
        labels: (rows, 1).
        out: takes the probabilities; may be the logits.
    """
    largest = logits.amax(1, keepdim=True)
    below_largest = largest - logits.gather(1, labels)
    softmax = torch.softmax(logits, dim=1, out=out)
    softmax.div_(softmax.sum(1, keepdim=True))
    # The largest probability, exp(largest - log_sum_exp), is never small. This halves the work of a logsumexp.
    return below_largest - softmax.amax(1, keepdim=True).log(), softmax


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


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """Convert values to float64, on the CPU if their device does not support it."""
    return (values.cpu() if values.device.type in WITHOUT_FLOAT64 else values).double()


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
