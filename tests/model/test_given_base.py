"""A model that a script has loaded is compared with the files from which later commands load its base."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from huggingface_hub import constants
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from finetune.config.schema import ModelSection
from finetune.errors import ModelError
from finetune.model.given_base import refuse_other_base
from tests.tiny_models import LLAMA_KIN, build_tiny, tiny_gemma2_config, tiny_phi3_config, tiny_phi_config

ROPE = {"rope_type": "default", "partial_rotary_factor": 0.5}
CONFIGS = {"phi3": tiny_phi3_config(), "phi": tiny_phi_config(), "gemma2": tiny_gemma2_config(), **LLAMA_KIN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build_tiny(CONFIGS["phi3"]).save_pretrained(folder)
    return folder


def load(folder, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_as_it_was_saved_is_taken(name, tmp_path):
    build_tiny(CONFIGS[name]).save_pretrained(tmp_path)
    model = load(tmp_path)
    model.config.pad_token_id, model.config.use_cache = 7, False  # as a run sets them
    assert refuse_other_base(model, ModelSection(path=str(tmp_path))) is None
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert refuse_other_base(adapted, ModelSection(path=str(tmp_path))) is None


def test_rounded_weights_are_told_from_other_ones(folder):
    section = ModelSection(path=str(folder))
    model = load(folder, dtype=torch.bfloat16)
    assert refuse_other_base(model, section) is torch.bfloat16
    assert refuse_other_base(model.float(), section) is torch.bfloat16  # converted back by a run in fp32
    assert refuse_other_base(load(folder, dtype=torch.float64), section) is None


@pytest.mark.parametrize(
    "changes", [{"sliding_window": 4}, {"attention_dropout": 0.5}, {"rope_parameters": {**ROPE, "rope_theta": 5e5}}]
)
def test_a_changed_configuration_is_refused_by_its_key(folder, changes):
    (key,) = changes
    with pytest.raises(ModelError, match=rf"another configuration than .*: {key}.*, there .*save_pretrained\(FOLDER\)"):
        refuse_other_base(load(folder, **changes), ModelSection(path=str(folder)))


def test_changed_weights_are_refused_by_name(folder):
    adapted = get_peft_model(load(folder), LoraConfig(r=2, target_modules=["qkv_proj"], init_lora_weights=False))
    section = ModelSection(path=str(folder))
    assert refuse_other_base(adapted, section) is None
    merged = adapted.merge_and_unload()
    with pytest.raises(ModelError, match=r"other weights than .*layers\.0\.self_attn\.qkv_proj\.weight, .*layers\.1"):
        refuse_other_base(merged, section)


def test_a_changed_row_in_the_middle_of_an_embedding_is_refused(folder):
    """Scripts set the rows of reserved tokens, of which the last one often stays."""
    model = load(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] += 1
    with pytest.raises(ModelError, match=r"other weights than .*: model\.embed_tokens\.weight"):
        refuse_other_base(model, ModelSection(path=str(folder)))


def test_weights_that_cannot_be_compared_are_said(folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    model = load(folder)
    shutil.copy(folder / "config.json", tmp_path)
    assert refuse_other_base(model, ModelSection(path=str(folder))) is None
    assert not caplog.messages
    assert refuse_other_base(model, ModelSection(path=str(tmp_path))) is None
    assert "the weights of the given model could not be compared with" in caplog.text


def test_another_revision_of_the_hub_is_refused_with_the_key_to_set(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshots = tmp_path / "models--someone--tiny" / "snapshots"
    shutil.copytree(folder, snapshots / ("a" * 40))
    build_tiny(CONFIGS["phi3"], seed=1).save_pretrained(snapshots / ("b" * 40))
    (snapshots.with_name("refs")).mkdir()
    (snapshots.with_name("refs") / "main").write_text("a" * 40)
    model = load("someone/tiny", revision="b" * 40, cache_dir=tmp_path, local_files_only=True)
    assert refuse_other_base(model, ModelSection(path="someone/tiny", revision="b" * 40)) is None
    with pytest.raises(
        ModelError, match=r"other weights than someone/tiny at revision main: .* set model\.revision to"
    ):
        refuse_other_base(model, ModelSection(path="someone/tiny"))
