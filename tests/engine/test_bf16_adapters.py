"""What bf16 leaves of the effect of an adapter that has trained for a few steps only.

Such an adapter changes most results by less than half a step of bf16. If its part is added to a product that is rounded
already, it is rounded away. Added before, it moves as many results to the next step as it should.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from finetune.engine.kv_cache import can_pack, copied, packed_layers
from finetune.engine.linear import Linear, linear, merge_adapters
from finetune.engine.products import LowRank, product

SHAPES = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}
"""(in, out) of the linear layers of SmolLM2-135M."""
RANK, ALPHA, LEARNING_RATE, ROWS = 16, 32, 2e-4, 256


def tensors_of(shape: tuple[int, int], steps: int) -> tuple[torch.Tensor, ...]:
    """Input, weight and residual in bf16; A as PEFT draws it, and B as large as AdamW makes it in so many steps."""
    torch.manual_seed(0)
    features, width = shape
    x, weight = torch.randn(ROWS, features), torch.randn(width, features) * features**-0.5
    a = nn.init.kaiming_uniform_(torch.empty(RANK, features), a=5**0.5)
    b = LEARNING_RATE * torch.randint(-steps, steps + 1, (width, RANK))
    return x.bfloat16(), weight.bfloat16(), torch.randn(ROWS, width).bfloat16() * 4, a, b


def kept(tuned: torch.Tensor, base: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the part of the exact effect that two results in bf16 differ by, all elements together."""
    return float(((tuned.double() - base.double()) * exact).sum() / exact.square().sum())


@pytest.mark.parametrize("steps", [6, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_a_young_adapter_keeps_its_effect(name: str, steps: int) -> None:
    x, weight, residual, a, b = tensors_of(SHAPES[name], steps)
    exact = ALPHA / RANK * (x.double() @ a.double().t() @ b.double().t())
    layer = Linear(weight, lora_a=a, lora_b=b, scale=ALPHA / RANK)
    silent = layer._replace(lora_b=torch.zeros_like(b))
    assert merge_adapters([layer], x.dtype)[0] is layer  # for answers, too: their sum would be rounded to 16 bits
    assert abs(1 - kept(linear(x, layer), linear(x, silent), exact)) < 0.02
    (beside,), (silent_beside,) = (copied([one], x.dtype, packs=True) for one in (layer, silent))
    assert beside.lora_a is not None  # not merged
    if can_pack(x.dtype, ROWS):
        (beside,), (silent_beside,) = packed_layers([beside], x.dtype), packed_layers([silent_beside], x.dtype)
        with torch.no_grad():
            assert abs(1 - kept(linear(x, beside), linear(x, silent_beside), exact)) < 0.02
    after = [linear(x, one, residual=residual) for one in (layer, silent)]
    assert abs(1 - kept(*after, exact)) < 0.05  # four times as large a residual rounds four times as coarsely

    model = nn.Sequential(nn.Linear(*SHAPES[name], bias=False))
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["0"])
    peft = get_peft_model(model, settings, autocast_adapter_dtype=False).bfloat16()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter, value in zip(peft.parameters(), (weight, a, b), strict=True):
            parameter.copy_(value)
        tuned = peft(x)
        with peft.disable_adapter():
            lost = 1 - kept(tuned, peft(x), exact)
    print(f"{name}, {steps} steps: PEFT loses {lost:.1%}")
    assert steps == 40 or lost > 0.02


def test_the_gradient_of_an_input_keeps_the_adapters_part() -> None:
    x, weight, residual, a, b = tensors_of(SHAPES["o"], 6)
    exact = 2.0 * (x.double() @ b.double() @ a.double())
    low_rank = LowRank(x @ b.bfloat16(), a.bfloat16().t(), 2.0)
    tuned, base = (product(x, weight.t(), residual=residual, low_rank=part) for part in (low_rank, None))
    assert abs(1 - kept(tuned, base, exact)) < 0.05
