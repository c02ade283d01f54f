"""Products in fp8, with the `_scaled_mm` of a CPU: against float64, within bounds that follow from rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from finetune.engine import quantized
from finetune.engine.adapted import Fp8Linear
from finetune.engine.linear import Linear, linear
from finetune.engine.products import FP8
from finetune.engine.quantized import (
    MULTIPLE,
    ROUNDING,
    input_gradient_in_fp8,
    product_in_fp8,
    rounded_to_fp8,
)

ROWS, IN, OUT = 24, 64, 48
STEP = 2.0**-10
"""The largest error below the normal numbers of e4m3, in units of the scale."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.manual_seed(0)
    quantized.why_not_fp8.cache_clear()
    yield
    quantized.why_not_fp8.cache_clear()


def spread(rows: int, features: int) -> torch.Tensor:
    """Values over eight orders of magnitude, with rows of different sizes."""
    return torch.randn(rows, features) * 10 ** (4 * torch.rand(rows, features) - 4) * 10 ** (4 * torch.rand(rows, 1))


def widened(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return values.double() * scale.double()


def rounding_error(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """By how much rounding may move each element; the fp32 quotient of x and scale rounds once more."""
    return x.double().abs() * (ROUNDING + 2**-22) + STEP * scale.double()


def sum_error(products: torch.Tensor, terms: int, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far a sum in fp32 and a result in this type may be off: Higham, 2nd ed., section 3.1."""
    return (terms + 4) * torch.finfo(torch.float32).eps * products + torch.finfo(dtype).eps * exact.abs()


def test_rounding_moves_a_value_by_at_most_a_sixteenth_of_it_or_of_a_step() -> None:
    x = spread(ROWS, IN)
    values, scale = rounded_to_fp8(x, None)
    assert (values.dtype, scale.dtype, scale.shape) == (FP8, torch.float32, (ROWS, 1))
    assert values.is_contiguous()
    assert ((widened(values, scale) - x.double()).abs() <= rounding_error(x, scale)).all()
    assert (values.float().abs().amax(1) == 448).all(), "each row uses the whole range"
    assert ((widened(values, scale) - x.double()).abs() > x.double().abs() * ROUNDING / 2).any(), "fp8 is this coarse"
    with_factors = rounded_to_fp8(x, torch.full((IN,), 2.0))
    assert torch.equal(with_factors[0].float(), values.float())
    assert torch.equal(with_factors[1], 2 * scale)


def test_rows_of_zeros_are_zeros_and_rows_that_are_not_finite_stay_so() -> None:
    x = torch.ones(4, IN)
    x[0], x[1, 3], x[2, 5] = 0, float("nan"), float("inf")
    weight = Fp8Linear(frozen(bias=False))
    y = product_in_fp8(x, weight.weight, weight.row_scale)
    assert (y[0] == 0).all()
    assert y[1:3].isfinite().logical_not().all()
    assert y[3].isfinite().all()
    assert product_in_fp8(x[:0], weight.weight, weight.row_scale).shape == (0, OUT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_product_is_that_of_its_rounded_factors_and_near_that_of_its_factors(dtype: torch.dtype) -> None:
    x, weight = spread(ROWS, IN).to(dtype), spread(OUT, IN)
    (x8, x_scale), (w8, w_scale) = rounded_to_fp8(x, None), rounded_to_fp8(weight, None)
    y = product_in_fp8(x, w8, w_scale[:, 0])
    assert y.dtype == dtype
    left, right = widened(x8, x_scale), widened(w8, w_scale)
    exact, magnitude = left @ right.t(), left.abs() @ right.abs().t()
    assert ((y.double() - exact).abs() <= sum_error(magnitude, IN, exact, dtype)).all()
    dx, dw = rounding_error(x, x_scale), rounding_error(weight, w_scale)
    moved = dx @ right.abs().t() + x.double().abs() @ dw.t()
    unrounded = x.double() @ weight.double().t()
    assert ((y.double() - unrounded).abs() <= moved + sum_error(magnitude, IN, exact, dtype)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_gradient_of_an_input_is_that_of_the_rounded_weight(dtype: torch.dtype) -> None:
    dy = spread(ROWS, OUT).to(dtype)
    w8, w_scale = rounded_to_fp8(spread(OUT, IN), None)
    row_scale = w_scale[:, 0]
    dx = input_gradient_in_fp8(dy, quantized.transposed(w8), row_scale)
    assert dx.dtype == dtype
    weight = widened(w8, w_scale)
    exact = dy.double() @ weight
    folded = dy.double() * row_scale.double()
    moved = rounding_error(folded, rounded_to_fp8(dy, row_scale)[1]) @ w8.double().abs()
    magnitude = dy.double().abs() @ weight.abs()
    assert ((dx.double() - exact).abs() <= moved + sum_error(magnitude, OUT, exact, dtype)).all()


def frozen(*, bias: bool = True, out: int = OUT) -> torch.nn.Linear:
    return torch.nn.Linear(IN, out, bias=bias).requires_grad_(False)


def adapted(layer: Fp8Linear, a: torch.Tensor, b: torch.Tensor, keep: torch.Tensor | None = None) -> Linear:
    return Linear(layer.weight, layer.bias, a, b, keep, layer.row_scale, 0.5)


def test_everything_beside_the_weight_is_computed_as_without_fp8() -> None:
    """Adapter, dropout, bias, residual and a neighbour in full precision; their gradients do not see the weight."""
    layer, plain = Fp8Linear(frozen()), frozen(out=32)
    x, residual = torch.randn(ROWS, IN), torch.randn(ROWS, OUT + 32)
    a, b, keep = torch.randn(4, IN), torch.randn(OUT, 4), torch.rand(ROWS, IN) < 0.7
    ours = [tensor.clone().requires_grad_() for tensor in (x, residual, a, b)]
    layers = [adapted(layer, ours[2], ours[3], keep), Linear(plain.weight, plain.bias)]
    y = linear(ours[0], *layers, residual=ours[1])
    theirs = [tensor.clone().requires_grad_() for tensor in (x, residual, a, b)]
    low_rank = 0.5 * (theirs[0] * keep) @ theirs[2].t() @ theirs[3].t()
    rounded = product_in_fp8(x, layer.weight, layer.row_scale)
    expected = torch.cat([rounded + layer.bias + low_rank, functional.linear(theirs[0], *plain.parameters())], dim=1)
    expected = expected + theirs[1]
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    y.backward(dy)  # type: ignore[no-untyped-call]
    expected.backward(dy)
    through = input_gradient_in_fp8(dy[:, :OUT], quantized.transposed(layer.weight), layer.row_scale)
    assert theirs[0].grad is not None
    theirs[0].grad += through
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-5)


def test_columns_of_a_layer_are_those_of_its_result() -> None:
    layer = Fp8Linear(frozen())
    read = adapted(layer, torch.randn(4, IN), torch.randn(OUT, 4))
    x = torch.randn(ROWS, IN)
    torch.testing.assert_close(linear(x, read.columns(16, 48)), linear(x, read)[:, 16:48])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_transformers_calls_the_layer_as_the_engine_computes_it(dtype: torch.dtype) -> None:
    layer = Fp8Linear(frozen())
    x = torch.randn(2, 3, IN)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        y = layer(x)
    expected = linear(x.flatten(0, 1).to(dtype), Linear(layer.weight, layer.bias, row_scale=layer.row_scale))
    assert (y.shape, y.dtype) == ((2, 3, OUT), dtype)
    assert torch.equal(y.flatten(0, 1), expected)


def test_the_products_are_asked_for_as_hopper_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows on the left, by columns on the right, sizes that are multiples of 16, a scale for each row and column."""
    seen = []
    compute = torch._scaled_mm

    def look(left: torch.Tensor, right: torch.Tensor, **others: Any) -> torch.Tensor:
        assert left.is_contiguous()
        assert right.t().is_contiguous()
        assert (left.dtype, right.dtype) == (FP8, FP8)
        assert not any(size % MULTIPLE for size in (left.shape[1], *right.shape))
        assert (others["scale_a"].shape, others["scale_b"].shape) == ((len(left), 1), (1, right.shape[1]))
        for scale in (others["scale_a"], others["scale_b"]):
            assert scale.is_contiguous()
            assert scale.dtype == torch.float32
        assert others["out_dtype"] == torch.bfloat16
        seen.append(tuple(right.shape))
        return compute(left, right, **others)

    monkeypatch.setattr(torch, "_scaled_mm", look)
    layers = [Fp8Linear(frozen()), Fp8Linear(frozen(out=32))]
    x = torch.randn(ROWS, IN, dtype=torch.bfloat16, requires_grad=True)
    read = [adapted(layer, torch.randn(4, IN), torch.randn(layer.out_features, 4)) for layer in layers]
    last = read[0].columns(16, 48)
    linear(x, *read, last).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [(IN, OUT), (IN, 32), (IN, 32), (OUT, IN), (32, IN), (32, IN)]


def test_a_device_without_these_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantized.why_not_fp8(CPU) is None
    assert quantized.why_not_fp8(torch.device("mps")) == "mps has no products in fp8"
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA L4")
    why = quantized.why_not_fp8(gpu)
    assert why == "it needs a GPU from Hopper on (capability 9.0), and NVIDIA L4 has capability 8.9"
    quantized.why_not_fp8.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert str(quantized.why_not_fp8(gpu)).startswith("a product fails"), "of a GPU that is not there"
    quantized.why_not_fp8.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert quantized.why_not_fp8(gpu) == "AMD's GPUs have other types of fp8"


def test_a_torch_that_cannot_compute_them_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("scales of rows are not supported\nsecond line")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert str(quantized.why_not_fp8(CPU)).endswith("(RuntimeError: scales of rows are not supported)")
    quantized.why_not_fp8.cache_clear()
    for result, expected in ((16.125, None), (16.25, "a sum of 16 ones is off by 0.25")):
        quantized.why_not_fp8.cache_clear()
        monkeypatch.setattr(torch, "_scaled_mm", lambda *_, result=result, **__: torch.full((16, 16), result))
        assert quantized.why_not_fp8(CPU) == expected
