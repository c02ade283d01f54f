"""Every recipe runs offline at tiny size, under what starts it; and reads as a story."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests.launches import REPOSITORY, run_launched
from tests.tiny_runs import write_base, write_rows

RECIPES = REPOSITORY / "recipes"
TINY = ["training.max_steps=2", "training.batch_size=4", "testing.max_new_tokens=4", "testing.num_samples=1"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    base, rows = write_base(folder / "base"), write_rows(folder / "rows")
    return [f"model.path={base}", f"data.path={rows}", f"data.cache_dir={folder / 'cache'}", *TINY]


def steps_in(folder: Path) -> list[dict]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


@pytest.mark.parametrize("name", ["finetune_lora", "finetune_full", "debug_single_gpu"])
def test_a_recipe_runs_under_python(tmp_path, words, name):
    done = run_launched("python", [RECIPES / f"{name}.py", *words, f"output_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stdout
    assert len(steps_in(tmp_path / "run")) == 2
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "completed"
    weights = "model.safetensors" if name == "finetune_full" else "adapter_model.safetensors"
    assert (tmp_path / "run/adapter" / weights).is_file()
    if name == "debug_single_gpu":
        assert "input_ids (" in done.stdout
        assert "computed on cpu" in done.stdout


@pytest.mark.launch
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_full_fine_tuning_runs_as_two_processes(tmp_path, words, launcher):
    done = run_launched(launcher, [RECIPES / "finetune_full.py", *words, f"output_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["world_size"], record["launcher"], record["backend"]) == (2, launcher, "gloo")
    assert len(steps_in(tmp_path / "run")) == 2


def test_debug_shows_the_traceback_of_a_user_s_mistake(tmp_path, words):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{no json\n")
    recipe = [RECIPES / "debug_single_gpu.py", *words, f"output_dir={tmp_path / 'run'}", f"data.path={broken}"]
    done = run_launched("python", recipe)
    assert done.returncode == 2
    assert "Traceback" in done.stdout
    assert "broken.jsonl:1" in done.stdout


def test_the_recipe_to_learn_from_is_short_and_has_no_loop_no_number_and_no_torch():
    tree = ast.parse((RECIPES / "finetune_lora.py").read_text())
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    kinds = [type(node) for node in ast.walk(body)]
    assert ast.For not in kinds
    assert ast.While not in kinds
    assert not [n for n in ast.walk(body) if isinstance(n, ast.Constant) and isinstance(n.value, (int, float))]
    assert "import torch" not in (RECIPES / "finetune_lora.py").read_text()
    assert len((RECIPES / "finetune_lora.py").read_text().splitlines()) <= 50
