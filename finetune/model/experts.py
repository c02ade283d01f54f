"""Mixtures of experts in training: the same way through them in every run."""

from __future__ import annotations

from typing import Any

from torch import nn


def route_by_score(model: nn.Module) -> int:
    """Make routers choose experts by score in training as they do in evaluation, and not by lot.

    transformers' Phi-3.5-MoE draws experts at random in training mode (SparseMixer-v2, arXiv:2409.12136) and jitters
    what goes in. The draw depends on the shape of the micro-batch, so that a run's curve would depend on how its
    batches are cut. An adapter beside frozen experts learns the routes that will be taken.

    Returns:
        The number of routers.
    """
    modules: list[Any] = list(model.modules())
    routers = [module for module in modules if hasattr(module, "router_jitter_noise")]
    for router in routers:
        router.register_forward_pre_hook(_by_score)
    for module in modules:
        if hasattr(module, "input_jitter_noise"):
            module.input_jitter_noise = 0.0
    return len(routers)


def _by_score(router: nn.Module, _inputs: Any) -> None:
    router.training = False
