"""The names of Transformers, PEFT and TRL: they are what these libraries have, and they lead to keys of ours."""

from __future__ import annotations

import dataclasses
import importlib
import warnings

import pytest

from finetune.config.compose import compose
from finetune.config.keys import fields
from finetune.config.other_libraries import EARLIER, LORA_CONFIG, OUR_NAME, TRAINING_ARGUMENTS, TRL
from finetune.errors import ConfigError


def names_of(*classes: type) -> set[str]:
    return {field.name for kind in classes for field in dataclasses.fields(kind)}


def test_every_name_is_one_of_the_installed_libraries():
    from peft import LoraConfig
    from transformers import TrainingArguments

    assert set(TRAINING_ARGUMENTS) - names_of(TrainingArguments) == set()
    assert set(LORA_CONFIG) - names_of(LoraConfig) == set()
    assert set(EARLIER) & names_of(TrainingArguments, LoraConfig) == set()


@pytest.mark.needs("trl")
def test_every_name_of_trl_is_one_of_the_installed_library():
    trl = importlib.import_module("trl")
    with warnings.catch_warnings():  # of what may change
        warnings.simplefilter("ignore")
        cpo, orpo = (importlib.import_module(f"trl.experimental.{name}") for name in ("cpo", "orpo"))
    classes = (trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, cpo.CPOConfig, orpo.ORPOConfig)
    classes += (trl.ModelConfig, trl.ScriptArguments)
    assert set(TRL) - names_of(*classes) == set()
    assert set(EARLIER) & names_of(*classes) == set()


def test_a_name_stands_in_one_table():
    tables = (TRAINING_ARGUMENTS, LORA_CONFIG, TRL, EARLIER)
    assert len(OUR_NAME) == sum(map(len, tables))


def test_what_a_name_means_is_a_key_or_a_sentence():
    for name, ours in OUR_NAME.items():
        assert ours in fields() or (" " in ours and ours.endswith(".")), name


@pytest.mark.parametrize("name", OUR_NAME)
def test_each_name_is_answered(name):
    ours = OUR_NAME[name]
    same = [key for key in fields() if key.rpartition(".")[2] == name]
    answer = f"Did you mean {' or '.join(same) or ours}?" if same or ours in fields() else ours
    with pytest.raises(ConfigError) as caught:
        compose([f"parallel.{name}=1"], complete=False)
    assert str(caught.value) == f"command line: parallel.{name}: there is no such key. {answer}"
