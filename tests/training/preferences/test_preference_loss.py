"""DPO: the loss is the paper's, alike through engine and model, and the base is its own reference."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from torch.nn import functional

from finetune import build_tokenizer, load_config
from finetune.config.schema import LoraSection, PreferenceSection
from finetune.data.batches import pad
from finetune.data.encoded import EncodedExample
from finetune.data.preferences import EncodedPair, encode_preferences
from finetune.engine.layout import pack
from finetune.engine.padded import EMPTY_MICROBATCH
from finetune.errors import DataError
from finetune.model.lora import add_lora
from finetune.training.optim import trainable_parameters
from finetune.training.preferences.losses import METRICS, PreferenceLoss
from finetune.training.preferences.microbatches import (
    measure_preferences,
    put_pairs_together,
    summed_preferences,
)
from tests.tiny_models import build_tiny, tiny_phi3_config, tiny_phi_config
from tests.tiny_runs import write_base

BETA = 0.4
DPO = PreferenceLoss("dpo", PreferenceSection(beta=BETA))
CONFIGS = {"phi3": tiny_phi3_config(sliding_window=None), "phi": tiny_phi_config()}
COLLATIONS = {
    "shared": pack,
    "packed": partial(pack, share_prefixes=False),
    "padded": pad,
}


def tiny_lora(kind="phi3"):
    model = add_lora(build_tiny(CONFIGS[kind]), LoraSection(r=2, alpha=4.0))
    torch.manual_seed(1)
    for parameter in trainable_parameters(model):
        parameter.data.normal_(std=0.2)
    return model.train()


def pairs_of_ids():
    """Long prompts, so that the engine shares them."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for answers in ((3, 5), (4, 2), (1, 6)):
        prompt = torch.randint(3, 64, (20,), generator=generator)
        sides = []
        for length in answers:
            ids = torch.cat([prompt, torch.randint(3, 64, (length,), generator=generator)])
            sides.append(EncodedExample(ids, torch.arange(len(ids)) >= 20))
        pairs.append(EncodedPair(*sides))
    return pairs


def by_the_paper(model, pairs):
    """Each pair by itself through the model's own forward in float64."""
    model = model.double()

    def log_probability(ids, is_target):
        logits = model(input_ids=ids[None]).logits[0, :-1]
        return functional.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0][is_target[1:]].sum()

    losses, rewards = [], []
    for pair in pairs:
        policy = [log_probability(*side) for side in pair]
        with model.disable_adapter(), torch.no_grad():
            reference = [log_probability(*side) for side in pair]
        margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
        losses.append(-torch.log(torch.sigmoid(BETA * margin)))
        rewards.append([BETA * float((one - other).detach()) for one, other in zip(policy, reference, strict=True)])
    total = torch.stack(losses).sum()
    gradients = torch.autograd.grad(total, trainable_parameters(model))
    return torch.stack(losses).detach(), gradients, torch.tensor(rewards, dtype=torch.float64)


@pytest.mark.parametrize(("kind", "way"), [*(("phi3", way) for way in COLLATIONS), ("phi", "shared")])
def test_loss_and_gradient_are_those_of_the_paper_by_every_way(kind, way):
    pairs = pairs_of_ids()
    if kind == "phi":  # which likes all that are chosen
        pairs[1] = EncodedPair(*reversed(pairs[1]))
    expected, gradients, rewards = by_the_paper(tiny_lora(kind), pairs)
    model = tiny_lora(kind)
    batch = put_pairs_together(pairs, rows=COLLATIONS[way])
    outcomes = measure_preferences(model, batch, loss=DPO)
    torch.testing.assert_close(outcomes.losses.detach(), expected, rtol=1e-5, atol=1e-6)
    sums = summed_preferences(model, batch, loss=DPO)
    margins = rewards[:, 0] - rewards[:, 1]
    assert len(set((margins > 0).tolist())) == 2, "both kinds of pair are among them"
    of_the_paper = [*rewards.sum(0), margins.sum(), (margins > 0).double().sum()]
    torch.testing.assert_close(sums[1:].detach(), torch.stack(of_the_paper), rtol=1e-5, atol=1e-5)
    assert len(sums) == 1 + len(METRICS)
    ours = torch.autograd.grad(sums[0], trainable_parameters(model))
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine, theirs.float(), rtol=2e-4, atol=2e-5)
    assert max(gradient.abs().max() for gradient in ours) > 1e-2
    assert (batch.num_rows, batch.num_targets, batch.num_tokens) == (3, 3, 3 * 40 + 21)
    assert batch.num_computed == 3 * 20 + 21 if way == "shared" else batch.num_computed == batch.num_tokens


def test_an_untrained_adapter_is_its_own_reference_and_every_loss_is_log_2():
    model = add_lora(build_tiny(CONFIGS["phi3"]), LoraSection(r=2)).train()
    batch = put_pairs_together(pairs_of_ids(), rows=COLLATIONS["shared"])
    sums = summed_preferences(model, batch, loss=DPO).detach()
    expected = torch.tensor([3 * math.log(2), 0, 0, 0, 3 * 0.5], dtype=torch.float64)
    torch.testing.assert_close(sums, expected, rtol=1e-6, atol=1e-5)
    assert model.training
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)


def test_a_rank_without_pairs_adds_nothing():
    model = tiny_lora()
    sums = summed_preferences(model, EMPTY_MICROBATCH, loss=DPO)
    assert sums.tolist() == [0.0] * (1 + len(METRICS))
    gradients = torch.autograd.grad(sums[0], trainable_parameters(model), allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


def encode(base, tmp_path, rows, *words):
    for split, of_split in rows.items():
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))
    cache = f"data.cache_dir={tmp_path / 'cache'}"
    config = load_config([f"model.path={base}", f"data.path={tmp_path}", cache, *words])
    tokenizer = build_tokenizer(config.model)
    return encode_preferences(config.data, tokenizer), tokenizer


def row(number, **keys):
    return {"prompt": f"order {number}?", "chosen": f"yes {number}", "rejected": "no", **keys}


def test_the_sides_of_a_pair_begin_alike_and_learn_their_answers(base, tmp_path):
    splits, tokenizer = encode(base, tmp_path, {"train": [row(1), row(2)], "validation": [row(3)]})
    assert (len(splits.train), len(splits.validation), splits.test) == (2, 1, None)
    assert splits.train.lengths.tolist() == splits.train.chosen.lengths.tolist()
    for number in (2, 1):
        pair = splits.train[number - 1]
        prompts = [side.input_ids[: int(side.is_target.int().argmax())].tolist() for side in pair]
        assert prompts[0] == prompts[1]
        learnt = [tokenizer.decode(side.input_ids[side.is_target]) for side in pair]
        assert learnt == [f"yes {number}<|end|>", "no<|end|>"]
    own = int(splits.train.rejected.lengths[0]) - len(prompts[0])
    assert len(splits.train.tokens(0)) == int(splits.train.chosen.lengths[0]) + own
    batch = partial(put_pairs_together, rows=COLLATIONS["padded"])([splits.train[0], splits.train[1]])
    assert batch.num_rows == 2


def test_one_text_and_one_list_of_turns_are_no_pair(base, tmp_path):
    turns = [{"role": "user", "content": "order 1?"}, {"role": "assistant", "content": "no"}]
    with pytest.raises(DataError, match=r"train\.jsonl:1: one of chosen and rejected is text and one is turns"):
        encode(base, tmp_path, {"train": [{"chosen": "order 1? yes", "rejected": turns}]})
