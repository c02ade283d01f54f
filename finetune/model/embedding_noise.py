"""NEFTune: uniform noise on the embedded tokens while training (Jain et al., 2023, arXiv:2310.05914)."""

from __future__ import annotations

from typing import Any

import torch


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Let the model's input embedding add noise in training mode, of at most alpha / sqrt(length x width) a value.

    The noise comes from torch's global generator, which `train_step` seeds for each micro-batch from (seed, step, index
    in the global batch): it does not depend on the rank that computes it, nor on whether the run was resumed. Length is
    that of the micro-batch's padded rows, as in the implementations that users know (TRL, transformers).

    The weights are untouched, so nothing of it is saved, and an evaluation sees none.

    Args:
        model: a transformers causal language model, or a PEFT model around one.
        alpha: the paper uses 5 to 15.
    """

    def noisy(module: torch.nn.Module, _: object, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        length, width = embedded.shape[-2:]
        bound = alpha / (length * width) ** 0.5
        noise = torch.empty_like(embedded).uniform_(-bound, bound)
        return embedded + noise

    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    bare.get_input_embeddings().register_forward_hook(noisy)
