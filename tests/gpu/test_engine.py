"""The engine against the model's own forward on the same device: the loss and all gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from finetune.data.batches import pad
from finetune.data.encoded import EncodedExample
from finetune.distributed.device import DTYPES, Precision
from finetune.engine.layout import pack
from finetune.engine.linear import Linear, linear
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.engine.supported import unsupported_reason
from finetune.model.base import checkpoint_gradients
from tests.engine.prefix_rows import random_rows
from tests.engine.test_bf16_adapters import ALPHA, RANK, SHAPES, kept, tensors_of
from tests.gpu.models import FAMILIES, LONGROPE_BOUNDARY, PRECISIONS, placed

ROWS = [EncodedExample(*row) for row in random_rows(3, longest=70, targets=0.5) if len(row[0]) > 1]
NUM_TOKENS = sum(len(row.input_ids) for row in ROWS)
TOLERANCES = {"cpu": (1e-6, 1e-5), "cuda": (1e-5, 1e-4)}
"""In fp32: of the loss, and of all gradients together. CUDA's kernels add up in other orders."""


class Computed(NamedTuple):
    """The loss of all rows, and all its gradients in one vector."""

    loss: float
    gradient: torch.Tensor


def computed(model: Any, microbatches: Sequence[Microbatch], device: torch.device, precision: Precision) -> Computed:
    model.zero_grad()
    total = 0.0
    for microbatch in microbatches:
        with torch.autocast(device.type, dtype=DTYPES[precision], enabled=precision != "fp32"):
            loss = summed_cross_entropy(model, microbatch.to(device))
        (loss / NUM_TOKENS).backward()  # the mean, as in a step: gradients of the sum overflow in fp16
        total += loss.item()
    gradients = [weight.grad for weight in model.parameters() if weight.requires_grad]
    assert all(gradient is not None and gradient.device == device for gradient in gradients)
    return Computed(total, torch.cat([gradient.detach().cpu().double().flatten() for gradient in gradients]))


def errors(mine: Computed, theirs: Computed) -> tuple[float, float]:
    """Relative, of the loss and of the gradients."""
    difference = (mine.gradient - theirs.gradient).norm() / theirs.gradient.norm()
    return abs(mine.loss / theirs.loss - 1), float(difference)


def packed(*, share_prefixes: bool = True) -> list[Microbatch]:
    """As a run packs them: LongRoPE would rotate a row within its boundary by the factors of a longer one."""
    within = [row for row in ROWS if len(row.input_ids) <= LONGROPE_BOUNDARY]
    beyond = [row for row in ROWS if len(row.input_ids) > LONGROPE_BOUNDARY]
    return [pack(rows, share_prefixes=share_prefixes) for rows in (within, beyond)]


def one_by_one() -> list[Microbatch]:
    """For the model's own forward."""
    return [pad([row]) for row in ROWS]


def assert_same_step(
    family: str, device: torch.device, precision: Precision, *, share_prefixes: bool = True, **settings: Any
) -> None:
    """In fp32 equal; in bf16 not much farther from fp32 than the model's own forward in bf16."""
    model = placed(family, precision, device, **settings)
    assert unsupported_reason(model) is None
    ours = computed(model, packed(share_prefixes=share_prefixes), device, precision)
    if precision == "fp32":
        theirs = computed(model, one_by_one(), device, precision)
        for error, most in zip(errors(ours, theirs), TOLERANCES[device.type], strict=True):
            assert error <= most
        return
    exact = computed(placed(family, "fp32", device, **settings), one_by_one(), device, "fp32")
    theirs = computed(model, one_by_one(), device, precision)
    for error, their_error, most in zip(errors(ours, exact), errors(theirs, exact), (2e-3, 1e-2), strict=True):
        assert error <= max(1.5 * their_error, most)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_shared_prefixes(family: str, method: str, precision: Precision, device: torch.device) -> None:
    if (family, precision) == ("gemma-3", "fp16"):
        pytest.skip("the gradients of Gemma overflow in fp16, those of transformers' own forward too")
    assert any(microbatch.num_computed < microbatch.num_tokens for microbatch in packed())
    assert_same_step(family, device, precision, method=method)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_on_rows_apart_and_one_of_layers_that_are_called_as_peft_made_them(
    precision: Precision, device: torch.device
) -> None:
    assert_same_step("phi-4-mini", device, precision, share_prefixes=False)
    assert_same_step("phi-4", device, precision, dora=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_changes_nothing(dropout: float, precision: Precision, device: torch.device) -> None:
    def step(change: Callable[[Any], object]) -> Computed:
        model = placed("phi-4-mini", precision, device, dropout=dropout)
        change(model)
        torch.manual_seed(5)  # of dropout
        return computed(model, packed(), device, precision)

    plain, again = step(lambda model: None), step(checkpoint_gradients)
    for error, most in zip(errors(again, plain), TOLERANCES[device.type], strict=True):
        assert error <= most
    assert plain.gradient.isfinite().all()


@pytest.mark.parametrize("steps", [6, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_a_young_adapter_keeps_its_effect_in_bf16(name: str, steps: int, device: torch.device) -> None:
    """What tests/engine/test_bf16_adapters.py says of a CPU: the kernels of a GPU add up in another order."""
    x, weight, residual, a, b = (part.to(device) for part in tensors_of(SHAPES[name], steps))
    exact = ALPHA / RANK * (x.double() @ a.double().t() @ b.double().t())
    layer = Linear(weight, lora_a=a, lora_b=b, scale=ALPHA / RANK)
    silent = layer._replace(lora_b=torch.zeros_like(b))
    for added, lost in ((None, 0.02), (residual, 0.05)):
        tuned, base = (linear(x, one, residual=added) for one in (layer, silent))
        assert abs(1 - kept(tuned, base, exact)) < lost
