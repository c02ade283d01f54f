"""The names of other tools: all that the libraries have are known, and as keys they lead to ours."""

from __future__ import annotations

import dataclasses
import importlib
import warnings

import pytest

from finetune.config.key_advice import OTHER_WORDS, did_you_mean_key
from finetune.config.keys import fields
from finetune.config.other_tools import KEYS, OUR_NAME, SENTENCES, VALUES


def names_of(*classes: type) -> set[str]:
    return {field.name for kind in classes for field in dataclasses.fields(kind)}


def test_every_name_of_the_installed_libraries_is_known():
    from peft import LoraConfig
    from transformers import TrainingArguments

    assert names_of(TrainingArguments, LoraConfig) - OUR_NAME.keys() == set()


@pytest.mark.needs("trl")
def test_every_name_of_trl_is_known():
    trl = importlib.import_module("trl")
    with warnings.catch_warnings():  # of what may change
        warnings.simplefilter("ignore")
        cpo, orpo = (importlib.import_module(f"trl.experimental.{name}") for name in ("cpo", "orpo"))
    assert (
        names_of(trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.ModelConfig, trl.ScriptArguments) <= OUR_NAME.keys()
    )
    own = {"max_completion_length", "is_encoder_decoder", "generate_during_eval", "alpha", "padding_value"}
    assert names_of(cpo.CPOConfig, orpo.ORPOConfig) - OUR_NAME.keys() <= own


def test_a_name_stands_in_one_place_and_means_a_key_or_a_sentence():
    lists = [*KEYS.values(), *SENTENCES.values()]
    assert sum(len(names.split()) for names in lists) == len(OUR_NAME)
    assert {*KEYS, *VALUES} <= fields().keys()
    assert all(" " in sentence and sentence.endswith(".") for sentence in SENTENCES)


def test_each_name_is_answered():
    for name, ours in OUR_NAME.items():
        last = name.rpartition(".")[2]
        same = [key for key in fields() if key.rpartition(".")[2] == last]
        if last == name:
            answer = f"Did you mean {' or '.join(same) or ours}?" if same or ours in fields() else ours
            assert did_you_mean_key(f"parallel.{name}") == answer


@pytest.mark.parametrize(
    ("unknown", "keys"),
    [
        ("rollout.max_new_tokens", "rollout.max_completion_length"),
        ("max_new_tokens", "validation.max_new_tokens or testing.max_new_tokens or rollout.max_completion_length"),
        ("rollout.num_samples", "rollout.num_generations"),
        ("rollout.max_length", "rollout.max_completion_length"),
        ("training.learning_rat", "optim.learning_rate"),
        ("validation.max_new_token", "validation.max_new_tokens"),
        ("optim.kl_coef", "grpo.beta"),
        ("data.max_tokens", "data.max_length"),
        ("training.random_seed", "seed"),
        ("training.train_file", "data.train"),
        ("trainig.max_stepz", "training.max_steps"),
        ("rank", "parallel.rank or lora.r"),
    ],
)
def test_common_words_lead_to_the_key_that_does_it(unknown, keys):
    assert did_you_mean_key(unknown) == f"Did you mean {keys}?"


@pytest.mark.parametrize("unknown", ["training.stop", "model.loggin", "data.kernel_of_truth", "lora.stop"])
def test_a_section_in_common_makes_no_key_alike(unknown):
    assert did_you_mean_key(unknown) == ""


def test_common_words_name_nothing_that_is_known():
    words = [word for words in OTHER_WORDS.values() for word in words.split()]
    assert sorted(words) == sorted(set(words))
    assert OTHER_WORDS.keys() <= fields().keys() | OUR_NAME.keys()
    assert set(words) & (fields().keys() | OUR_NAME.keys()) == set()
