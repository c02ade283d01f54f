"""Adapters that a GGUF LoRA cannot carry are refused before anything is written. test_llama_cpp.py runs the others."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from finetune.errors import ConfigError, ModelError
from finetune.export.gguf import Gguf
from finetune.export.gguf_lora import export_lora
from tests.export.finished_runs import write_run


def export(run, folder):
    gguf = Gguf(converter=folder / "convert_hf_to_gguf.py", weight_type="f32")
    return export_lora(run, folder / "out", gguf=gguf, with_base=True, with_modelfile=True)


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"use_dora": True}, r"DoRA's magnitudes \(.*lora_magnitude_vector"),
        ({"trainable_token_indices": {"embed_tokens": [330]}}, r"new tokens \(.*trainable_tokens"),
        ({"modules_to_save": ["embed_tokens"]}, r"trained embeddings \(.*embed_tokens"),
        ({"alpha_pattern": {"o_proj": 2}}, r"alpha_pattern"),
        ({"rank_pattern": {"o_proj": 2}}, r"rank_pattern"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_would_be_lost_is_named(tmp_path, settings, lost):
    run = write_run(tmp_path / "run", **settings)
    with pytest.raises(ModelError, match=rf"this adapter also has {lost}.*\. Merge it, and export the merged model"):
        export(run, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-base"]


def test_a_run_without_an_adapter_is_told_to_be_merged(tmp_path):
    with pytest.raises(ConfigError, match=r"trained every weight, so there is no adapter"):
        export(write_run(tmp_path / "run", full=True), tmp_path)


def test_a_tokenizer_that_llama_cpp_cannot_have_is_refused_before_anything_is_computed(tmp_path, monkeypatch):
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    monkeypatch.setattr("finetune.export.gguf_lora.build_run_tokenizer", lambda config: words)
    monkeypatch.setattr("finetune.export.gguf_lora.vectors_of_run", lambda run: pytest.fail("vectors were computed"))
    with pytest.raises(ModelError, match="the tokenizer is of the kind WordLevel"):
        export(write_run(tmp_path / "run"), tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.process
@pytest.mark.parametrize(("rslora", "alpha"), [(False, 8.0), (True, 16.0)])
def test_the_scale_that_llama_cpp_computes_is_the_runs(tmp_path, rslora, alpha):
    """llama.cpp scales by alpha / rank: for rsLoRA of rank 4 and alpha 8, which is scaled by 8 / 2, alpha is 16."""
    script = tmp_path / "convert_lora_to_gguf.py"
    script.write_text(
        f"import shutil, sys; shutil.copy(sys.argv[1] + '/adapter_config.json', {str(tmp_path)!r}); exit(1)"
    )
    with pytest.raises(ModelError, match="it gave no reason"):
        export(write_run(tmp_path / "run", use_rslora=rslora), tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == alpha
