"""A recipe runs offline at tiny size, as a user starts it."""

from __future__ import annotations

from tests.in_process import run_script
from tests.launches import REPOSITORY
from tests.tiny_training import curve, record, words_for


def test_the_recipe_with_new_tokens_runs(inputs, tmp_path):
    run = [*words_for(inputs, tmp_path / "run"), "lora.new_tokens=['<order>']", "training.max_steps=2"]
    done = run_script(REPOSITORY / "recipes/finetune_new_tokens.py", run)
    assert done.returncode == 0, done.stdout
    assert len(curve(tmp_path / "run")) == 2
    assert record(tmp_path / "run")["status"] == "completed"
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
