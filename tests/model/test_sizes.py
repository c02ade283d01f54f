"""Sizes that no model has are refused by the numbers in config.json, before anything is built from them."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from finetune.config.schema import LoraSection, ModelSection
from finetune.errors import ConfigError, ModelError
from finetune.export.runtimes import load_transformers
from finetune.model.base import build_base_model, count_parameters, read_model_config
from finetune.model.lora import add_lora
from finetune.model.saved_adapter import load_adapter
from finetune.model.tokens import build_tokenizer
from finetune.model.unsupported import MOST_LAYERS, estimate_parameters, refuse_oversized
from tests.launches import REPOSITORY
from tests.tiny import tiny_tokenizer
from tests.tiny_models import PHI3_SIZES, build_tiny, tiny_phi3_config, tiny_phi_config
from tests.tiny_runs import write_base, write_rows

LAYERS = rf"num_hidden_layers is 1,000,000,000 in its config\.json; expected at most {MOST_LAYERS:,} layers"
REFUSED = {
    "layers": ({"num_hidden_layers": 10**9}, LAYERS),
    "experts": ({"num_local_experts": 10**7}, "num_local_experts is 10,000,000"),
    "layers of a text model inside": ({"text_config": {"num_hidden_layers": 10**9}}, LAYERS),
    "width": ({"hidden_size": 4 * 10**9}, r"parameters \(hidden_size 4,000,000,000"),
    "vocabulary": ({"vocab_size": 10**13}, r"parameters \(vocab_size 10,000,000,000,000"),
    "a number beyond floats": ({"vocab_size": 10**400}, "parameters"),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def change(folder: Path, **keys: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return folder


@pytest.mark.parametrize("what", REFUSED)
def test_sizes_are_refused_by_key_and_value(what: str, base: Path) -> None:
    keys, words = REFUSED[what]
    section = ModelSection(path=str(change(base, **keys)))
    for read in (read_model_config, build_tokenizer, build_base_model):
        with pytest.raises(ModelError, match=f"{base}.* are refused before anything is built: .*{words}"):
            read(section)
    with pytest.raises(ModelError, match=words):
        read_model_config(ModelSection(config={"model_type": "phi3", **PHI3_SIZES, **keys}))


def test_a_folder_that_is_verified_and_one_of_a_tokenizer_are_refused_too(base: Path, tmp_path: Path) -> None:
    change(shutil.copytree(base, tmp_path / "other"), num_hidden_layers=10**9)
    with pytest.raises(ModelError, match=LAYERS):
        load_transformers(tmp_path / "other")
    with pytest.raises(ModelError, match=LAYERS):
        build_tokenizer(ModelSection(path=str(base), tokenizer=str(tmp_path / "other")))


@pytest.mark.parametrize("config", [tiny_phi3_config(), tiny_phi_config()])
def test_the_estimate_is_near_the_parameters_and_real_models_pass(config) -> None:
    real = count_parameters(build_tiny(config))[1]
    assert real / 2 < estimate_parameters(config.to_dict()) < 3 * real
    sizes = {"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384}
    refuse_oversized({**sizes, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 163840}, "1 T")


def test_weights_that_the_memory_of_this_machine_cannot_hold_are_refused(base: Path) -> None:
    memory = psutil.virtual_memory().total + psutil.swap_memory().total
    section = ModelSection(path=str(change(base, vocab_size=memory // (16 * 4) + 1)))
    with pytest.raises(ModelError, match=r"the weights of .* take .* but this machine has .* `finetune plan` says"):
        build_base_model(section)
    with torch.device("meta"):
        assert build_base_model(section.model_copy(update={"init": "random"})).lm_head.weight.device.type == "meta"


def test_a_rank_that_no_tensor_of_an_adapter_has_is_refused(tmp_path: Path) -> None:
    base = build_tiny(tiny_phi3_config())
    add_lora(base, LoraSection(), tiny_tokenizer()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    written = json.loads(file.read_text())
    for keys in ({"r": 10**9}, {"rank_pattern": {"qkv_proj": 10**9}}):
        file.write_text(json.dumps({**written, **keys}))
        with pytest.raises(ModelError, match=r"describes .* parameters \(rank 1,000,000,000\), but .* holds"):
            load_adapter(build_tiny(tiny_phi3_config()), tmp_path)


def test_a_new_adapter_that_no_machine_holds_is_refused() -> None:
    for section in (LoraSection(r=10**11), LoraSection(rank_pattern={"qkv_proj": 10**11})):
        with pytest.raises(ConfigError, match=r"lora.r: the highest rank is 100,000,000,000, so the adapter alone"):
            add_lora(build_tiny(tiny_phi3_config()), section)


@pytest.mark.slow
def test_a_command_refuses_a_billion_layers_with_little_memory(base: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows")
    change(base, num_hidden_layers=10**9)
    words = [f"model.path={base}", f"data.path={tmp_path / 'rows'}", f"output_dir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [sys.executable, "-m", "finetune", "train", *words, "training.device=cpu"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    assert ended.returncode == 2, ended.stderr
    assert "num_hidden_layers is 1,000,000,000" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run" / "run.json").exists()
