"""Models that do not work are recognised by their configuration and refused with what to take instead."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version
from transformers import AutoConfig, LlamaConfig

from finetune.config.schema import LoraSection, ModelSection
from finetune.errors import ModelError
from finetune.model.base import build_base_model, max_context, read_model_config
from finetune.model.lora import add_lora
from finetune.model.saved_adapter import load_adapter
from finetune.model.unsupported import refuse_unsupported
from tests.model.variants import BOUNDARY, VARIANTS
from tests.tiny_models import SIZES, build_tiny, tiny_phi3_config

# Parts of the config.json files of microsoft/Phi-4-multimodal-instruct, Phi-3-small-8k-instruct,
# Phi-3.5-vision-instruct, Phi-4-reasoning-vision-15B, Phi-4-mini-flash-reasoning, Phi-tiny-MoE-instruct and of phi-2's
# first upload.
REFUSED = {
    "Phi-4-multimodal": (
        {"model_type": "phi4mm", "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"}},
        "Phi-4-multimodal is not supported: it takes images and sound .* model=phi4_mini",
    ),
    "Phi-3-small": (
        {"model_type": "phi3small", "auto_map": {"AutoModelForCausalLM": "modeling_phi3_small.Phi3SmallForCausalLM"}},
        "Phi-3-small is not supported: its block-sparse attention .* model=phi3_5_mini",
    ),
    "a copy of Phi-3-small that renamed its type": (
        {"model_type": "phi3", "auto_map": {"AutoModelForCausalLM": "modeling_phi3_small.Phi3SmallForCausalLM"}},
        "Phi-3-small is not supported",
    ),
    "Phi-4-reasoning-vision": (
        {"model_type": "phi4-siglip"},
        "Phi-4-reasoning-vision is not supported: it takes images .* model=phi4_reasoning",
    ),
    "Phi-4-mini-flash": (
        {"model_type": "phi4flash"},
        "Phi-4-mini-flash is not supported: its state-space layers .* model=phi4_mini_reasoning",
    ),
    "Phi-tiny-MoE": (
        {"model_type": "phimoe", "auto_map": {"AutoConfig": "configuration_slimmoe.PhiMoEConfig"}},
        "Phi-mini-MoE and Phi-tiny-MoE are not supported",
    ),
    "EmbeddingGemma": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "its tokens see later tokens .* Take one that predicts the next token",
    ),
    "phi-2's first upload": ({"model_type": "phi-msft"}, "phi-2's first upload, .* model=phi2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_work_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for trust in (False, True):
        with pytest.raises(ModelError, match=rf"^model\.path is {tmp_path}: .*{words}"):
            read_model_config(ModelSection(path=str(tmp_path), trust_remote_code=trust))


@pytest.mark.parametrize("model_type", ["ministral", "cohere2", "gemma2"])
def test_no_window_is_refused_where_transformers_needs_one(model_type: str, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "head_dim": 16, "pad_token_id": 0}
    config = {"model_type": model_type, **layers, "sliding_window": None, "max_position_embeddings": 128}
    with pytest.raises(ModelError, match=f'own {model_type} class .* set "sliding_window": 128: a window as long as'):
        read_model_config(ModelSection(config=config))
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{tmp_path} has no sliding window"):
        read_model_config(ModelSection(path=str(tmp_path)))
    assert read_model_config(ModelSection(config=config | {"sliding_window": 128})).sliding_window == 128
    qwen = read_model_config(ModelSection(config=config | {"model_type": "qwen3"}))  # its class needs none
    assert qwen.sliding_window is None


def test_a_configuration_in_a_run_file_is_looked_at_too() -> None:
    with pytest.raises(ModelError, match=r"model\.path is phi4_multimodal: Phi-4-multimodal is not supported"):
        read_model_config(ModelSection(init="random", config={"model_type": "phi4_multimodal"}))


def test_the_variants_that_work_are_let_through() -> None:
    for variant in VARIANTS.values():
        config = variant.config(vocab_size=320, pad_token_id=0).to_dict()
        refuse_unsupported(config, variant.name)
        remote = {
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoConfig": "configuration_phi3.Phi3Config",
        }
        refuse_unsupported({**config, "auto_map": remote}, variant.name)


def llama_copy(folder: Path) -> Path:
    """As the copies of phi-4 that were rewritten for Llama."""
    build_tiny(LlamaConfig(**SIZES, num_key_value_heads=2)).save_pretrained(folder)
    return folder


def test_a_copy_rewritten_for_llama_trains_and_says_what_its_adapters_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = llama_copy(tmp_path / "phi-4-copy")
    with caplog.at_level(logging.WARNING, "finetune"):
        base = build_base_model(ModelSection(path=str(copy)))
        assert "phi-4-copy is a copy of a Phi model with split layers (a llama model" in caplog.text
        caplog.clear()
        build_base_model(ModelSection(path=str(llama_copy(tmp_path / "llama"))))
        assert not caplog.text
    add_lora(base, LoraSection(r=2)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"lacks: .*q_proj.*The model has: .*qkv_proj"):
        load_adapter(build_tiny(tiny_phi3_config()), tmp_path / "adapter")
    load_adapter(build_base_model(ModelSection(path=str(copy))), tmp_path / "adapter")


@pytest.mark.skipif(Version(version("transformers")) < Version("5.16"), reason="earlier ones use the long factors")
def test_the_context_of_phi_3_5_moe_ends_where_transformers_stops_being_right() -> None:
    """Its rotary embedding asks for the short factors whatever the length: if this fails, `max_context` can go."""
    import torch

    moe = VARIANTS["Phi-3.5-MoE"]
    models = []
    for factor in (3.0, 9.0):
        config = moe.config(vocab_size=64)
        config.rope_parameters["long_factor"] = [factor] * 2
        models.append(build_tiny(config).eval())
    ids = torch.arange(3, 3 + 2 * BOUNDARY).reshape(1, -1)
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=ids).logits for model in models))
    assert max_context(models[0]) == BOUNDARY
    assert max_context(build_tiny(VARIANTS["Phi-3.5-mini"].config(vocab_size=64))) == SIZES["max_position_embeddings"]
