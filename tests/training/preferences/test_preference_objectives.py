"""KTO, ORPO and SimPO: loss and gradient are TRL's in fp32, by every way, and functions of the global batch alone."""

from __future__ import annotations

import importlib
import math
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from finetune import launch, load_config
from finetune.config.schema import Config, PreferenceSection
from finetune.data.batches import pad
from finetune.data.encoded import EncodedExamples
from finetune.data.preferences import EncodedLabelled, EncodedLabelledSplits, EncodedPairs, LabelledExample
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.errors import ConfigError, DataError
from finetune.training.objective import objective_of
from finetune.training.optim import trainable_parameters
from finetune.training.preferences import objectives
from finetune.training.preferences.losses import NOTHING, GlobalSums, PreferenceLoss, RowNats
from finetune.training.preferences.microbatches import (
    local_sums,
    put_labelled_together,
    put_pairs_together,
    summed_preferences,
    with_global_sums,
)
from finetune.training.preferences.objectives import refuse_straddling
from tests.rounding import relative_difference
from tests.training.preferences.test_preference_loss import COLLATIONS, pairs_of_ids, tiny_lora

SECTIONS = {
    "dpo": PreferenceSection(beta=0.4),
    "kto": PreferenceSection(beta=0.4, desirable_weight=1.5, undesirable_weight=0.75),
    "orpo": PreferenceSection(beta=0.3),
    "simpo": PreferenceSection(beta=2.0, gamma=0.7),
}
LABELS = (True, False, True, True, False)


def loss_of(name):
    return PreferenceLoss(name, SECTIONS[name])


@cache
def weights_that_like_strangers():
    """Adapter weights with a KL above 0."""
    model = tiny_lora()
    strangers = pad([labelled()[row].mismatched for row in range(len(LABELS))])
    optimizer = torch.optim.AdamW(trainable_parameters(model), lr=3e-2)
    for _ in range(10):
        summed_cross_entropy(model, strangers).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().clone() for weight in trainable_parameters(model)]


def adapted():
    model = tiny_lora()
    for weight, liking in zip(trainable_parameters(model), weights_that_like_strangers(), strict=True):
        weight.data.copy_(liking)
    return model


def labelled():
    """Five rows with four different prompts, some of them long enough to be shared."""
    pairs = pairs_of_ids()
    sides = [pairs[0].chosen, pairs[0].rejected, pairs[1].chosen, pairs[2].chosen, pairs[2].rejected]
    rows = EncodedExamples.from_rows([(ids.tolist(), marks.tolist()) for ids, marks in sides], end_id=2)
    rows = replace(rows, is_good=torch.tensor(LABELS))
    return EncodedLabelled(rows, "rows", max_length=64)


def whole_batch(name):
    """The rows of a global batch."""
    return [labelled()[row] for row in range(len(LABELS))] if name == "kto" else pairs_of_ids()


def collation(name, way):
    if name == "kto":
        return partial(put_labelled_together, rows=COLLATIONS[way])
    return partial(put_pairs_together, rows=COLLATIONS[way], learns_prompt=name == "orpo")


def ours(name, model, cuts, way="shared"):
    """Loss and gradient of a global batch that is cut into micro-batches, as a step computes them."""
    loss = loss_of(name)
    microbatches = [collation(name, way)(rows) for rows in cuts]
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})
    with launch(config) as runtime:
        whole = local_sums(runtime, model, microbatches, loss=loss)
    told = [with_global_sums(microbatch, whole) for microbatch in microbatches]
    sums = torch.stack([summed_preferences(model, microbatch, loss=loss) for microbatch in told]).sum(0)
    mean = sums / sum(microbatch.num_targets for microbatch in told)
    return mean, torch.autograd.grad(mean[0], trainable_parameters(model))


def padded(rows):
    """Ids, attention mask and completion mask of rows, padded on the right."""
    batch = pad(rows)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    attention = (torch.arange(batch.input_ids.shape[1]) < lengths[:, None]).long()
    return batch.input_ids, attention, batch.is_target.long()


def trl_trainer(path, **settings):
    """One of TRL's trainers with the settings that its loss reads, without its data and its training."""
    module, _, name = path.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = getattr(importlib.import_module(module), name)
    trainer = object.__new__(kind)
    vars(trainer).update(accelerator=Accelerator(cpu=True), aux_loss_enabled=False, **settings)
    return trainer


def trl_pairs(path, model, **settings):
    pairs = pairs_of_ids()
    inputs = {}
    for side in ("chosen", "rejected"):
        ids, attention, completion = padded([getattr(pair, side) for pair in pairs])
        labels = ids.masked_fill(completion == 0, -100)
        inputs |= {f"{side}_input_ids": ids, f"{side}_attention_mask": attention, f"{side}_labels": labels}
    trainer = trl_trainer(path, is_encoder_decoder=False, padding_value=0, pad_token_id=0, **settings)
    return trainer.get_batch_loss_metrics(model, inputs)


def trl_orpo(model):
    return trl_pairs("trl.experimental.orpo.ORPOTrainer", model, beta=0.3)


def trl_simpo(model):
    settings = {"beta": 2.0, "simpo_gamma": 0.7, "cpo_alpha": 0.0, "alpha": 0.0, "label_smoothing": 0.0}
    return trl_pairs("trl.experimental.cpo.CPOTrainer", model, loss_type="simpo", **settings)


def trl_kto(model):
    rows = [labelled()[row] for row in range(len(LABELS))]
    inputs = {"label": torch.tensor(LABELS)}
    for prefix, of_kind in (("", [row.answer for row in rows]), ("KL_", [row.mismatched for row in rows])):
        ids, attention, completion = padded(of_kind)
        inputs |= {f"{prefix}input_ids": ids, f"{prefix}attention_mask": attention}
        inputs[f"{prefix}completion_mask"] = completion
    trainer = trl_trainer(
        "trl.KTOTrainer",
        model=model,
        ref_model=None,
        beta=0.4,
        desirable_weight=1.5,
        undesirable_weight=0.75,
        loss_type="kto",
        calculate_KL=True,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    outputs = ("log_probs", "entropy", "mean_logits")
    importlib.import_module("trl.trainer.utils").add_fused_lm_head(model.get_base_model(), outputs=outputs)
    with warnings.catch_warnings():  # TRL asks transformers for an attribute with a new name
        warnings.simplefilter("ignore", FutureWarning)
        loss = trainer._compute_loss(model, inputs, return_outputs=False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


ORACLES = {"kto": trl_kto, "orpo": trl_orpo, "simpo": trl_simpo}


@pytest.mark.needs("trl")
@pytest.mark.parametrize("way", COLLATIONS)
@pytest.mark.parametrize("name", ORACLES)
def test_loss_gradient_and_rewards_are_those_of_trl(name, way):
    model = adapted()
    expected, metrics = ORACLES[name](model)
    gradients = torch.autograd.grad(expected, trainable_parameters(model))
    mean, found = ours(name, adapted(), [whole_batch(name)], way)
    torch.testing.assert_close(mean[0].detach().float(), expected.detach(), rtol=1e-5, atol=1e-6)
    assert relative_difference(found, gradients) <= 1e-4
    figures = dict(zip(loss_of(name).metrics, mean[1:].tolist(), strict=True))
    assert figures["chosen_reward"] == pytest.approx(metrics["rewards/chosen"], rel=1e-5, abs=1e-6)
    assert figures["rejected_reward"] == pytest.approx(metrics["rewards/rejected"], rel=1e-5, abs=1e-6)
    assert figures["reward_margin"] == pytest.approx(metrics["rewards/margins"], rel=1e-4, abs=1e-6)
    if name == "kto":
        assert figures["kl"] == pytest.approx(metrics["kl"], rel=1e-5)
        assert figures["kl"] > 0


def test_losses_of_a_few_rows_are_those_of_the_papers():
    def sigmoid(value):
        return 1 / (1 + math.exp(-value))

    def losses(name, nats, num_targets, reference=None, is_good=None, whole=NOTHING):
        tensors = [None if of is None else torch.tensor(of).double() for of in (nats, reference, num_targets)]
        return loss_of(name)(RowNats(*tensors, is_good, whole)).losses.tolist()

    # log p per token: -2 of the chosen answer, -3 of the rejected one. ORPO also learns a prompt of 4 nats.
    assert losses("simpo", [6, 15], [3, 5]) == pytest.approx([-math.log(sigmoid(2.0 * (-2 + 3) - 0.7))])
    chosen, rejected = (math.log(math.exp(-nats) / (1 - math.exp(-nats))) for nats in (2, 3))
    of_orpo = losses("orpo", [6, 15, 4], [3, 5, 2], whole=GlobalSums(num_rows=1, num_read=5))
    assert of_orpo == pytest.approx([(6 + 4) / 5 - 0.3 * math.log(sigmoid(chosen - rejected))])
    # Against the reference: 1 nat more for the good answer, 2 less for the bad one; KL is 0.5.
    labels, whole = torch.tensor([True, False]), GlobalSums(num_rows=2, num_good=1, gained=1.0)
    of_kto = losses("kto", [4, 9], [3, 5], reference=[5, 7], is_good=labels, whole=whole)
    assert of_kto == pytest.approx([1.5 * (1 - sigmoid(0.4 * (1 - 0.5))), 0.75 * (1 - sigmoid(0.4 * (0.5 + 2)))])


@pytest.mark.parametrize("name", SECTIONS)
def test_a_global_batch_has_the_same_loss_and_gradient_however_it_is_cut(name):
    rows = whole_batch(name)
    one, gradients = ours(name, adapted(), [rows])
    each, others = ours(name, adapted(), [[row] for row in reversed(rows)])
    torch.testing.assert_close(each.detach(), one.detach(), rtol=1e-6, atol=1e-6)
    assert relative_difference(others, gradients) <= 1e-5


@pytest.mark.parametrize("name", ["kto", "orpo", "simpo"])
def test_a_rank_without_rows_adds_nothing(name):
    model = tiny_lora()
    sums = summed_preferences(model, EMPTY_MICROBATCH, loss=loss_of(name))
    assert not sums.any()
    config = Config.model_validate({"training": {"device": "cpu", "precision": "fp32"}})
    with launch(config) as runtime:
        assert not any(local_sums(runtime, model, [EMPTY_MICROBATCH], loss=loss_of(name)))
    assert with_global_sums(EMPTY_MICROBATCH, [1.0] * len(GlobalSums._fields)) is EMPTY_MICROBATCH
    sums[0].backward()


def test_a_stranger_is_a_prompt_with_the_answer_of_the_row_before_it():
    rows = labelled()
    row = rows[3, 1]
    assert isinstance(row, LabelledExample)
    assert row.answer.input_ids.tolist() == rows.answers[3].input_ids.tolist()
    assert row.mismatched.input_ids.tolist() == [
        *rows.answers[3].input_ids[:20].tolist(),
        *rows.answers[1].input_ids[20:].tolist(),
    ]
    assert row.mismatched.is_target.tolist() == [False] * 20 + [True] * 5
    assert rows[0].mismatched.input_ids[20:].tolist() == rows.answers[4].input_ids[20:].tolist()
    assert [rows[index].is_good for index in range(5)] == list(LABELS)
    assert rows.longest_mismatched == 26
    short = EncodedLabelled(rows.answers, "rows", max_length=22)
    assert len(short[3, 1].mismatched.input_ids) == short.longest_mismatched == 22


def test_strangers_longer_than_the_models_context_are_refused():
    answers = EncodedExamples.from_rows(
        [([5] * 13, [False] * prompt + [True] * (13 - prompt)) for prompt in (3, 10)], end_id=2
    )
    rows, model = EncodedLabelled(answers, "rows", max_length=64), tiny_lora()
    objective = objective_of(load_config(["model=phi_tiny", "data.path=rows.jsonl"], task="finetune_kto"))
    check = partial(objective.prepare, model, None)
    model.config.max_position_embeddings = 20
    check(EncodedLabelledSplits(rows))
    model.config.max_position_embeddings = 13
    with pytest.raises(ConfigError, match=r"longest answer has 20 tokens, but .* ends at 13.*Set data.max_length=13"):
        check(EncodedLabelledSplits(rows))
    check(EncodedLabelledSplits(EncodedLabelled(answers, "rows", max_length=13)))


def test_rows_that_longrope_would_rotate_with_two_sets_of_factors_are_refused(monkeypatch):
    chosen, rejected = (  # of 23, 24 and 21 tokens, and of 25, 22 and 26
        EncodedExamples.from_rows([(ids.tolist(), marks.tolist()) for ids, marks in side], end_id=2)
        for side in zip(*pairs_of_ids(), strict=True)
    )
    pairs = EncodedPairs(chosen, rejected, "rows")
    for boundary in (20, 26, None):
        refuse_straddling(pairs, boundary)
    said = f"2 pairs have one side of at most 22 tokens .* the first is {chosen.source(1)}.* Set data.max_length=22"
    with pytest.raises(DataError, match=said):
        refuse_straddling(pairs, 22)
    kto = objective_of(load_config(["model=phi_tiny", "data.path=rows.jsonl"], task="finetune_kto"))
    model = tiny_lora()
    monkeypatch.setattr(objectives, "max_context", lambda _: None)
    monkeypatch.setattr(objectives, "longrope_boundary", lambda _: 26)
    kto.prepare(model, None, EncodedLabelledSplits(labelled()))
    monkeypatch.setattr(objectives, "longrope_boundary", lambda _: 25)
    with pytest.raises(DataError, match=r"rows: the longest prompt .* has 26 tokens.* Set data.max_length=25"):
        kto.prepare(model, None, EncodedLabelledSplits(labelled()))


def test_one_labelled_row_is_compared_with_nothing():
    one = EncodedExamples.from_rows([([5, 6], [False, True])], end_id=2)
    with pytest.raises(DataError, match="rows has 1 row, but KTO compares answers to different prompts"):
        EncodedLabelled(one, "rows", max_length=64)


def test_rewards_are_means_over_good_and_over_bad_answers_or_missing():
    nats, reference = torch.tensor([[1.0, 2.0, 4.0], [2.0, 5.0, 3.0]], dtype=torch.float64)
    rows = RowNats(nats, reference, torch.ones(3), torch.tensor([True, True, False]), GlobalSums(3, 0, 2, 1.5))
    sums = loss_of("kto")(rows).sums() / 3
    assert sums[1:].tolist() == pytest.approx([0.4 * 2, 0.4 * -1, 0.4 * 3, 1, 0.5])
    only_good = rows._replace(is_good=torch.ones(3, dtype=torch.bool), whole=GlobalSums(3, 0, 3, -9.0))
    figures = (loss_of("kto")(only_good).sums() / 3).tolist()
    assert figures[1] == pytest.approx(0.4 * 1)
    assert [str(value) for value in figures[2:4]] == ["nan", "nan"]
    assert figures[5] == 0.0, "KL is never negative"


def test_an_answer_that_is_certain_has_finite_odds_and_gradients():
    nats = torch.tensor([0.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    rows = RowNats(nats, None, torch.tensor([2.0, 2.0, 0.0], dtype=torch.float64), None, GlobalSums(1, 5, 0, 0))
    losses = loss_of("orpo")(rows).losses
    (gradient,) = torch.autograd.grad(losses.sum(), nats)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


class LabelsOnly(list):
    @property
    def is_good(self):
        return torch.tensor(self)


@pytest.mark.parametrize(
    ("labels", "advice"),
    [
        ([True] * 3, "one label: add rows"),
        ([False] * 3, "one label: add rows"),
        ([True, True, False], "Set preference."),
    ],
)
def test_no_weight_is_advised_where_all_answers_have_one_label(labels, advice, caplog):
    objectives._warn_of_imbalance(Config(), LabelsOnly(labels))
    assert advice in caplog.text
