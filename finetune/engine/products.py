"""Matrix products with the fastest available kernel."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.nn import functional

# By default oneDNN, and ideep on top of it, keep compiled code for 1024 shapes, 0.6 MB each, and every micro-batch has
# new shapes. Room for one micro-batch is enough. The variables are read at the first use.
for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, "32")

_ONEDNN: Any = (
    torch.ops.mkldnn._linear_pointwise
    if torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)
"""On a Zen 4 core, oneDNN beats the MKL of `torch.mm` in fp32 by a tenth, and by half if one side is narrow."""


def wide_type(x: torch.Tensor) -> torch.dtype:
    """Return the type of sums over values of x: fp32, or a wider type of x."""
    return torch.promote_types(x.dtype, torch.float32)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `x @ weight.T + bias + residual`, outside of autograd.

    Args:
        x: (rows, in_features).
        weight: (out_features, in_features); a transposed view costs nothing.
        bias: (out_features,), or None.
        residual: (rows, out_features), or None.

    Returns:
        (rows, out_features), a new tensor.
    """
    if _ONEDNN is not None and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel():
        if residual is None:
            made: torch.Tensor = _ONEDNN(x, weight, bias, "none", [], "")
        else:
            made = _ONEDNN.binary(x, residual, weight, bias, "add")
        return made
    y = functional.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


def add_product(sums: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute `sums += left @ right`, where the sums may have a wider type."""
    if sums.dtype == left.dtype:
        sums.addmm_(left, right)
    else:
        sums.add_(left @ right)
