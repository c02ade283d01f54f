"""Dequantize weights that bitsandbytes stores in 4 bits (NF4: Dettmers et al., 2023, arXiv:2305.14314).

A weight is dequantized for the matrix products of one layer. The backward pass keeps only its 4-bit form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch


def holds_nf4(module: Any) -> bool:
    """Return whether a linear layer's weight is in a 4-bit format that `widened` can dequantize."""
    if type(module).__name__ != "Linear4bit" or not type(module).__module__.startswith("bitsandbytes.nn"):
        return False
    state = getattr(module.weight, "quant_state", None)
    # On some CPUs an evaluation packs the weights anew, for products of its own.
    return getattr(state, "quant_type", None) == "nf4" and not getattr(state, "packing_format_for_cpu", False)


def is_in_4_bits(weight: torch.Tensor) -> bool:
    """Return whether a weight of `Linear` is in 4 bits."""
    return getattr(weight, "quant_state", None) is not None


def full_shape(weight: torch.Tensor) -> torch.Size:
    """Return (out_features, in_features) of a weight in any form."""
    shape: torch.Size = weight.quant_state.shape if is_in_4_bits(weight) else weight.shape  # type: ignore[attr-defined]
    return shape


def widened(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a weight as a plain tensor of this dtype; None: of the dtype that it had before quantization."""
    if is_in_4_bits(weight):
        bitsandbytes: Any = import_module("bitsandbytes.functional")
        weight = bitsandbytes.dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]
    return weight if dtype is None else weight.to(dtype)


def weight_without_data(weight: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Make a parameter without data like another, which is widened as that is if it is in 4 bits.

    Args:
        weight: on any device.
        make: makes a tensor without data like another.
    """
    twin: Any = torch.nn.Parameter(make(weight.data), weight.requires_grad)
    if is_in_4_bits(weight):
        state = weight.quant_state
        held = [value for part in (state, state.state2) if part is not None for value in vars(part).values()]
        known = {id(value): make(value) for value in held if isinstance(value, torch.Tensor)}
        twin.quant_state = copy.deepcopy(state, known)
    return twin
