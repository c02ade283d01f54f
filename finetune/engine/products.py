"""Compute matrix products with the fastest kernel that the CPU or GPU has for them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

_STORES = {name: "32" for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY") if name not in os.environ}
"""By default oneDNN, and ideep on top of it, keep compiled code for 1024 shapes, 0.5 to 0.7 MB each, and every
micro-batch has new shapes. Room for one micro-batch is enough. The variables are read at the first product."""
os.environ.update(_STORES)


class Processor(NamedTuple):
    """The vendor and instruction sets of the CPU, which choose a kernel. Both are empty without /proc/cpuinfo."""

    vendor: str = ""
    """For example GenuineIntel."""
    flags: frozenset[str] = frozenset()
    """Its instruction sets, for example avx512f."""

    @property
    def bf16_products(self) -> str | None:
        """The instruction set with which it multiplies in bf16, or None."""
        return next((name for flag, name in _BF16_PRODUCTS.items() if flag in self.flags), None)

    def prefers_onednn(self, capability: str, *, has_mkl: bool) -> bool:
        """Return whether oneDNN has the fastest fp32 products, given torch's CPU capability.

        On a Zen 4 core, oneDNN beats the MKL of `torch.mm` by a tenth, and by half if one side is narrow. On a Xeon
        with AVX-512, MKL is 2 to 15 % faster for eight of nine shapes.
        """
        return capability.startswith("AVX512") and not (has_mkl and self.vendor == "GenuineIntel")

    def widened_types(self, capability: str) -> frozenset[torch.dtype]:
        """Return the 16-bit types for which torch has no fast products on this CPU, given torch's CPU capability."""
        is_limited = platform.machine() in ("x86_64", "AMD64") and not capability.startswith("AVX512")
        asked = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
        # A torch without oneDNN, on macOS for example, lacks these.
        fast = {dtype for dtype, name in asked.items() if getattr(torch.ops.mkldnn, name, bool)()}
        return frozenset(asked if is_limited else asked.keys() - fast)


_BF16_PRODUCTS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}


def read_processor(file: Path = Path("/proc/cpuinfo")) -> Processor:
    """Read the vendor and the flags of the first processor."""
    if not file.is_file():
        return Processor()
    lines = (line.partition(":") for line in file.read_text().partition("\n\n")[0].splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    return Processor(values.get("vendor_id", ""), frozenset(values.get("flags", "").split()))


PROCESSOR = read_processor()
_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
_CAPABILITY = torch.backends.cpu.get_cpu_capability()
LINEAR: Any = (
    torch.ops.mkldnn._linear_pointwise
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and _CAPABILITY.startswith("AVX512")
    and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    else None
)
"""oneDNN's product, or None if this CPU or build does not have it."""
ONEDNN: Any = LINEAR if PROCESSOR.prefers_onednn(_CAPABILITY, has_mkl=_HAS_MKL) else None
"""oneDNN's product for fp32, or None if torch's own is used, which MKL computes where torch has it."""

WIDENED = PROCESSOR.widened_types(_CAPABILITY)
"""Types in which this CPU does not multiply. Products in them are computed in fp32, see `wide_products`."""

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Device types without float64. Sums in float64 are computed on the CPU instead."""

FP8 = torch.float8_e4m3fn
"""The type of weights in fp8 (`finetune.engine.quantized`)."""

_FEW_ROWS, WORTH_COMPILING = 16, 2**24
"""oneDNN compiles a kernel for each new shape, which takes longer than a product with fewer multiplications. Products
with few rows are those of generated tokens: their shapes recur."""
_WORTH_WIDENING = 8
"""Rows from which converting a weight to fp32 takes less time than a product in 16 bits one number at a time."""


BF16_SHAPES = 96
"""Shapes to keep code for in bf16, where adapters are not merged: a micro-batch of a llama model has 60 shapes of
products, in fp32 22. A store that is too small by a few drops each kernel before the next layer needs it."""


def make_room_for_bf16() -> None:
    """Let the stores keep `BF16_SHAPES`, unless the user has set them. This has no effect after the first product."""
    os.environ.update(dict.fromkeys(_STORES, str(BF16_SHAPES)))


def wide_type(x: torch.Tensor) -> torch.dtype:
    """Return the type of sums over values of x: fp32, or a wider type of x."""
    return torch.promote_types(x.dtype, torch.float32)


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """Convert values to float64, on the CPU if their device does not support it."""
    return (values.cpu() if values.device.type in WITHOUT_FLOAT64 else values).double()


class LowRank(NamedTuple):
    """The product `scale * left @ right.T` of two narrow matrices."""

    left: torch.Tensor
    """(rows, r)"""
    right: torch.Tensor
    """(out_features, r)"""
    scale: float


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias + residual + low_rank`, outside of autograd.

    Args:
        x: (rows, in_features).
        weight: (out_features, in_features); a transposed view costs nothing.
        bias: (out_features,), or None.
        residual: (rows, out_features), or None.
        low_rank: (rows, out_features) once multiplied, or None.

    Returns:
        (rows, out_features), a new tensor.
    """
    if _is_widened(x):
        from finetune.engine.wide_products import wide_product

        return wide_product(x, weight, bias, residual, low_rank)
    if low_rank is None:
        return _plain_product(x, weight, bias, residual)
    # The narrow product comes first and the wide one adds to it before rounding. A sum that is rounded to 16 bits
    # already would swallow most of a young adapter's part, as a residual would, which is larger still.
    y = scaled_product(*low_rank)
    if _is_for_onednn(x, weight):
        y = LINEAR.binary(x, y, _dense(weight), bias, "add")
    else:
        y.addmm_(x, weight.t())
        y = y if bias is None else y.add_(bias)
    return y if residual is None else y.add_(residual)


def _plain_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor
    if _is_for_onednn(x, weight):
        if residual is None:
            y = LINEAR(x, _dense(weight), bias, "none", [], "")
        else:
            y = LINEAR.binary(x, residual, _dense(weight), bias, "add")
        return y
    # A product adds to a sum at no cost of its own, before it rounds.
    summand = bias if residual is None else residual
    y = x @ weight.t() if summand is None else torch.addmm(summand, x, weight.t())
    return y if bias is None or residual is None else y.add_(bias)


def added(
    y: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, low_rank: LowRank | None
) -> torch.Tensor:
    """Add what `product` adds to a product that was computed otherwise, in place."""
    for summand in (bias, residual):
        y = y if summand is None else y.add_(summand)
    return y if low_rank is None else y.addmm_(low_rank.left, low_rank.right.t(), alpha=low_rank.scale)


def _is_widened(x: torch.Tensor) -> bool:
    return x.dtype in WIDENED and x.device.type == "cpu" and len(x) >= _WORTH_WIDENING


def _is_for_onednn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if weight.is_mkldnn:  # packed
        return True
    if ONEDNN is None or x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
        return False
    return len(x) < _FEW_ROWS or x.numel() * weight.shape[0] >= WORTH_COMPILING


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as one block of memory, or its transpose as one.

    oneDNN has fast kernels for any strides of x, but for a strided weight, a column slice for example, only its
    reference kernel, which takes hundreds of times as long.
    """
    if weight.is_mkldnn or weight.is_contiguous() or weight.t().is_contiguous():
        return weight
    return weight.t().contiguous().t() if weight.stride(0) == 1 else weight.contiguous()


def scaled_product(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute `scale * x @ weight.T`, outside of autograd."""
    if _is_for_onednn(x, weight) or _is_widened(x):
        return product(x, weight).mul_(scale)
    return torch.addmm(x.new_empty(1), x, weight.t(), beta=0, alpha=scale)


def plus_product(
    sums: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `sums + left @ right` in place, in a dtype at least as wide as theirs; without sums, start from zeros."""
    if _is_widened(right):
        from finetune.engine.wide_products import plus_wide_product

        return plus_wide_product(sums, left, right, dtype)
    if sums is None:
        return (left @ right).to(dtype)
    return sums.addmm_(left, right) if dtype == left.dtype else sums.add_(left @ right)


_casts: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] | None = None
"""Weights and their casts, by where the weight lies; None outside of `unchanged_weights`."""


@contextmanager
def unchanged_weights() -> Iterator[None]:
    """Make `cast` convert each weight only once within the block, in which no weight may change: within one step."""
    global _casts
    before, _casts = _casts, {}
    try:
        yield
    finally:
        _casts = before


def cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in another type, outside of autograd."""
    if _casts is None or weight.dtype == dtype:
        return weight.to(dtype)
    where = weight.untyped_storage()._cdata, weight.storage_offset(), weight.shape, dtype
    if where not in _casts:
        _casts[where] = weight, weight.detach().to(dtype)  # as long as the weight is kept, nothing else lies there
    return _casts[where][1]


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
