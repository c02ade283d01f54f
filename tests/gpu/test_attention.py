"""The device's attention against a dense mask in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from finetune.engine.attention import attention, choose_kernel, dense_attention
from finetune.engine.attention_cuda import EQUAL_ROWS_MULTIPLE, why_not_varlen
from finetune.engine.layout import dense_mask, pack
from tests.engine.prefix_rows import random_rows, rows_of

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ROWS = random_rows(4, longest=150)
EQUAL_ROWS = rows_of(*([*range(EQUAL_ROWS_MULTIPLE)] for _ in range(3)))
"""In bf16 without a window they go to cuDNN as a batch."""


def test_cuda_has_flash_attention_in_16_bits(device: torch.device, only_on_cuda: None) -> None:
    assert why_not_varlen(device) is None
    assert choose_kernel("cuda", torch.bfloat16, has_varlen=True) == "varlen"


@pytest.mark.parametrize(
    ("head_dim", "heads", "window"),
    [
        (64, (4, 2), None),
        (80, (4, 4), None),
        (96, (2, 2), 5),
        (128, (4, 1), None),
        (128, (3, 1), None),
        (128, (3, 1), 7),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_outputs_and_gradients(
    device: torch.device, dtype: torch.dtype, head_dim: int, heads: tuple[int, int], window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    for packed, has_own_queries in product((pack(ROWS), pack(EQUAL_ROWS, share_prefixes=False)), (False, True)):
        there, queries = packed.to(device), packed.positions if has_own_queries else None
        rows = packed.num_computed if queries is None else len(queries)
        sizes = ((rows, heads[0]), (packed.num_computed, heads[1]), (packed.num_computed, heads[1]))
        exact = [
            torch.randn(*size, head_dim, generator=generator).to(dtype).double().requires_grad_() for size in sizes
        ]
        mask = dense_mask(packed.layout, packed.layout.tokens if queries is None else queries, window)
        expected = dense_attention(*exact, mask, head_dim**-0.5)
        grad = torch.randn(expected.shape, generator=generator).to(dtype)
        inputs = [x.detach().to(device, dtype).requires_grad_() for x in exact]
        at = None if queries is None else there.positions
        out = attention(*inputs, there.layout, queries=at, window=window)
        assert out.dtype == dtype
        ours = [out, *torch.autograd.grad(out, inputs, grad.to(device))]
        theirs = [expected, *torch.autograd.grad(expected, exact, grad.double())]
        for name, mine, their in zip(("output", "q", "k", "v"), ours, theirs, strict=True):
            error = (mine.cpu().double() - their).norm() / their.norm()
            assert error <= TOLERANCES[dtype], name
