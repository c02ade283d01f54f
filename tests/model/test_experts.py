"""A mixture of experts trains along the routes that it takes in evaluation, whatever shares the micro-batch."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Lfm2Config

from finetune.config.schema import LoraSection, ModelSection
from finetune.data.batches import pad
from finetune.engine.loss import cross_entropy_per_target
from finetune.model.base import build_base_model, route_by_score
from finetune.model.lora import add_lora, without_adapter
from tests.model.variants import VARIANTS
from tests.tiny_models import SIZES, build_tiny, tiny_examples, tiny_phi3_config

MOE = VARIANTS["Phi-3.5-MoE"]


def losses(model: torch.nn.Module, batches: list[list[int]], seed: int) -> torch.Tensor:
    """In training mode."""
    rows = tiny_examples(4, longest=12)
    torch.manual_seed(seed)
    model.train()
    return torch.cat([cross_entropy_per_target(model, pad([rows[row] for row in batch])) for batch in batches])


def test_training_is_the_same_whatever_the_seed_and_the_cut() -> None:
    base = build_tiny(MOE.config(vocab_size=64))
    drawn = losses(base, [[0, 1, 2, 3]], 0)
    assert not torch.allclose(drawn, losses(base, [[0, 1, 2, 3]], 1), atol=1e-4), "transformers draws no lot any more"
    assert route_by_score(base) == 2
    reference = losses(base, [[0, 1, 2, 3]], 0)
    torch.testing.assert_close(losses(base, [[0, 1, 2, 3]], 1), reference, rtol=0, atol=0)
    torch.testing.assert_close(losses(base, [[0], [1, 2], [3]], 2), reference, rtol=1e-5, atol=1e-5)
    model = add_lora(base, LoraSection(r=2))
    torch.testing.assert_close(losses(model, [[0, 1], [2, 3]], 3), reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses(without_adapter(model), [[0, 1, 2, 3]], 4), reference, rtol=1e-5, atol=1e-5)


def test_a_built_model_routes_by_score_and_the_adapter_leaves_router_and_experts_alone(
    tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    build_tiny(MOE.config(vocab_size=64)).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "finetune"):
        model = build_base_model(ModelSection(path=str(tmp_path)))
        assert "experts are chosen by score in training too" in caplog.text
        adapted = add_lora(model, LoraSection(r=2))
    assert "leaves the experts as they are: 12,288 parameters" in caplog.text
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert not any("router" in name or "experts" in name for name in trained)
    first, second = losses(adapted, [[0, 1]], 0), losses(adapted, [[0, 1]], 1)
    assert torch.equal(first, second)
    first.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in adapted.named_parameters() if n in trained)


def test_the_weights_of_a_convolution_are_not_called_experts(caplog: pytest.LogCaptureFixture) -> None:
    sizes = SIZES | {"num_key_value_heads": 2, "vocab_size": 64}
    model = build_tiny(Lfm2Config(**sizes, layer_types=["conv", "full_attention"]))
    assert any(isinstance(layer, torch.nn.Conv1d) for layer in model.modules())
    with caplog.at_level(logging.INFO, "finetune"):
        add_lora(model, LoraSection(r=2))
    assert "experts" not in caplog.text


def test_a_dense_model_has_nothing_to_route() -> None:
    assert route_by_score(build_tiny(tiny_phi3_config())) == 0
