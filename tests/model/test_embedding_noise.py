"""NEFTune: the noise has the paper's size, belongs to the micro-batch, and is gone where nothing trains."""

from __future__ import annotations

import pytest
import torch

from finetune.config.schema import Config, LoraSection
from finetune.data.batches import pad
from finetune.distributed.launch import launch
from finetune.engine.supported import unsupported_reason
from finetune.model.base import evaluation_mode
from finetune.model.embedding_noise import add_embedding_noise
from finetune.model.lora import add_lora
from finetune.training.optim import trainable_parameters
from finetune.training.step import StepSettings, train_step
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config
from tests.tiny_training import (
    curve,
    record,
    refuse_to_differ_after_a_break,
    train,
    words_for,
)


@pytest.fixture
def runtime():
    with launch(Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})) as runtime:
        yield runtime


def noisy_model(alpha=5.0):
    model = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2))
    torch.manual_seed(1)
    for parameter in trainable_parameters(model):
        parameter.data.normal_(std=0.2)
    if alpha:
        add_embedding_noise(model, alpha)
    return model.train()


def microbatches():
    rows = list(tiny_examples(6))
    return [(0, pad(rows[:2])), (1, pad(rows[2:4])), (2, pad(rows[4:]))]


def step(runtime, model, share, *, number=1, seed=0):
    optimizer = runtime.placement.prepare_optimizer(torch.optim.SGD(trainable_parameters(model), lr=0.1))
    settings = StepSettings(number, learning_rate=0.1, max_grad_norm=None, seed=seed)
    return train_step(runtime, model, optimizer, share, settings).loss


def test_the_noise_is_uniform_and_as_large_as_the_paper_says():
    model = noisy_model(alpha=5.0)
    embedding = model.get_input_embeddings()
    ids = torch.arange(3, 43).repeat(50, 1)
    torch.manual_seed(0)
    noise = embedding(ids) - embedding.weight[ids]
    bound = 5.0 / (40 * 16) ** 0.5
    assert 0.99 * bound < noise.abs().max() <= bound * (1 + 1e-5)
    assert abs(noise.mean()) < 0.01 * bound
    assert noise.std() == pytest.approx(bound / 3**0.5, rel=0.01), "the standard deviation of a uniform distribution"


def test_the_noise_belongs_to_seed_step_and_micro_batch_and_to_no_rank(runtime):
    """Ranks are dealt whole micro-batches: whoever computes one, and after whatever others, gets its noise."""
    share = microbatches()
    loss = step(runtime, noisy_model(), share)
    assert step(runtime, noisy_model(), share) == loss
    assert step(runtime, noisy_model(), share[::-1]) == pytest.approx(loss, rel=1e-12)
    others = [
        step(runtime, noisy_model(), share, number=2),
        step(runtime, noisy_model(), share, seed=1),
        step(runtime, noisy_model(), [(3, share[0][1]), *share[1:]]),
        step(runtime, noisy_model(alpha=0), share),
    ]
    assert len({loss, *others}) == 5


def test_an_evaluation_sees_no_noise_and_nothing_of_it_is_saved():
    ids = torch.arange(3, 13)[None]
    noisy, plain = noisy_model(), noisy_model(alpha=0)
    with evaluation_mode(noisy), evaluation_mode(plain):
        assert torch.equal(noisy(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert noisy.state_dict().keys() == plain.state_dict().keys()


def test_the_engine_leaves_such_a_model_to_its_own_forward():
    assert unsupported_reason(noisy_model()) == "embed_tokens has noise (training.neftune_alpha)"
    whole = add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2, modules_to_save=["embed_tokens"]))
    assert unsupported_reason(whole) == "embed_tokens is a ModulesToSaveWrapper (lora.modules_to_save)"


# --- whole runs ---------------------------------------------------------------------------------------------------

WORDS = ["training.neftune_alpha=5", "lora.r=4", "optim.learning_rate=1e-2"]


@pytest.mark.slow
def test_a_run_trains_and_goes_on_exactly_after_a_break(inputs, tmp_path):
    words = [*words_for(inputs, tmp_path / "whole"), *WORDS]
    train(words)
    assert "has noise (training.neftune_alpha)" in record(tmp_path / "whole")["fallbacks"][0]["why"]
    refuse_to_differ_after_a_break(words, tmp_path / "whole", tmp_path / "broken")
    train([*words, f"output_dir={tmp_path / 'quiet'}", "training.neftune_alpha=0"])
    assert curve(tmp_path / "quiet")[0]["loss"] != curve(tmp_path / "whole")[0]["loss"]
