import math
import statistics

import pytest
import torch

from finetune.config.schema import Config, LoraSection, ValidationSection
from finetune.data.batches import EvaluationLoader, pad
from finetune.data.encoded import EncodedExamples
from finetune.distributed.launch import launch
from finetune.engine.loss import cross_entropy_per_target
from finetune.inference.losses import LossSums, SplitLosses, sum_losses
from finetune.inference.scores import scores_of
from finetune.inference.verdict import standard_error
from finetune.model.lora import add_lora
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config


@pytest.fixture
def runtime():
    with launch(Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})) as runtime:
        yield runtime


@pytest.fixture
def model():
    return add_lora(build_tiny(tiny_phi3_config()), LoraSection(r=2, dropout=0.5)).train()


def sums(runtime, model, examples, *, rank=0, world_size=1, **keys):
    section = ValidationSection(**{"batch_size": 4, **keys})
    return sum_losses(runtime, model, EvaluationLoader(examples, section, rank=rank, world_size=world_size)).whole


def row_losses(model, examples):
    with torch.no_grad():
        return [cross_entropy_per_target(model.eval(), pad([example])).double() for example in examples]


def test_all_figures_are_those_of_the_single_rows(runtime, model):
    examples = tiny_examples(9)
    found = sums(runtime, model, examples)
    rows = row_losses(model, examples)
    means = torch.stack([row.mean() for row in rows])

    assert found.num_targets == sum(len(row) for row in rows)
    assert found.num_examples == 9
    assert found.loss == pytest.approx(torch.cat(rows).mean().item(), rel=1e-6)
    assert found.standard_error == pytest.approx((means.std() / math.sqrt(9)).item(), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_the_batch_size_does_not_change_the_loss(runtime, model, batch_size):
    examples = tiny_examples(9)
    assert sums(runtime, model, examples, batch_size=batch_size) == pytest.approx(sums(runtime, model, examples))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_sums_of_all_ranks_add_up_to_those_of_one(runtime, model, world_size):
    examples = tiny_examples(9)
    parts = [sums(runtime, model, examples, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert LossSums(*map(sum, zip(*parts, strict=True))) == pytest.approx(sums(runtime, model, examples), rel=1e-12)


def test_measuring_leaves_the_model_in_training_mode_and_without_gradients(runtime, model):
    sums(runtime, model, tiny_examples(3))
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_an_evaluation_that_is_cut_short_says_so_and_nothing_else(runtime, model):
    asked = iter([False, True])
    loader = EvaluationLoader(tiny_examples(9), ValidationSection(batch_size=4))
    found = sum_losses(runtime, model, loader, is_to_stop=lambda: next(asked))
    assert found == SplitLosses(LossSums(num_cut_short=1.0))
    assert model.training


def test_dropout_is_off_while_measuring(runtime, model):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(1.0)
    assert sums(runtime, model, tiny_examples(3)) == sums(runtime, model, tiny_examples(3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_error_of_values_that_are_not_finite_is_not_known(bad):
    assert standard_error([1.0, 2.0, 4.0]) == pytest.approx(statistics.stdev([1.0, 2.0, 4.0]) / math.sqrt(3))
    assert standard_error([1.0]) == standard_error([]) == 0
    assert math.isnan(standard_error([1.0, bad, 4.0]))
    assert math.isnan(LossSums(num_examples=3.0, example_means=bad, squared_example_means=bad).standard_error)
    losses = torch.tensor([[6.0, bad, 0.0], [3.0, 2.0, 0.0]], dtype=torch.float64)
    scores = scores_of(losses, {"exact_match": [1.0, 0.0]})
    assert scores.metrics == {"exact_match": 0.5}
    assert not math.isfinite(scores.loss)
    assert math.isnan(scores.standard_error)


def test_rows_without_a_target_count_for_nothing(runtime, model):
    rows = [([5, 6, 7], [False, True, True]), ([5, 6, 7], [False] * 3)]
    found = sums(runtime, model, EncodedExamples.from_rows(rows, end_id=2))
    assert (found.num_examples, found.num_targets, found.standard_error) == (1, 2, 0.0)
    # The other row changes the shape of the products, so only the counts have to be the same.
    alone = sums(runtime, model, EncodedExamples.from_rows(rows[:1], end_id=2))
    assert (alone.num_examples, alone.num_targets) == (1, 2)
    assert found.loss == pytest.approx(alone.loss, rel=1e-6)
