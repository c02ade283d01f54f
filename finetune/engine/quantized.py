"""Frozen weights in few bits: twins of weights in NF4 (Dettmers et al., 2023, arXiv:2305.14314), and products in fp8.

Products in fp8 (Micikevicius et al., 2022, arXiv:2209.05433) are those of torch's `_scaled_mm` alone. All factors are
e4m3 with a scale for each row. e4m3 has 3 bits of mantissa, so it rounds by at most 2^-4 of a value. e5m2 has a wider
range, but rounds gradients twice as coarsely. Below its normal numbers, e4m3 is off by at most 2^-10 of its steps, of
which the largest value of a row has 448. In a row of 17,920 values (phi-4's widest) these errors sum up to at most
sqrt(17920) · 2^-10 / 448 = 0.03 % of the row's norm, so the wider range cannot gain more than that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from finetune.engine.fused import fused
from finetune.engine.products import FP8, full_shape, is_in_4_bits
from finetune.errors import first_line
from finetune.units import ceil_div

_BLOCK, _BLOCK_OF_SCALES = 64, 256
"""The weights that share a scale, and the scales that share one in turn: section 3 of the paper, and bitsandbytes."""
ROUNDING = 2.0**-4
"""The largest relative error of a value that is rounded to e4m3."""
MULTIPLE = 16
"""torch's kernels need in_features and out_features that are multiples of this."""
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-126
"""For rows of zeros. Smaller scales would not be normal numbers in fp32."""
_FIRST_CAPABILITY = (9, 0)


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


class Rounded(NamedTuple):
    """A matrix in fp8: row i is `scale[i] * values[i]`."""

    values: torch.Tensor
    """(rows, features), e4m3."""
    scale: torch.Tensor
    """(rows, 1), fp32."""


@fused(launches=1)
def rounded_to_fp8(x: torch.Tensor, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two parts of `Rounded` for `x * factors`; factors are (features,) or None for 1.

    If a row has a value that is not finite, its products are not finite either.
    """
    wide = x.float()
    if factors is not None:
        wide = wide * factors
    scale = (wide.abs().amax(1, keepdim=True) / _LARGEST).clamp_min(_SMALLEST_SCALE)
    return (wide / scale).to(FP8), scale


def product_in_fp8(
    x: torch.Tensor, weight: torch.Tensor, row_scale: torch.Tensor, rounded: Rounded | None = None
) -> torch.Tensor:
    """Compute `x @ (row_scale * weight).T`.

    Args:
        x: (rows, in_features); the result has its type.
        weight: (out_features, in_features), e4m3.
        row_scale: (out_features,), fp32.
        rounded: x in fp8, if it is there already.
    """
    values, scale = rounded_to_fp8(x, None) if rounded is None else rounded
    return torch._scaled_mm(values, weight.t(), scale_a=scale, scale_b=row_scale[None], out_dtype=x.dtype)


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight for `input_gradient_in_fp8`, since Hopper's kernels read the second factor by columns only."""
    return _transposed(weight.view(torch.uint8)).view(weight.dtype)


@fused(launches=1)
def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def input_gradient_in_fp8(dy: torch.Tensor, weight_t: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """Compute `dy @ (row_scale * weight)`.

    The sum runs over the rows of the weight, so their scales cannot be applied to the result. They are multiplied into
    dy before dy is rounded. One copy of the weight therefore serves both passes, and both use the rounded weight.

    Args:
        dy: (rows, out_features); the result has its type.
        weight_t: (in_features, out_features), made by `transposed`.
        row_scale: (out_features,), fp32.
    """
    values, scale = rounded_to_fp8(dy, row_scale)
    ones = row_scale.new_ones(1, len(weight_t))
    return torch._scaled_mm(values, weight_t.t(), scale_a=scale, scale_b=ones, out_dtype=dy.dtype)


@cache
def why_not_fp8(device: torch.device) -> str | None:
    """Return why a device has no products in fp8 with a scale for each row; None if it has. The first call tries one.

    torch has kernels for GPUs of capability 8.9 (Ada) too. They are refused, because finetune was not tried there.
    """
    if device.type not in ("cuda", "cpu"):
        return f"{device.type} has no products in fp8"
    if device.type == "cuda":
        if torch.version.hip is not None:
            return "AMD's GPUs have other types of fp8"
        if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
            major, minor = torch.cuda.get_device_capability(device)
            name = torch.cuda.get_device_name(device)
            return f"it needs a GPU from Hopper on (capability 9.0), and {name} has capability {major}.{minor}"
    try:
        ones = torch.ones(MULTIPLE, MULTIPLE, dtype=torch.bfloat16, device=device)
        values, scale = rounded_to_fp8(ones, None)
        deviation = product_in_fp8(ones, values, scale[:, 0]).sub(MULTIPLE).abs().max().item()
    except Exception as error:  # of any layer: a torch without the kernel, or without one for this GPU
        return f"a product fails with torch {torch.__version__} ({type(error).__name__}: {first_line(error)})"
    return (
        None if deviation <= MULTIPLE * torch.finfo(torch.bfloat16).eps else f"a sum of 16 ones is off by {deviation:g}"
    )
