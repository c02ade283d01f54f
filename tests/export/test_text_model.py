"""The text model of a model that also reads images: what it computes, and what is said before it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from finetune.config.schema import ModelSection
from finetune.diagnose.family import find_family
from finetune.errors import ModelError, RunFailedError
from finetune.export import text_model
from finetune.export.text_model import _text_model_of, write_text_model
from finetune.model.base import build_base_model, read_model_config
from tests.in_process import run_finetune
from tests.tiny import tiny_tokenizer

VOCABULARY = len(tiny_tokenizer())
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0},
}
PICTURES = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14, "head_dim": 8},
}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "layer_types": ["linear_attention", "full_attention"],
}
IDS = {"boi_token_index": 6, "eoi_token_index": 7, "mm_tokens_per_image": 4}
WHOLE: dict[str, dict[str, Any]] = {
    "gemma3": {
        **{"text_config": {"model_type": "gemma3_text", **SIZES, "sliding_window": 16}, "vision_config": PICTURES},
        **{**IDS, "image_token_index": 5},
    },
    "mistral3": {
        "text_config": {"model_type": "ministral3", **SIZES},
        **{"vision_config": {"model_type": "pixtral", **PICTURES}, "image_token_index": 5},
    },
    "qwen3_5": {
        **{"text_config": {"model_type": "qwen3_5_text", **SIZES, **LINEAR}, "image_token_id": 5},
        "vision_config": {
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
            "num_position_embeddings": 16,
        },
    },
}


def build(model_type: str) -> Any:
    """A tiny random model with an image encoder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **WHOLE[model_type])
    return AutoModelForImageTextToText.from_config(config).eval()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Gemma 3 with its encoder, as the hub has Gemma 3 4B."""
    folder = tmp_path_factory.mktemp("models") / "gemma-3-tiny-it"
    build("gemma3").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_model_with_encoders_is_refused_with_the_command_that_writes_its_text_model(whole: Path) -> None:
    for read in (read_model_config, build_base_model):
        with pytest.raises(
            ModelError, match=f"gemma3 model, which reads .*: finetune export text {whole} {whole.name}-text"
        ):
            read(ModelSection(path=str(whole)))
    with pytest.raises(ModelError, match=r"-text --revision v1\. Then set model="):
        read_model_config(ModelSection(path=str(whole), revision="v1"))
    with pytest.raises(ModelError, match=r"Give the keys of its text model, whose type is gemma3_text\."):
        read_model_config(ModelSection(config={"model_type": "gemma3"}))


def test_where_transformers_leaves_the_encoders_out_the_text_model_is_read() -> None:
    keys = {"model_type": "qwen3_5", **WHOLE["qwen3_5"], "quantization_config": {"quant_method": "fp8"}}
    config = read_model_config(ModelSection(config=keys))
    assert (config.model_type, config.hidden_size) == ("qwen3_5_text", SIZES["hidden_size"])
    assert config.quantization_config == {"quant_method": "fp8"}, "or weights are read as if they were not quantized"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_vl"}, r"does not know its text model \(qwen3_vl_text\) as a causal language model"),
        (
            {
                "model_type": "musicgen",
                **{"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}},
                "decoder": {"model_type": "musicgen_decoder"},
            },
            "a musicgen model has several text models",
        ),
    ],
)
def test_what_has_no_causal_text_model_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_model_config(ModelSection(config=config))


def test_the_text_model_of_a_family_is_what_a_proof_reads(whole: Path) -> None:
    config, _ = find_family(str(whole))
    assert (config.model_type, config.hidden_size) == ("gemma3_text", SIZES["hidden_size"])


@pytest.mark.parametrize(
    "model_type",
    [pytest.param("gemma3"), *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral3", "qwen3_5"))],
)
def test_the_text_model_computes_what_the_whole_computes(model_type: str) -> None:
    with_encoders = build(model_type)
    model = _text_model_of(with_encoders, model_type)
    assert type(model) is AutoModelForCausalLM._model_mapping[type(model.config)]
    assert not [name for name, _ in model.named_parameters() if "vision" in name or "visual" in name]
    ids = torch.randint(8, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, with_encoders(input_ids=ids).logits)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.warm
def test_the_folder_is_what_transformers_loads_and_training_takes(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "text"
    done = run_finetune("export", "text", whole, out, code=0)
    assert f"Written to {out}: a gemma3_text model of" in done.stdout
    assert "against the whole model: largest difference of a logit " in done.stdout
    model = build_base_model(ModelSection(path=str(out)))
    assert model.config.model_type == "gemma3_text"
    of_text, of_whole = load_file(out / "model.safetensors"), load_file(whole / "model.safetensors")
    assert of_text
    for name, tensor in of_text.items():
        assert torch.equal(tensor, of_whole[name.replace("model.", "language_model.model.", 1)])
    again = run_finetune("export", "text", whole, out, code=2)
    assert "already exists and is not an empty folder" in again.stdout
    alone = run_finetune("export", "text", out, tmp_path / "again", code=2)
    assert "has no text model beside encoders" in alone.stdout


def test_other_logits_end_the_command_and_nothing_stays(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(folder: Path, prompts: Any, name: str) -> Any:
        rows = sum(len(prompt.token_ids) for prompt in prompts)
        return {"problems": {}, "dtypes": ["float32"], "is_tied": True, "stop_ids": stops}, torch.randn(
            rows, VOCABULARY
        )

    stops = json.loads((whole / "generation_config.json").read_text()).get("eos_token_id")
    monkeypatch.setattr(text_model, "reload_plainly", differ)
    monkeypatch.setattr(text_model, "refuse_other", lambda *_, **__: None)
    with pytest.raises(RunFailedError, match="does not compute what the whole model computes for text"):
        write_text_model(str(whole), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_and_quantized_weights_are_refused(whole: Path, tmp_path: Path) -> None:
    torn = shutil.copytree(whole, tmp_path / "torn")
    tensors = load_file(torn / "model.safetensors")
    lost = next(name for name in tensors if "layers.1.mlp.down_proj" in name and "vision" not in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, torn / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 weights, the first is .*layers\.1\.mlp\.down_proj"):
        write_text_model(str(torn), tmp_path / "out")
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (torn / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"are quantized\. Give the model in 16 bits"):
        write_text_model(str(torn), tmp_path / "out")
