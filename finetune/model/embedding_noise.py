"""Add noise to embedded tokens while a model trains (NEFTune)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from finetune.engine.decoder import bare_model


def add_embedding_noise(model: Any, alpha: float) -> RemovableHandle:
    """Add uniform noise of at most alpha / sqrt(length x width) to embedded tokens, in training mode only.

    Return a handle whose `remove` ends the noise. Without that, the next run of the same model would have it too.

    The paper uses an alpha of 5 to 15 (NEFTune: arXiv:2310.05914).

    The noise comes from torch's global generator, which `train_step` seeds for each micro-batch from (seed, step, index
    in the global batch): it does not depend on the rank that computes it, or on whether the run was resumed. The length
    counts the padding of the micro-batch, as in TRL and transformers.
    """

    def noisy(module: nn.Module, _: object, embedded: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return embedded
        length, width = embedded.shape[-2:]
        bound = alpha / (length * width) ** 0.5
        noise = torch.empty_like(embedded).uniform_(-bound, bound)
        return embedded + noise

    noisy.setting = "noise (training.neftune_alpha)"  # type: ignore[attr-defined]  # read by `hook_reason`
    handle: RemovableHandle = bare_model(model).get_input_embeddings().register_forward_hook(noisy)
    return handle
