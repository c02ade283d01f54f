"""A script's own loss is summed over chunks and micro-batches as the built-in loss is."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from finetune.data.batches import pad
from finetune.engine.given_loss import refuse_no_sum, summed_given_loss
from finetune.engine.layout import pack
from finetune.engine.loss import Choices, summed_cross_entropy
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.errors import ConfigError
from tests.rounding import relative_difference
from tests.tiny_models import build_tiny, tiny_examples, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config

ROWS = list(tiny_examples(5))
ROWS = [*ROWS, ROWS[0]]  # two rows that are alike share their terms


def plain(logits, targets):
    assert logits.dtype == torch.float32
    assert logits.shape == (len(targets), logits.shape[1])
    return cross_entropy(logits, targets, reduction="sum")


def loss_and_gradient(compute, model, microbatch, **keys):
    weight = model.get_output_embeddings().weight
    inner = next(model.get_decoder().layers[0].parameters())
    loss = compute(model, microbatch, **keys)
    return loss.detach(), torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, [weight, inner])])


@pytest.mark.parametrize("put_together", [pack, pad], ids=["packed", "padded"])
@pytest.mark.parametrize("config", [tiny_phi3_config(), tiny_phi_config()], ids=["phi3", "phi with a bias"])
def test_the_cross_entropy_as_a_given_function_is_the_built_in_loss(monkeypatch, put_together, config):
    monkeypatch.setattr("finetune.engine.loss_head.MIN_CHUNK_ROWS", 3)
    model, microbatch = build_tiny(config), put_together(ROWS)
    loss, gradient = loss_and_gradient(summed_cross_entropy, model, microbatch)
    choices = Choices(logits_chunk_bytes=1)
    given, its_gradient = loss_and_gradient(summed_given_loss, model, microbatch, choices=choices, function=plain)
    assert given.dtype == torch.float64
    assert relative_difference([given], [loss]) < 1e-6
    assert relative_difference([its_gradient], [gradient]) < 1e-5


def test_a_model_that_caps_its_logits_gives_the_capped_ones():
    model, microbatch = build_tiny(tiny_gemma2_config()), pad(ROWS)
    given = summed_given_loss(model, microbatch, function=plain)
    assert relative_difference([given], [summed_cross_entropy(model, microbatch)]) < 1e-6


@pytest.mark.parametrize("put_together", [pack, pad, lambda _: EMPTY_MICROBATCH], ids=["packed", "padded", "empty"])
def test_a_function_is_not_called_without_targets_and_every_weight_has_a_gradient(put_together):
    """As an empty micro-batch, and one of rows that are cut before their answer, of which a mean would be NaN."""

    def mean_times_number(logits, targets):
        return cross_entropy(logits, targets) * len(targets)

    assert refuse_no_sum(mean_times_number, 11, torch.device("cpu")) is None
    microbatch = put_together([row._replace(is_target=torch.zeros_like(row.is_target)) for row in ROWS])
    loss, gradient = loss_and_gradient(
        summed_given_loss, build_tiny(tiny_phi_config()), microbatch, function=mean_times_number
    )
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits, targets: cross_entropy(logits, targets), "for the same targets in two parts"),
        (lambda logits, targets: cross_entropy(logits, targets, reduction="none"), r"returned shape \(6,\)"),
        (lambda logits, targets: 3.0, "returned float"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        refuse_no_sum(function, 11, torch.device("cpu"))


def test_label_smoothing_and_weights_of_tokens_are_sums():
    weights = torch.linspace(0.5, 2, 11)

    def weighted(logits, targets):
        return cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=0.1)

    assert refuse_no_sum(weighted, 11, torch.device("cpu")) is None
