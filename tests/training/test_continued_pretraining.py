"""Going on with pretraining on text, and with it full fine-tuning: every token and every weight."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from finetune import build_tokenizer, encode_examples, load_config, load_examples
from tests.tiny import tiny_tokenizer
from tests.tiny_models import build_tiny, tiny_phi3_config, tiny_phi_config
from tests.tiny_runs import MODEL_VOCABULARY
from tests.tiny_training import (
    curve,
    events,
    logits_of,
    plain_logits,
    refuse_to_differ_after_a_break,
    train,
    words_for,
)

CONFIGS = {
    "tied": tiny_phi3_config(vocab_size=MODEL_VOCABULARY, eos_token_id=320),
    "untied": tiny_phi3_config(vocab_size=MODEL_VOCABULARY, eos_token_id=320, tie_word_embeddings=False),
    "biased": tiny_phi_config(vocab_size=MODEL_VOCABULARY, eos_token_id=320),
}
WORDS = ["task=continue_pretraining", "optim.learning_rate=1e-2", "optim.warmup_steps=0"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rows").mkdir()
    rng = random.Random(0)
    for split, count in (("train", 18), ("validation", 4), ("test", 4)):
        words = [rng.choices(["oranges", "Porto", "by", "Friday"], k=rng.randint(3, 9)) for _ in range(count)]
        texts = [" ".join([split, str(number), *some]) for number, some in enumerate(words)]
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, config in CONFIGS.items():
        build_tiny(config).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    return folder


def words_of(inputs, run, name):
    return [*words_for(inputs, run), *WORDS, f"model.path={inputs / name}"]


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    runs = {}
    for name in CONFIGS:
        run = tmp_path_factory.mktemp(name) / "run"
        runs[name] = (run, logits_of(train(words_of(inputs, run, name))))
    return runs


def test_every_token_but_the_first_carries_loss_and_a_document_ends_with_the_end_token(inputs, tmp_path):
    config = load_config(words_of(inputs, tmp_path, "tied"))
    tokenizer = build_tokenizer(config.model)
    rows = encode_examples(load_examples(config.data), tokenizer, config.data).train
    assert len(rows) == 18
    for row in rows:
        assert row.input_ids[-1] == tokenizer.eos_token_id
        assert row.is_target.tolist() == [False] + [True] * (len(row.input_ids) - 1)


@pytest.mark.slow
def test_every_weight_trains_and_the_model_loads_in_plain_transformers(inputs, trained, tmp_path):
    plain = plain_logits(tmp_path, {name: (run / "adapter", None, 0) for name, (run, _) in trained.items()})
    for name, (run, ours) in trained.items():
        torch.testing.assert_close(plain[name], ours, rtol=1e-5, atol=1e-5, msg=name)
        before, after = (load_file(folder / "model.safetensors") for folder in (inputs / name, run / "adapter"))
        assert after.keys() == before.keys(), "tied weights are written once, as they were"
        still = {key for key, tensor in after.items() if torch.equal(tensor, before[key])}
        assert still <= {"model.layers.0.self_attn.k_proj.bias", "model.layers.1.self_attn.k_proj.bias"}, name
        assert curve(run)[-1]["loss"] < curve(run)[0]["loss"]
        assert {event["model"] for event in events(run, "test")} == {"tuned"}


@pytest.mark.slow
def test_a_run_that_broke_ends_with_the_bytes_of_the_whole_one(inputs, trained, tmp_path):
    refuse_to_differ_after_a_break(words_of(inputs, tmp_path, "biased"), trained["biased"][0], tmp_path / "broken")
