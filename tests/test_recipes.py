"""Every recipe runs offline at tiny size, under what starts it; and reads as a story."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
from datetime import timedelta

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from finetune import load_config
from tests.in_process import run_finetune, run_script
from tests.launches import REPOSITORY, run_launched
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events

pytestmark = pytest.mark.warm

RECIPES = REPOSITORY / "recipes"
TRIED_IN = {
    **dict.fromkeys(["finetune_lora", "finetune_full", "debug_single_gpu"], "test_recipes.py"),
    "train_ddp_standalone": "test_one_curve.py",
    "train_ddp_torchrun": "test_recipes.py",
    "finetune_new_tokens": "training/test_method_recipes.py",
    "finetune_preferences": "training/preferences/test_preference_runs.py",
    "finetune_qlora": "model/test_quantized.py",
}
TINY = ["training.max_steps=2", "training.batch_size=4", "testing.max_new_tokens=4", "testing.num_samples=1"]
TINY += ["testing.general_prompts=none"]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    base, rows = write_base(folder / "base"), write_rows(folder / "rows")
    return [f"model.path={base}", f"data.path={rows}", f"data.cache_dir={folder / 'cache'}", *TINY]


@pytest.mark.parametrize("name", ["finetune_lora", "finetune_full", "debug_single_gpu"])
def test_a_recipe_runs(tmp_path, words, name):
    done = run_script(RECIPES / f"{name}.py", [*words, f"output_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stdout
    assert len(events(tmp_path / "run", "step")) == 2
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "completed"
    weights = "model.safetensors" if name == "finetune_full" else "adapter_model.safetensors"
    assert (tmp_path / "run/adapter" / weights).is_file()
    if name == "debug_single_gpu":
        assert "micro-batch 0: " in done.stdout
        assert "targets, on cpu; it begins: " in done.stdout


def test_every_recipe_runs_in_a_test():
    assert set(TRIED_IN) == {path.stem for path in RECIPES.glob("*.py")}
    for name, file in TRIED_IN.items():
        assert re.search(rf"\b{name}\b", (REPOSITORY / "tests" / file).read_text()), f"{file} does not start {name}"


@pytest.mark.slow
def test_full_fine_tuning_runs_as_two_processes(tmp_path, words):
    """Under accelerate; tests/test_one_curve.py runs it under torchrun."""
    done = run_launched("accelerate", [RECIPES / "finetune_full.py", *words, f"output_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["world_size"], record["launcher"], record["backend"]) == (2, "accelerate", "gloo")
    assert len(events(tmp_path / "run", "step")) == 2


@pytest.mark.parametrize("name", ["train_ddp_standalone", "train_ddp_torchrun"])
def test_the_processes_of_a_recipe_meet_as_the_config_says(monkeypatch, name):
    spec = importlib.util.spec_from_file_location(name, RECIPES / f"{name}.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    given = {}

    def join(timeout=None, **keys):
        given.update(keys, timeout=timeout)
        raise InterruptedError

    monkeypatch.setattr(recipe, "initialize_ddp", join)
    words = ["parallel.backend=gloo", "parallel.timeout_minutes=2", "training.device=cpu"]
    arguments = [words] if name == "train_ddp_torchrun" else [0, 2, load_config(words, run="train_ddp")]
    with pytest.raises(InterruptedError):
        recipe.main(*arguments)
    assert (given["timeout"], given["backend"], given["device"]) == (timedelta(minutes=2), "gloo", "cpu")


@pytest.mark.slow
def test_the_guides_script_trains_as_two_processes_and_tests_on_rank_0(tmp_path, words):
    """That for torchrun; the other one starts its processes in tests/test_one_curve.py."""
    recipe = [RECIPES / "train_ddp_torchrun.py", *words, f"output_dir={tmp_path / 'run'}"]
    done = run_launched("torchrun", recipe)
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["status"] == "completed"
    assert (record["world_size"], record["launcher"], record["backend"]) == (2, "torchrun", "gloo")
    assert record["global_batch"] == {"global_batch_size": 16, "batch_size": 4, "world_size_asked": 2}
    assert len(events(tmp_path / "run", "step")) == 2
    assert done.stdout.count("Training and testing completed successfully!") == 1
    assert done.stdout.count("Next: finetune generate") == 1


def test_the_standalone_script_ends_with_the_code_of_its_processes(words, monkeypatch):
    recipe = runpy.run_path(str(RECIPES / "train_ddp_standalone.py"))

    class Processes:
        def join(self, grace_period):
            raise ProcessExitedException("ended", error_index=1, error_pid=7, exit_code=2)

    monkeypatch.setitem(recipe["start"].__globals__, "spawn", lambda *_, **__: Processes())
    with pytest.raises(SystemExit) as left:
        recipe["start"](words)
    assert left.value.code == 2


def test_the_guides_script_for_torchrun_runs_alone_too(tmp_path, words):
    done = run_script(RECIPES / "train_ddp_torchrun.py", [*words, f"output_dir={tmp_path / 'run'}"])
    assert done.returncode == 0, done.stdout
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert (record["status"], record["world_size"]) == ("completed", 1)


def test_debug_shows_the_traceback_of_a_user_s_mistake(tmp_path, words):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{no json\n")
    own = [f"output_dir={tmp_path / 'run'}", f"data.path={broken}"]
    done = run_script(RECIPES / "debug_single_gpu.py", [*words, *own])
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


def test_a_finished_bf16_run_measures_the_same_again(tmp_path, words):
    run = [*words, f"output_dir={tmp_path / 'run'}", "training.precision=bf16"]
    done = run_finetune("train", *run)
    assert done.returncode == 0, done.stdout
    losses = {event["model"]: f"{event['loss']:.4f}" for event in events(tmp_path / "run", "test")}
    assert set(losses) == {"base", "tuned"}
    again = run_finetune("evaluate", tmp_path / "run")
    assert again.returncode == 0, again.stdout
    assert all(loss in again.stdout for loss in losses.values()), (losses, again.stdout)
