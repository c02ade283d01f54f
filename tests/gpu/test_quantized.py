"""QLoRA on the device: a base in 4 bits against the weights that these stand for, and a whole run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import load_config
from finetune.config.schema import LoraSection, ModelSection
from finetune.distributed.device import DTYPES, Precision, convert_weights
from finetune.engine.adapted import holds_nf4
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.products import widened
from finetune.engine.supported import called_layers
from finetune.model.base import build_base_model
from finetune.model.lora import add_lora
from finetune.model.quantized import load_in_4_bits
from finetune.training.train import train
from tests.engine.prefix_rows import random_rows
from tests.gpu.models import PRECISIONS, write_inputs
from tests.tiny_training import events, record, words_for

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.fixture(scope="module")
def inputs(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def adapted(base: Any, precision: Precision, device: torch.device) -> Any:
    model: Any = add_lora(base, LoraSection(r=4))
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data = torch.randn(weight.shape).mul(0.1)
    convert_weights(model, precision, device)
    return model.to(device).train()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_four_bits_are_the_weights_that_they_stand_for(
    precision: Precision, device: torch.device, inputs: Path
) -> None:
    section = ModelSection(path=str(inputs / "base"))
    in_four_bits = adapted(load_in_4_bits(section, device), precision, device)
    plain = adapted(build_base_model(section), precision, device)
    assert called_layers(in_four_bits) == {}
    dtype = DTYPES[precision]
    is_quantized = False
    for name, module in in_four_bits.named_modules():
        if holds_nf4(module):
            is_quantized = True
            plain.get_submodule(name).weight.data = widened(module.weight, dtype)
    assert is_quantized
    started = dict(in_four_bits.named_parameters())
    for name, weight in plain.named_parameters():
        if weight.requires_grad:
            weight.data.copy_(started[name].data)
    packed, found = pack(random_rows(3, targets=0.5)).to(device), []
    for model in (in_four_bits, plain):
        with torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32"):
            loss = summed_cross_entropy(model, packed)
        loss.backward()
        found.append((loss.item(), torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])))
    (loss, gradient), (expected, exact) = found
    tolerance = 1e-4 if precision == "fp32" else 1e-2
    assert loss == pytest.approx(expected, rel=tolerance)
    assert (gradient - exact).norm() <= tolerance * exact.norm()


def test_a_run_trains_on_four_bits(device: torch.device, only_on_cuda: None, inputs: Path, tmp_path: Path) -> None:
    own = [f"training.device={device}", "training.precision=auto", "lora.r=4", "optim.learning_rate=1e-2"]
    train(load_config([*words_for(inputs, tmp_path / "run"), *own], task="finetune_qlora"))
    losses = [event["loss"] for event in events(tmp_path / "run", "step")]
    assert losses[-1] < losses[0]
    assert record(tmp_path / "run")["low_precision"]["precision"] == "nf4"
