"""Dequantize weights that bitsandbytes stores in 4 bits (NF4: Dettmers et al., 2023, arXiv:2305.14314).

A weight is dequantized for the matrix products of one layer. The backward pass keeps only its 4-bit form.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from finetune.units import ceil_div

_BLOCK, _BLOCK_OF_SCALES = 64, 256
"""The weights that share a scale, and the scales that share one in turn: section 3 of the paper, and bitsandbytes."""


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
    """Return a weight as a plain tensor of this dtype; None: of the dtype that it had before quantization.

    A quantization state with a method `widened(device)` provides the tensor itself.
    """
    if is_in_4_bits(weight):
        state: Any = weight.quant_state  # type: ignore[attr-defined]
        if hasattr(state, "widened"):
            weight = state.widened(weight.device)
        else:
            bitsandbytes: Any = import_module("bitsandbytes.functional")
            weight = bitsandbytes.dequantize_4bit(weight.data, state)
    return weight if dtype is None else weight.to(dtype)


def widened_bytes(weight: torch.Tensor) -> int:
    """Return the bytes of a 4-bit weight in the dtype that it had before quantization; 0 for other weights."""
    return full_shape(weight).numel() * weight.quant_state.dtype.itemsize if is_in_4_bits(weight) else 0  # type: ignore[attr-defined]


class _StateWithoutData:
    """The tensors that bitsandbytes keeps beside a weight in NF4 with double quantization, without data.

    Source: bitsandbytes 0.50, `QuantState` and `quantize_4bit` in bitsandbytes/functional.py.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        empty, num_scales = weight.new_empty, ceil_div(weight.numel(), _BLOCK)
        self.shape, self.dtype = weight.shape, weight.dtype
        self.absmax = empty(num_scales, dtype=torch.uint8)
        self.code, self.offset = empty(16, dtype=torch.float32), empty((), dtype=torch.float32)
        num_outer = ceil_div(num_scales, _BLOCK_OF_SCALES)
        absmax, code = empty(num_outer, dtype=torch.float32), empty(256, dtype=torch.float32)
        self.state2 = SimpleNamespace(absmax=absmax, code=code)

    def widened(self, device: torch.device) -> torch.Tensor:
        """Allocate what dequantizing allocates: the scales in fp32, which are freed again, and the weight."""
        scales = torch.empty(self.absmax.shape, dtype=torch.float32, device=device)
        weight = torch.empty(self.shape, dtype=self.dtype, device=device)
        del scales
        return weight


def in_4_bits_without_data(weight: torch.Tensor) -> torch.nn.Parameter:
    """Return a frozen parameter without data, as bitsandbytes keeps a weight in 4 bits."""
    packed: Any = torch.nn.Parameter(weight.new_empty((weight.numel() + 1) // 2, 1, dtype=torch.uint8), False)
    packed.quant_state = _StateWithoutData(weight)
    return packed  # type: ignore[no-any-return]


def state_bytes(weight: torch.Tensor) -> int:
    """Return the bytes that are kept beside a weight in 4 bits, for its scales; 0 for other weights."""
    return sum(tensor.nbytes for tensor in _state_tensors(weight))


def _state_tensors(weight: Any) -> list[torch.Tensor]:
    if not is_in_4_bits(weight):
        return []
    state = weight.quant_state
    attributes = [value for part in (state, state.state2) if part is not None for value in vars(part).values()]
    return [value for value in attributes if isinstance(value, torch.Tensor)]


def weight_without_data(weight: Any, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Make a parameter without data like another, which is widened as that is if it is in 4 bits.

    `make` makes a tensor without data like another.
    """
    twin: Any = torch.nn.Parameter(make(weight.data), weight.requires_grad)
    if is_in_4_bits(weight):
        known = {id(value): make(value) for value in _state_tensors(weight)}
        twin.quant_state = copy.deepcopy(weight.quant_state, known)
    return twin
