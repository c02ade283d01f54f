"""Matrix products by the fastest way: the same numbers, and nothing kept of shapes that are gone."""

import subprocess
import sys

import pytest
import torch

from finetune.engine import products

MANY_SHAPES = """
import resource, torch
from finetune.engine.products import product
torch.set_num_threads(1)
weight = torch.ones(64, 64)
def peak_after(shapes):
    for rows in shapes:
        product(torch.ones(rows, 64), weight)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak_after(range(600, 700))
print(peak_after(range(1, 600)) - before)
"""


@pytest.mark.process
@pytest.mark.skipif(products._ONEDNN is None, reason="no oneDNN products here (they need AVX-512): nothing to bound")
def test_what_onednn_keeps_of_shapes_that_are_gone_is_bounded():
    """Without the bound, 600 shapes keep 300 MiB."""
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout) < 20


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_product_is_what_torch_makes_of_it(rows, has_bias, has_residual):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 24), torch.randn(40, 24)
    bias = torch.randn(40) if has_bias else None
    residual = torch.randn(rows, 40) if has_residual else None
    expected = x @ weight.t() + (0 if bias is None else bias) + (0 if residual is None else residual)
    torch.testing.assert_close(products.product(x, weight, bias, residual), expected)
    torch.testing.assert_close(products.product(x, weight.t().contiguous().t(), bias, residual), expected)
