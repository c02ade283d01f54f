"""Cross-entropy summed over target tokens, with logits only where a target is."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from finetune.data.batches import Microbatch

PLAIN_HEADS = ("phi", "phi3", "llama", "mistral", "qwen2", "qwen3")
"""Model types whose logits are exactly `head(decoder(ids))`; others scale or cap them in their own forward."""


def summed_cross_entropy(model: torch.nn.Module, microbatch: Microbatch) -> torch.Tensor:
    """Nats summed over the micro-batch's target tokens, as a float64 scalar that can be differentiated.

    Rows are padded on the right and a causal model never looks to the right, so no mask is needed: what stands behind a
    row's end cannot reach its targets.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        microbatch: on the model's device.
    """
    return in_float64(cross_entropy_per_target(model, microbatch)).sum()


def cross_entropy_per_target(model: torch.nn.Module, microbatch: Microbatch) -> torch.Tensor:
    """Nats of each target token, row after row: shape (num_targets,), fp32."""
    predicts = microbatch.is_target[:, 1:]  # the position before a target predicts it
    labels = microbatch.input_ids[:, 1:][predicts]
    logits = _logits_at(model, microbatch.input_ids, predicts)
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """The same values, on the CPU where their device knows no float64."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def _logits_at(model: torch.nn.Module, input_ids: torch.Tensor, predicts: torch.Tensor) -> torch.Tensor:
    """Logits (num_targets, vocabulary) at the positions where `predicts` (batch, time - 1) is True."""
    bare: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if bare.config.model_type in PLAIN_HEADS:
        hidden = bare.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        return bare.get_output_embeddings()(hidden[:, :-1][predicts])  # type: ignore[no-any-return]
    if "logits_to_keep" not in inspect.signature(bare.forward).parameters:
        logits = bare(input_ids=input_ids, use_cache=False).logits
        return logits[:, :-1][predicts]  # type: ignore[no-any-return]
    # One list of positions serves all rows: those at which any row has a target to predict.
    positions = predicts.any(dim=0).nonzero().squeeze(1)
    logits = bare(input_ids=input_ids, use_cache=False, logits_to_keep=positions).logits
    return logits[predicts[:, positions]]  # type: ignore[no-any-return]
