"""Each function of the engine in the types that it meets in a run, against itself in float64.

That it is right in float64 is for `gradcheck` and the plain formulas, in the tests of each function.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from finetune.engine.attention import attention
from finetune.engine.attention_cuda import take_keys
from finetune.engine.layout import pack
from finetune.engine.linear import Linear, linear, normed_linear
from finetune.engine.loss_head import summed_head_loss
from finetune.engine.mlp import gated_mlp
from finetune.engine.norm import rms_norm
from finetune.engine.rotary import split_heads
from tests.engine.prefix_rows import random_rows

TOKENS, WIDTH, RANK = 40, 24, 4
PACKED = pack(random_rows(2))
KEEP = torch.rand(TOKENS, WIDTH, generator=torch.Generator().manual_seed(5)) < 0.7
ANGLES = torch.rand(TOKENS, 4, generator=torch.Generator().manual_seed(6))
Tensors = tuple[torch.Tensor, ...]


def adapted(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, keep: torch.Tensor | None = None) -> Linear:
    return Linear(weight, None, a, b, keep, scale=2.0)


def heads(x: torch.Tensor) -> torch.Tensor:
    cos, sin = (angle.to(x.dtype) for angle in (ANGLES.cos(), ANGLES.sin()))
    return torch.cat([group.flatten(1) for group in split_heads(x, cos, sin, [2, 1, 1], num_rotated=2)], dim=1)


X, WEIGHT, NORM = (TOKENS, WIDTH), (WIDTH, WIDTH), (WIDTH,)
A, B = (RANK, WIDTH), (WIDTH, RANK)
CASES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), [X, NORM], []),
    "linear": (lambda x, w, a, b: linear(x, adapted(w, a, b)), [X, WEIGHT], [A, B]),
    "linear with dropout": (lambda x, w, a, b: linear(x, adapted(w, a, b, KEEP), residual=x), [X, WEIGHT], [A, B]),
    "every weight": (lambda x, w: linear(x, Linear(w)), [X], [WEIGHT]),
    "normed_linear": (
        lambda h, n, w, a, b: normed_linear(h, adapted(w, a, b), weight=n, eps=1e-5)[0],
        [X, NORM, WEIGHT],
        [A, B],
    ),
    "gated_mlp": (
        lambda h, n, up, gate, down, a, b: gated_mlp(h, n, 1e-5, [Linear(gate), Linear(up)], adapted(down, a, b), 16),
        [X, NORM, WEIGHT, WEIGHT, WEIGHT],
        [A, B],
    ),
    "split_heads": (heads, [(TOKENS, 32)], []),
    "attention": (
        lambda q, k, v: attention(q, k, v, PACKED.layout, window=7),
        [(PACKED.num_computed, 4, 8), (PACKED.num_computed, 2, 8), (PACKED.num_computed, 2, 8)],
        [],
    ),
    "take_keys": (lambda x: take_keys(x, torch.arange(TOKENS).repeat(30) // 3), [X], []),
    "summed_head_loss": (
        lambda x, w: summed_head_loss(x, w, torch.arange(TOKENS) % 60, counts=torch.arange(TOKENS)) / 771,
        [X, (60, WIDTH)],
        [],
    ),
}
"""Function, shapes of inputs in the type of the run, and shapes of weights that train, which stay in fp32."""


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_differ_by_rounding_alone(name: str, dtype: torch.dtype, tolerance: float) -> None:
    function, of_run, trained = CASES[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in of_run]
    inputs += [torch.randn(shape, generator=generator) for shape in trained]
    mine, exact = (evaluate(function, [x.to(wide or x.dtype) for x in inputs]) for wide in (None, torch.float64))
    for index, (one, two) in enumerate(zip(mine, exact, strict=True)):
        assert one.dtype in {dtype, torch.float32, torch.float64}
        assert (one.double() - two).norm() <= tolerance * two.norm(), f"tensor {index} of {name}"


def evaluate(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> Tensors:
    """The result, and the gradient of each input."""
    inputs = [x.requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, inputs, weights))
