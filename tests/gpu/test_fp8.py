"""A base in fp8 on the device: products against float64, whole models against bf16, and a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import load_config
from finetune.engine.fused import fused_or_not
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.quantized import input_gradient_in_fp8, product_in_fp8, rounded_to_fp8, transposed, why_not_fp8
from finetune.model.quantized import round_frozen_layers
from finetune.training.low_precision import GRADIENT_LIMIT, loss_limit
from finetune.training.train import train
from tests.engine.prefix_rows import random_rows
from tests.engine.test_fp8 import rounding_error, spread, sum_error, widened
from tests.gpu.models import FAMILIES, placed, write_inputs
from tests.tiny_training import adapter_tensors, events, record, words_for

CUT_OFF = 33 * 4 * 2.0**-13
"""Hopper's tensor cores add 32 products to a sum at once, and keep 14 bits of each of these 33 terms, counted from the
largest one (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). So a term is off by 2^-13 of the largest one. The products
and the sum are at most as large as all products of the four additions after which the sum goes to fp32."""
SIZES = [(1, 64, 48), (333, 512, 256), (1024, 3072, 1024)]
"""Rows, in_features and out_features."""


@pytest.fixture(scope="module", autouse=True)
def _has_fp8(device: torch.device) -> None:
    why = why_not_fp8(device)
    if why is not None:
        pytest.skip(why)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_those_of_the_rounded_factors(device: torch.device, size: tuple[int, int, int]) -> None:
    rows, inside, out = size
    torch.manual_seed(0)
    x, dy = (spread(rows, width).bfloat16().to(device) for width in (inside, out))
    w8, scale = rounded_to_fp8(spread(out, inside).to(device), None)
    row_scale = scale[:, 0]
    x8, x_scale = rounded_to_fp8(x, None)
    left, weight = widened(x8, x_scale), widened(w8, scale)
    exact = left @ weight.t()
    kept = CUT_OFF if device.type == "cuda" else 0.0
    magnitude = left.abs() @ weight.abs().t()
    error = (product_in_fp8(x, w8, row_scale).double() - exact).abs()
    assert (error <= kept * magnitude + sum_error(magnitude, inside, exact, torch.bfloat16)).all()
    exact = dy.double() @ weight
    moved = rounding_error(dy.double() * row_scale, rounded_to_fp8(dy, row_scale)[1]) @ w8.double().abs()
    magnitude = dy.double().abs() @ weight.abs()
    error = (input_gradient_in_fp8(dy, transposed(w8), row_scale).double() - exact).abs()
    assert (error <= moved + kept * magnitude + sum_error(magnitude, out, exact, torch.bfloat16)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_near_the_one_in_bf16(device: torch.device, family: str) -> None:
    model: Any = placed(family, "bf16", device)
    rounded = copy.deepcopy(model)
    layers = round_frozen_layers(rounded)
    assert len(layers.rounded) == len(layers.rounded + layers.kept) > 0
    rows, found = pack(random_rows(3, targets=0.5)).to(device), []
    for each in (model, rounded):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            mean = summed_cross_entropy(each, rows) / rows.num_targets
        mean.backward()  # type: ignore[no-untyped-call]
        gradients = [weight.grad.flatten() for weight in each.parameters() if weight.grad is not None]
        found.append((mean.item(), torch.cat(gradients)))
    (loss, gradient), (loss_fp8, gradient_fp8) = found
    assert abs(loss_fp8 - loss) <= loss_limit(loss)
    assert (gradient_fp8 - gradient).norm() <= GRADIENT_LIMIT * gradient.norm()


def test_fused_rounding_is_that_of_the_formula(device: torch.device, only_on_cuda: None) -> None:
    """A compiled division may differ in its last bit, and then a value between two of e4m3 is rounded to the other."""
    x, factors = torch.randn(512, 384, device=device).bfloat16(), torch.rand(384, device=device) + 0.5
    expected, scale = rounded_to_fp8(x, factors)
    with fused_or_not(True):
        values, fused_scale = rounded_to_fp8(x, factors)
    torch.testing.assert_close(fused_scale, scale, rtol=1e-6, atol=0)
    torch.testing.assert_close(values.float(), expected.float(), rtol=2**-3, atol=2**-9)
    assert (values.float() != expected.float()).float().mean() < 1e-3


def test_a_run_trains_on_fp8_and_repeats_itself(device: torch.device, tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    own = [f"training.device={device}", "training.precision=bf16", "lora.r=4", "optim.learning_rate=1e-2"]
    for name in ("one", "other"):
        words = [*words_for(inputs, tmp_path / name), *own, "model.frozen_precision=fp8"]
        train(load_config([*words, "training.deterministic=true"], task="finetune_lora"))
    losses = [event["loss"] for event in events(tmp_path / "one", "step")]
    assert losses[-1] < losses[0]
    assert record(tmp_path / "one")["low_precision"] == record(tmp_path / "other")["low_precision"]
    other = adapter_tensors(tmp_path / "other")
    assert all(torch.equal(tensor, other[name]) for name, tensor in adapter_tensors(tmp_path / "one").items())
