"""PiSSA: an adapter that starts as the largest singular values of each layer (Meng et al., 2024, arXiv:2404.02948).

The paper moves these values out of the base, W = residual + s * B0 A0, and trains A and B from A0 and B0. Here the base
stays as it is, and the adapter holds both: s * (B A - B0 A0) with A0 and B0 frozen, which is the same function with the
same gradients. So every checkpoint is a plain LoRA adapter of rank 2r for the original base, a resumed run has the very
A0 and B0 it began with, and switching the adapter off gives the base. PEFT's own conversion ends at the same rank 2r
(`path_initial_model_for_weight_conversion`, https://huggingface.co/docs/peft/developer_guides/lora).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from finetune.errors import ModelError

_ITERATIONS = 16
"""Of the fast form, as in the paper's own experiments with fast SVD."""


def start_from_principal_values(model: Any, r: int, init: Literal["pissa", "pissa_fast"]) -> None:
    """Give every LoRA layer of rank 2r its trained half, its frozen half, and a gradient for the first alone.

    Args:
        model: a PEFT model with plain LoRA layers on linear layers, not yet placed.
        r: rank of the trained half.
        init: an exact decomposition, or one by subspace iterations from torch's global generator.

    Raises:
        ModelError: a layer has fewer than r singular values.
    """
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A") or not len(layer.lora_A):
            continue
        (adapter,) = layer.lora_A
        weight = layer.get_base_layer().weight.T if layer.fan_in_fan_out else layer.get_base_layer().weight
        if min(weight.shape) < r:
            raise ModelError(
                f"lora.r is {r}, but {name} is {list(weight.shape)} and has {min(weight.shape)} singular values. "
                f"Set lora.r={min(weight.shape)} or less, or lora.init=default."
            )
        a, b = _principal_factors(weight, r, layer.scaling[adapter], init)
        with torch.no_grad():
            layer.lora_A[adapter].weight.copy_(torch.cat([a, a]))
            layer.lora_B[adapter].weight.copy_(torch.cat([b, -b], dim=1))
        _train_first_half(layer.lora_A[adapter].weight, r, dim=0)
        _train_first_half(layer.lora_B[adapter].weight, r, dim=1)


def is_half_frozen(parameter: torch.nn.Parameter) -> bool:
    """Whether a part of a parameter must keep its values, which weight decay would shrink."""
    return hasattr(parameter, "_frozen_from")


def _principal_factors(
    weight: torch.Tensor, r: int, scaling: float, init: Literal["pissa", "pissa_fast"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A of shape (r, in) and B of shape (out, r) with scaling * B A the best approximation of rank r."""
    matrix = weight.detach().float()
    if init == "pissa":
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    else:
        left, values, transposed = torch.svd_lowrank(matrix, q=r, niter=_ITERATIONS)
        right = transposed.T
    root = (values[:r] / scaling).sqrt()
    return root[:, None] * right[:r], left[:, :r] * root


def _train_first_half(parameter: torch.nn.Parameter, r: int, dim: int) -> None:
    def without_the_frozen(gradient: torch.Tensor) -> torch.Tensor:
        kept = gradient.clone()
        kept.narrow(dim, r, gradient.shape[dim] - r).zero_()
        return kept

    parameter.register_hook(without_the_frozen)  # type: ignore[no-untyped-call]
    parameter._frozen_from = r  # type: ignore[attr-defined]
