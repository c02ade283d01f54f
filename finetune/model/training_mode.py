"""Change a model's behaviour in training mode: expert routing and embedding noise. Weights do not change."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def route_by_score(model: nn.Module) -> int:
    """Make routers choose experts by score in training as in evaluation, and return the number of routers.

    transformers' Phi-3.5-MoE draws experts at random in training mode (SparseMixer-v2, arXiv:2409.12136) and adds noise
    to their inputs. The draw depends on the shape of the micro-batch, so a run's curve would depend on how its batches
    are split. With the choice by score, an adapter trains with the same experts that inference uses.
    """
    modules: list[Any] = list(model.modules())
    routers = [module for module in modules if hasattr(module, "router_jitter_noise")]
    for router in routers:
        router.register_forward_pre_hook(_in_evaluation_mode)
    for module in modules:
        if hasattr(module, "input_jitter_noise"):
            module.input_jitter_noise = 0.0
    return len(routers)


def add_embedding_noise(model: Any, alpha: float) -> None:
    """Add uniform noise of at most alpha / sqrt(length x width) to embedded tokens, in training mode only.

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

    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    bare.get_input_embeddings().register_forward_hook(noisy)


def _in_evaluation_mode(router: nn.Module, _inputs: Any) -> None:
    router.training = False
