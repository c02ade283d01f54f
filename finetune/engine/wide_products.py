"""Matrix products in 16 bits on a CPU that does not multiply in 16 bits: in fp32, and rounded once.

Without AVX-512, torch multiplies such matrices one number at a time: on a core of an EPYC with AVX2, at 10 GFLOP/s in
the forward pass and at 1 to 2 in the backward pass, where fp32 has 85. Here, blocks are converted to fp32 as they are
needed, so weights and activations stay in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK_ROWS = 1024
"""Rows of a block. With more of them, each converted weight is used more often."""
BLOCK_BYTES = 32 * 2**20
"""The most bytes of a block of weights in fp32."""


def wide_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias + residual + low_rank` in fp32. For the arguments, see `product`.

    Returns:
        (rows, out_features), in the type of x.
    """
    y = x.new_empty(len(x), len(weight))
    with torch.autocast(x.device.type, enabled=False):
        for rows in _slices(len(x), BLOCK_ROWS):
            wide_x = x[rows].float()
            for columns in _slices(len(weight), BLOCK_BYTES // (4 * max(1, weight.shape[1]))):
                part = wide_x @ weight[columns].float().t()
                if low_rank is not None:
                    left, right, scale = low_rank
                    part.addmm_(left[rows].float(), right[columns].float().t(), alpha=scale)
                part = part if bias is None else part.add_(bias[columns])
                y[rows, columns] = part if residual is None else part.add_(residual[rows, columns])
    return y


def plus_wide_product(
    sums: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `sums + left @ right` in place, with products in fp32; without sums, start from zeros of this dtype."""
    wide_right = right.float()
    with torch.autocast(left.device.type, enabled=False):
        if sums is None:
            sums = torch.zeros(len(left), right.shape[1], dtype=dtype, device=left.device)
        for rows in _slices(len(left), BLOCK_BYTES // (4 * max(1, left.shape[1]))):
            sums[rows] += left[rows].float() @ wide_right
    return sums


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, max(1, step)):
        yield slice(start, start + max(1, step))
