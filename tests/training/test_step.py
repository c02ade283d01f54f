import math
import os
import signal

import pytest
import torch
from torch.nn import functional

from finetune.config.schema import Config, LoraSection
from finetune.data.batches import pad
from finetune.data.encoded import EncodedExamples
from finetune.distributed.launch import launch
from finetune.errors import DataError, RunFailedError
from finetune.model.lora import add_lora
from finetune.signals import begin_steps
from finetune.training.optim import trainable_parameters
from finetune.training.step import StepSettings, train_step
from tests.tiny_models import build_tiny, tiny_examples, tiny_phi3_config, tiny_phi_config

LEARNING_RATE = 0.5
CONFIGS = {"phi": tiny_phi_config(), "phi3": tiny_phi3_config()}


@pytest.fixture
def runtime():
    with launch(Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})) as runtime:
        yield runtime


def tiny_lora(kind="phi3", dropout=0.0):
    """With an adapter that already does something, so that every gradient is there."""
    model = add_lora(build_tiny(CONFIGS[kind]), LoraSection(r=2, alpha=4.0, dropout=dropout))
    torch.manual_seed(1)
    for parameter in trainable_parameters(model):
        parameter.data.normal_(std=0.2)
    return model.train()


def split(sizes, examples=None):
    """The rows in order, cut into micro-batches of these sizes."""
    rows = iter(list(examples or tiny_examples(8)))
    return [(index, pad([next(rows) for _ in range(size)])) for index, size in enumerate(sizes)]


def step(runtime, model, microbatches, *, optimizer=None, number=1, seed=0, max_grad_norm=None, rate=LEARNING_RATE):
    optimizer = optimizer or torch.optim.SGD(trainable_parameters(model), lr=9.0)
    return train_step(
        runtime,
        model,
        runtime.placement.prepare_optimizer(optimizer),
        microbatches,
        StepSettings(number, rate, max_grad_norm, seed),
    )


def weights(model):
    return [parameter.detach().clone() for parameter in trainable_parameters(model)]


def reference(model, examples):
    """Loss and gradients over all rows in one batch, by the plain forward in float64."""
    model = model.double()
    batch = pad(list(examples))
    logits = model(input_ids=batch.input_ids).logits[:, :-1]
    labels = batch.input_ids.masked_fill(~batch.is_target, -100)[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    return loss.item(), torch.autograd.grad(loss, trainable_parameters(model))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("sizes", [[8], [4, 4], [1] * 8, [5, 2, 1]])
def test_loss_gradient_and_update_are_those_of_one_plain_batch(runtime, kind, sizes):
    expected_loss, expected_gradients = reference(tiny_lora(kind), tiny_examples(8))
    model = tiny_lora(kind)
    before = weights(model)
    result = step(runtime, model, split(sizes))

    assert result.loss == pytest.approx(expected_loss, rel=1e-6)
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in expected_gradients))
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    for old, new, gradient in zip(before, weights(model), expected_gradients, strict=True):
        torch.testing.assert_close(new, (old - LEARNING_RATE * gradient).float(), rtol=1e-5, atol=1e-6)


def test_every_split_into_micro_batches_gives_the_same_losses_over_steps(runtime):
    def curve(sizes):
        model = tiny_lora()
        optimizer = torch.optim.AdamW(trainable_parameters(model), lr=9.0)
        return [step(runtime, model, split(sizes), optimizer=optimizer, number=n, rate=0.01).loss for n in range(1, 5)]

    curves = [curve(sizes) for sizes in ([8], [4, 4], [1] * 8)]
    assert curves[0][-1] < curves[0][0] - 0.01
    for curve in curves[1:]:
        assert all(abs(a - b) <= 1e-6 * max(1, abs(a)) for a, b in zip(curves[0], curve, strict=True))


def test_long_answers_weigh_by_their_tokens_not_by_their_rows(runtime):
    long = ([3, *range(4, 20)], [False, *[True] * 16])
    short = ([3, 30], [False, True])
    rows = EncodedExamples.from_rows([long, short], end_id=2)
    expected, _ = reference(tiny_lora(), rows)
    assert step(runtime, tiny_lora(), split([1, 1], rows)).loss == pytest.approx(expected, rel=1e-6)


def test_the_step_counts_tokens_and_targets_and_repeats_its_rate(runtime):
    examples = tiny_examples(8)
    model = tiny_lora()
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=9.0)
    result = step(runtime, model, split([4, 4]), optimizer=optimizer)
    assert result.num_tokens == int(examples.lengths.sum())
    assert result.num_targets == int(examples.num_targets.sum())
    assert result.learning_rate == optimizer.param_groups[0]["lr"] == LEARNING_RATE


def test_a_signal_during_a_step_is_counted_in_this_step(runtime):
    model = tiny_lora()
    assert step(runtime, model, split([8])).num_preempted == 0
    begin_steps()
    trainable_parameters(model)[0].register_hook(lambda _: os.kill(os.getpid(), signal.SIGUSR1))
    assert step(runtime, model, split([8]), number=2).num_preempted == 1


def test_the_update_is_clipped_and_the_norm_before_that_is_reported(runtime):
    free = step(runtime, tiny_lora(), split([8])).grad_norm
    model = tiny_lora()
    before = weights(model)
    result = step(runtime, model, split([8]), max_grad_norm=free / 4)
    moved = torch.sqrt(sum(((new - old) ** 2).sum() for old, new in zip(before, weights(model), strict=True)))
    assert result.grad_norm == pytest.approx(free)
    assert moved.item() == pytest.approx(LEARNING_RATE * free / 4, rel=1e-4)


def test_dropout_is_a_function_of_seed_step_and_micro_batch_alone(runtime):
    def loss(microbatches, number=1, seed=0, disturb=0):
        torch.manual_seed(disturb)
        return step(runtime, tiny_lora(dropout=0.5), microbatches, number=number, seed=seed).loss

    plain = loss(split([4, 4]))
    assert loss(split([4, 4]), disturb=5) == plain
    assert loss(list(reversed(split([4, 4])))) == pytest.approx(plain, rel=1e-12)
    assert loss(split([4, 4]), number=2) != plain
    assert loss(split([4, 4]), seed=1) != plain
    (_, first), (_, second) = split([4, 4])
    assert loss([(2, first), (1, second)]) != plain


def assert_same(before, after):
    assert len(before) == len(after) > 0
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_step_whose_loss_is_not_finite_is_as_if_it_had_not_been(runtime, value):
    model, other = tiny_lora(), tiny_lora()
    optimizers = [torch.optim.AdamW(trainable_parameters(each), lr=9.0) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        step(runtime, each, split([8]), optimizer=optimizer)
    embedding = model.get_input_embeddings().weight.data
    good = embedding.clone()
    embedding[tiny_examples(8)[3].input_ids[0]] = float(value)
    skipped = step(runtime, model, split([4, 4]), optimizer=optimizers[0], number=2)
    assert skipped.is_skipped
    assert not math.isfinite(skipped.loss)
    assert skipped.not_finite == f"the loss is {skipped.loss} and the gradient norm {skipped.grad_norm}"
    assert_same(weights(other), weights(model))
    assert all(parameter.grad is None for parameter in model.parameters())

    embedding.copy_(good)
    results = [
        step(runtime, each, split([8]), optimizer=optimizer, number=3)
        for each, optimizer in zip((model, other), optimizers, strict=True)
    ]
    assert results[0] == results[1]
    assert not results[0].is_skipped
    assert_same(weights(other), weights(model))
    moments = [[state["exp_avg_sq"] for state in optimizer.state.values()] for optimizer in optimizers]
    assert_same(*moments)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("factor", ["inf", "nan", "1e30"])
def test_a_gradient_whose_norm_is_not_finite_reaches_no_weight_though_the_loss_is(runtime, factor, max_grad_norm):
    """At 1e30 Adam's squares overflow, though the norm does not; clipping by an infinite one would make zeros."""
    model = tiny_lora()
    trainable_parameters(model)[0].register_hook(lambda gradient: gradient * float(factor))
    before = weights(model)
    result = step(runtime, model, split([8]), max_grad_norm=max_grad_norm)
    assert math.isfinite(result.loss)
    assert result.not_finite.endswith(f"and the gradient norm {result.grad_norm}")
    assert not result.grad_norm < 1e19
    assert_same(before, weights(model))


def test_trained_weights_that_are_not_finite_end_the_run_since_no_step_could_help(runtime):
    model = tiny_lora()
    optimizer = torch.optim.SGD(trainable_parameters(model), lr=9.0)
    trainable_parameters(model)[0].register_hook(lambda gradient: gradient * 1e9)
    assert not step(runtime, model, split([8]), optimizer=optimizer, rate=1e38).is_skipped
    step_2 = r"step 2: the loss is nan and the gradient norm nan; 1 of the trained weights hold"
    with pytest.raises(RunFailedError, match=step_2 + r".*Lower optim\.learning_rate.*resume=auto"):
        step(runtime, model, split([8]), optimizer=optimizer, number=2)


def test_a_global_batch_without_a_target_is_refused_before_anything_is_computed(runtime):
    model = tiny_lora()
    model.forward = None
    empty = EncodedExamples.from_rows([([5, 6], [False, False])], end_id=2)
    with pytest.raises(DataError, match="no row of step 1 has a target token"):
        step(runtime, model, split([1], empty))


def test_a_micro_batch_without_targets_changes_nothing(runtime):
    empty = EncodedExamples.from_rows([([5, 6], [False, False])], end_id=2)
    model, other = tiny_lora(), tiny_lora()
    result = step(runtime, model, [*split([8]), (1, pad(list(empty)))])
    assert result.loss == step(runtime, other, split([8])).loss
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))


def test_bf16_computes_close_to_fp32_and_keeps_trained_weights_in_fp32():
    section = {"training": {"device": "cpu", "precision": "bf16"}}
    expected, _ = reference(tiny_lora(), tiny_examples(8))
    with launch(Config.model_validate(section)) as runtime:
        model = tiny_lora()
        runtime.placement.place(model)
        result = step(runtime, model, split([4, 4]))
    assert result.loss == pytest.approx(expected, rel=0.02)
    assert result.loss != pytest.approx(expected, rel=1e-6)
    assert {p.dtype for p in trainable_parameters(model)} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
