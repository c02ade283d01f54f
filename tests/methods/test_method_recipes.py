"""The recipes and tasks of the methods run offline at tiny size, as a user starts them."""

from __future__ import annotations

import json

import pytest

from tests.in_process import run_script
from tests.launches import REPOSITORY
from tests.methods.tiny_training import curve, record, words_for, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    (folder / "texts").mkdir()
    for split in ("train", "validation", "test"):
        rows = [{"text": f"{split} {number}: crates of oranges to Porto"} for number in range(9)]
        (folder / "texts" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    ("name", "words", "left"),
    [
        ("finetune_new_tokens", ["lora.new_tokens=['<order>']"], "adapter_model.safetensors"),
        ("finetune_lora", ["lora.dora=true"], "adapter_model.safetensors"),
        ("finetune_full", ["task=continue_pretraining", "data.path=TEXTS"], "model.safetensors"),
    ],
)
def test_a_recipe_runs(inputs, tmp_path, name, words, left):
    words = [word.replace("TEXTS", str(inputs / "texts")) for word in words]
    run = [*words_for(inputs, tmp_path / "run"), *words, "training.max_steps=2"]
    done = run_script(REPOSITORY / "recipes" / f"{name}.py", run)
    assert done.returncode == 0, done.stdout
    assert len(curve(tmp_path / "run")) == 2
    assert record(tmp_path / "run")["status"] == "completed"
    assert (tmp_path / "run/adapter" / left).is_file()
