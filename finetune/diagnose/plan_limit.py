"""How long a step takes at the least: its matrix products at the rate that a device's maker gives."""

from __future__ import annotations

from typing import Any

from finetune.diagnose.plan_trace import IN_A_LAYER
from finetune.engine.decoder import bare_model

_FLOPS = 2
"""A multiplication and an addition."""


def operations_of_step(model: Any, *, num_computed: float, num_targets: float, is_checkpointing: bool) -> float:
    """Floating-point operations of the products with weights, forward and backward.

    Attention, norms and the optimizer come on top, and so do experts, whose weights are no matrices.

    Args:
        model: of any device; which of its weights train counts.
        num_computed: tokens that go through the layers.
        num_targets: those that go through the last layer and the head, see docs/engine.md.
        is_checkpointing: the layers' forward is computed twice.
    """
    bare = bare_model(model)
    last = str(len(bare.get_decoder().layers) - 1)
    head = bare.get_output_embeddings().weight
    total = num_targets * _products_with(head, is_again=False)
    for name, weight in model.named_parameters():
        match = IN_A_LAYER.search(name)
        if match and weight.ndim == 2:
            tokens = num_targets if match[1] == last else num_computed
            total += tokens * _products_with(weight, is_again=is_checkpointing)
    return total


def _products_with(weight: Any, *, is_again: bool) -> int:
    """Operations for each token: forward, the gradient of the input, and that of the weight where it trains."""
    return _FLOPS * int(weight.numel()) * (2 + bool(weight.requires_grad) + is_again)
