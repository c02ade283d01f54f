"""GRPO and its kin: loss, gradient and metrics are TRL's in fp32, by every way, however a global batch is cut."""

from __future__ import annotations

import importlib
import math
import statistics
from collections import defaultdict
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from finetune.config.schema import GrpoSection
from finetune.data.encoded import EncodedExample
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.model.base import evaluation_mode
from finetune.training.optim import trainable_parameters
from finetune.training.rewards.groups import (
    METRICS,
    GroupLoss,
    GroupNats,
    ScoredAnswer,
    advantages_of,
    nats_of_tokens,
    put_answers_together,
    summed_group_loss,
)
from tests.rounding import relative_difference, rounding_of
from tests.training.preferences.test_preference_loss import COLLATIONS, tiny_lora
from tests.training.preferences.test_preference_objectives import trl_trainer

LONGEST = 8
PROMPT = 20
LENGTHS = (3, 5, 8, 1, 6, 2)
"""Of the answers: three to each of two prompts, in turn. The prompts are long enough to be shared."""
ADVANTAGES = (1.25, -0.75, 0.5, -1.5, 0.0, 1.0)
PROMISED = 1e-5
"""Promise 1: of gradients, as a share of their norm."""


class Case(NamedTuple):
    """What the loss depends on besides the answers."""

    loss_type: str = "dapo"
    level: str = "token"
    beta: float = 0.0
    temperature: float = 1.0
    is_later: bool = False
    epsilon_high: float | None = 0.3

    def loss(self):
        return GroupLoss(
            GrpoSection(
                loss_type=self.loss_type,
                importance_sampling_level=self.level,
                beta=self.beta,
                epsilon=0.1,
                epsilon_high=self.epsilon_high,
            ),
            LONGEST,
        )

    def __str__(self):
        return "-".join(map(str, self))


TYPES = ("dapo", "grpo", "dr_grpo", "bnpo", "cispo")
CASES = [
    *(Case(name, "token", 0.04, temperature=0.7, is_later=True) for name in TYPES),
    *(Case(name, "sequence", 0.0, temperature=0.7, is_later=True) for name in TYPES),
    Case("dapo", "sequence", beta=0.04),
    Case("grpo"),
    Case(is_later=True, epsilon_high=None),
]


@cache
def ids_of_answers():
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 64, (PROMPT,), generator=generator) for _ in range(2)]
    return [
        torch.cat([prompts[place % 2], torch.randint(3, 64, (length,), generator=generator)])
        for place, length in enumerate(LENGTHS)
    ]


def scored(old=None):
    """The answers, with their advantages and old nats."""
    return [
        ScoredAnswer(EncodedExample(ids, torch.arange(len(ids)) >= PROMPT), advantage, None if old is None else nats)
        for ids, advantage, nats in zip(ids_of_answers(), ADVANTAGES, old or ADVANTAGES, strict=True)
    ]


@cache
def moved_weights():
    """Adapter weights after some steps on the answers, from those of `tiny_lora`."""
    model = tiny_lora()
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=5e-3)
    loss, batch = Case().loss(), put_answers_together(scored(), rows=COLLATIONS["padded"], num_targets=1)
    for _ in range(2):
        summed_group_loss(model, batch, loss=loss, temperature=1.0)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in trainable_parameters(model)]


def moved():
    model = tiny_lora()
    for weight, after in zip(trainable_parameters(model), moved_weights(), strict=True):
        weight.data.copy_(after)
    return model


@cache
def old_nats(temperature):
    """Of each answer's tokens under the weights before they moved: the model's own logits, rounded to fp32."""
    found = []
    for ids in ids_of_answers():
        with torch.no_grad():
            logits = tiny_lora()(input_ids=ids[None]).logits[0, PROMPT - 1 : -1]
        log_p = torch.log_softmax(logits / temperature, -1)
        found.append((-log_p.gather(1, ids[PROMPT:, None])[:, 0]).tolist())
    return found


def global_batch(case):
    return scored(old_nats(case.temperature) if case.is_later else None)


def ours(case, cuts, way):
    """Means and gradient of a global batch that is cut into micro-batches."""
    model, loss = moved(), case.loss()
    answers = [answer for cut in cuts for answer in cut]
    num_tokens = sum(int(answer.row.is_target.sum()) for answer in answers)
    whole = loss.denominator(len(answers), num_tokens)
    microbatches = [
        put_answers_together(cut, rows=COLLATIONS[way], num_targets=whole, per_token=whole / num_tokens) for cut in cuts
    ]
    sums = [summed_group_loss(model, batch, loss=loss, temperature=case.temperature) for batch in microbatches]
    mean = torch.stack(sums).sum(0) / whole
    gradient = torch.autograd.grad(mean[0], trainable_parameters(model))
    return mean[0].detach(), gradient, dict(zip(METRICS, mean[1:].tolist(), strict=True))


def in_columns(values, fill=0.0):
    """Values of each answer's tokens, padded on the right."""
    rows = [torch.as_tensor(each) for each in values]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


@cache
def of_trl(case):
    """TRL's loss, gradient and metrics."""
    model = moved()
    outputs = ("log_probs", "entropy")
    add_head = importlib.import_module("trl.trainer.utils").add_fused_lm_head
    add_head(model.get_base_model(), temperature=case.temperature, outputs=outputs)
    trainer = trl_trainer(
        "trl.GRPOTrainer",
        model=model,
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=False, steps_per_generation=1, report_to=[], logging_steps=1
        ),
        state=SimpleNamespace(global_step=0),
        loss_type=case.loss_type,
        importance_sampling_level=case.level,
        beta=case.beta,
        epsilon_low=0.1,
        epsilon_high=(0.1 if case.epsilon_high is None else case.epsilon_high) + (case.loss_type == "cispo"),
        max_completion_length=LONGEST,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    answers = ids_of_answers()
    mask = in_columns([torch.ones(length, dtype=torch.long) for length in LENGTHS], 0)
    inputs = {
        "prompt_ids": torch.stack([ids[:PROMPT] for ids in answers]),
        "prompt_mask": torch.ones(len(answers), PROMPT, dtype=torch.long),
        "completion_ids": in_columns([ids[PROMPT:] for ids in answers], 0),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
        "num_items_in_batch": mask.sum(),
    }
    if case.is_later:
        inputs["old_per_token_logps"] = -in_columns(old_nats(case.temperature))
    if case.beta:
        both = (
            torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1) for kind in ("ids", "mask")
        )
        with torch.no_grad(), model.disable_adapter():
            found = trainer._get_per_token_logps_and_entropies(model, *both, mask.shape[1])
        inputs["ref_per_token_logps"] = found[0]
    loss = trainer._compute_loss(model, inputs)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.detach(), torch.autograd.grad(loss, trainable_parameters(model)), metrics


@cache
def rounding(case):
    """By how much roundings may change the mean loss, the share of clipped tokens and the mean KL of a case."""
    loss, num_tokens = case.loss(), sum(LENGTHS)
    whole = loss.denominator(len(LENGTHS), num_tokens)
    batch = put_answers_together(
        global_batch(case), rows=COLLATIONS["padded"], num_targets=whole, per_token=whole / num_tokens
    )
    return rounding_of(
        lambda model: summed_group_loss(model, batch, loss=loss, temperature=case.temperature).nan_to_num() / whole,
        moved(),
    )


@pytest.mark.needs("trl")
@pytest.mark.parametrize("way", COLLATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_gradient_and_metrics_are_those_of_trl(case, way):
    expected, gradient, metrics = of_trl(case)
    mean, found, figures = ours(case, [global_batch(case)], way)
    allowed = rounding(case)
    assert float(mean) == pytest.approx(float(expected), rel=0, abs=allowed)
    assert relative_difference(found, gradient) <= PROMISED
    if case.beta:
        assert figures["kl"] == pytest.approx(metrics["kl"], rel=0, abs=allowed)
        assert figures["kl"] > 1e-2
    else:
        assert math.isnan(figures["kl"])
    if case.loss_type == "cispo":  # TRL counts the answers with a positive advantage alone
        assert figures["clipped"] > metrics["cispo_clip_ratio"] - 1e-6 > 0
        return
    if case.level == "token":  # of answers, TRL counts answers and this package their tokens
        assert figures["clipped"] == pytest.approx(metrics["clip_ratio/region_mean"])
    assert [metrics[f"clip_ratio/{side}_mean"] > 0 for side in ("low", "high")] == [case.is_later] * 2
    assert figures["clipped"] < 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "case",
    [Case(loss_type, level, 0.04, 0.7, is_later=True) for loss_type in TYPES for level in ("token", "sequence")],
    ids=str,
)
def test_a_global_batch_has_the_same_loss_and_gradient_however_it_is_cut(case):
    answers = global_batch(case)
    one, gradient, figures = ours(case, [answers], "padded")
    for way in COLLATIONS:
        for cuts in ([[answer] for answer in reversed(answers)], [answers[:1], answers[4:], answers[1:4]]):
            each, others, metrics = ours(case, cuts, way)
            assert float(each) == pytest.approx(float(one), rel=0, abs=rounding(case))
            assert metrics == pytest.approx(figures, rel=0, abs=rounding(case))
            assert relative_difference(others, gradient) <= PROMISED


class Seen(GroupLoss):
    """A loss that keeps what it was given."""

    def __call__(self, tokens):
        self.__dict__["tokens"] = tokens
        return super().__call__(tokens)


@pytest.mark.parametrize("way", COLLATIONS)
def test_the_first_ratio_is_1(way):
    model, batch = moved(), put_answers_together(scored(), rows=COLLATIONS[way], num_targets=1)
    with evaluation_mode(model):
        old = nats_of_tokens(model, batch, temperature=0.7)
    assert model.training
    parts = [part.tolist() for part in old.split(LENGTHS)]
    again = put_answers_together(scored(parts), rows=COLLATIONS[way], num_targets=1)
    loss = Seen(GrpoSection(), LONGEST)
    total, *_ = summed_group_loss(model, again, loss=loss, temperature=0.7)
    tokens = loss.__dict__["tokens"]
    assert ((tokens.old - tokens.nats).exp() - 1).abs().max() <= 1e-6
    without, *_ = summed_group_loss(model, batch, loss=GroupLoss(GrpoSection(), LONGEST), temperature=0.7)
    gradients = [torch.autograd.grad(value, trainable_parameters(model)) for value in (total, without)]
    assert relative_difference(*gradients) <= PROMISED


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_a_rank_without_answers_adds_nothing(beta):
    model = tiny_lora()
    loss = GroupLoss(GrpoSection(beta=beta), LONGEST, turns=1)
    sums = summed_group_loss(model, EMPTY_MICROBATCH, loss=loss, temperature=1.0)
    figures = dict(zip(loss.metrics, sums[1:].tolist(), strict=True))
    assert sums[0] == 0
    assert [figures["entropy"], figures["clipped"]] == [0, 0], "nan would hide the figures of the other ranks"
    assert figures["kl"] == 0 if beta else math.isnan(figures["kl"])
    assert sums[4:].tolist() == [0] * 5, "of the ratios, and of clipped tokens and ratios in the one turn"
    gradients = torch.autograd.grad(sums[0], trainable_parameters(model), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


def test_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens_ratios():
    nats, old = torch.tensor([[1.0, 2.0, 1.0], [1.6, 2.0, 0.7]], dtype=torch.float64)
    row = torch.tensor([0, 0, 1])
    tokens = GroupNats(nats, old, None, row, torch.tensor([1.0, -1.0], dtype=torch.float64))
    by_token, figures = GroupLoss(GrpoSection(), LONGEST)(tokens)
    assert float(by_token) == pytest.approx(-(1.2 + 1) + 0.8)
    assert figures[:2].tolist() == [4, 2]
    section = GrpoSection(importance_sampling_level="sequence", epsilon_high=0.4)
    of_answers, figures = GroupLoss(section, LONGEST)(tokens)
    assert float(of_answers) == pytest.approx(-2 * math.exp(0.3) + 0.8)
    assert figures[1] == 1


def test_cispo_caps_the_weight_of_a_token_and_keeps_its_gradient():
    now = torch.tensor([1.0, 0.2, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([1.5, 2.0, 1.0, 1.0], dtype=torch.float64)  # ratios: e^0.5, e^1.8, 1, e^-2
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    tokens = GroupNats(now, old, None, torch.tensor([0, 1, 0, 0]), advantages)
    section = GrpoSection(loss_type="cispo", epsilon_high=0.5)
    total, figures = GroupLoss(section, LONGEST, turns=1)(tokens)
    total.backward()
    assert now.grad.tolist() == pytest.approx([2 * 1.5, -1.5, 2.0, 2 * math.exp(-2)]), "no lower bound"
    assert figures[1] == 2
    assert float(figures[4]) == pytest.approx(1.5 + 1.5 + 1 + math.exp(-2))


def test_the_divergence_from_the_base_is_added_for_each_token():
    nats, reference = torch.tensor([[2.0, 1.0], [1.0, 1.5]], dtype=torch.float64)
    tokens = GroupNats(nats, None, reference, torch.tensor([0, 0]), torch.zeros(1, dtype=torch.float64))
    divergence = (math.exp(1) - 1 - 1) + (math.exp(-0.5) + 0.5 - 1)
    by_token, figures = GroupLoss(GrpoSection(beta=0.1), LONGEST)(tokens)
    assert [float(by_token), float(figures[2])] == pytest.approx([0.1 * divergence, divergence])
    by_answer, _ = GroupLoss(GrpoSection(beta=0.1, loss_type="grpo"), LONGEST)(tokens)
    assert float(by_answer) == pytest.approx(0.1 * divergence / 2)


def test_tokens_are_divided_by_what_the_loss_type_says():
    found = {name: GroupLoss(GrpoSection(loss_type=name), 100).denominator(8, 50) for name in TYPES}
    assert found == {"dapo": 50, "grpo": 8, "dr_grpo": 800, "bnpo": 50, "cispo": 50}
    assert GroupLoss(GrpoSection(), 100).denominator(8, 0) == 1


# --- advantages ---------------------------------------------------------------------------------------------------


NAN = math.nan
REWARDS = [[1.0, 0.0], [0.0, 0.5], [0.5, 0.25], [1.0, 1.0], [NAN, 1.0], [NAN, NAN], [0.25, NAN], [0.75, 0.5]]
"""Of two functions, for two groups of four answers. One answer has no reward at all."""
TOTALS = [[2.0, -0.5, 0.75, 1.0], [-1.0, None, 0.5, 1.0]]
"""Twice the first minus the second."""


def compared(rewards, weights, scale, num_generations=4):
    return advantages_of(torch.tensor(rewards).double(), weights, scale, num_generations=num_generations)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_differences_from_the_mean_of_the_group(scale):
    given = [[total for total in group if total is not None] for group in TOTALS]
    deviations = [statistics.stdev(group) for group in given]
    of_batch = statistics.stdev([total for group in given for total in group])
    expected = []
    for group, totals, deviation in zip(TOTALS, given, deviations, strict=True):
        divisor = {"group": deviation + 1e-4, "batch": of_batch + 1e-4, "none": 1.0}[scale]
        mean = statistics.fmean(totals)
        expected += [0.0 if total is None else (total - mean) / divisor for total in group]
    found = compared(REWARDS, [2.0, -1.0], scale)
    assert found.values.flatten().tolist() == pytest.approx(expected)
    assert found.deviations.tolist() == pytest.approx(deviations)
    totals = [NAN if total is None else total for group in TOTALS for total in group]
    assert found.rewards.flatten().tolist() == pytest.approx(totals, nan_ok=True)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_rewards_or_with_one_has_no_advantage(scale):
    rewards = [[NAN], [NAN], [NAN], [3.0], [1.0], [2.0]]
    found = compared(rewards, [1.0], scale, num_generations=2)
    assert found.values[:2].flatten().tolist() == [0, 0, 0, 0]
    assert found.values[2, 0] < 0 < found.values[2, 1]
    assert found.deviations[:2].tolist() == [0, 0]
    nothing = compared([[NAN]] * 4, [1.0], scale)
    assert nothing.values.tolist() == [[0, 0, 0, 0]]
    assert nothing.rewards.isnan().all()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_function_of_weight_0_changes_nothing(scale):
    rewards = [[1.0], [NAN], [0.5], [NAN]]
    alone = compared(rewards, [2.0], scale)
    watched = compared([[0.3, *given] for given in rewards], [0.0, 2.0], scale)
    for mine, theirs in zip(watched, alone, strict=True):
        assert torch.equal(mine.nan_to_num(9.0), theirs.nan_to_num(9.0))
    assert watched.values[0, 0] > 0 == watched.values[0, 1]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_advantages_of_exactly_0(scale):
    """A rounding of the mean would become a gradient: deviations are almost 0, and advantages are divided by them."""
    for size, reward in product((2, 3, 6, 7, 8), (0.1, 0.7, 1 / 3, 1e6 + 0.1)):
        found = compared([[reward, 0.1]] * size + [[0.2, 0.3]] * size, [1.0, 0.7], scale, num_generations=size)
        assert not found.values.any(), (size, reward)
        assert not found.deviations.any(), (size, reward)
