"""What `finetune upgrade` says of environments that compute other bytes, other values, or nothing."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.in_process import run_finetune
from tests.replay.scene import Scene, claim_version, make_scene, other_environment
from tests.warm import python_of


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("upgrade"))


def patched(folder: Path, module: str, old: str, new: str) -> str:
    """An environment in which the source of a module differs."""
    source = Path(str(find_spec(module).origin)).read_text()
    assert old in source
    file = folder / "patched.py"
    file.write_text(source.replace(old, new))
    return python_of(other_environment(folder / "env", module, file))  # it is started twice


def upgrade(scene: Scene, python: str, *options: str):
    words = ["--python", python, "--set", f"data.cache_dir={scene.place / 'cache'}", *options]
    return run_finetune("upgrade", scene.place / "a", *words)


@pytest.mark.slow
@pytest.mark.process
def test_an_optimizer_that_rounds_differently_is_the_same_within_rounding(scene, tmp_path):
    step_size = "step_size = lr / bias_correction1"
    python = patched(tmp_path, "torch.optim.adam", step_size, f"{step_size} * (1 + 1e-6)")
    done = upgrade(scene, python, "--same-bytes", "--json")
    result = json.loads(done.answer)
    assert (done.returncode, result["verdict"], result["cause"]) == (3, "same within rounding", None), result
    assert not result["has_equal_steps"]
    assert 0 < result["largest_difference"] < result["bound"]


@pytest.mark.slow
@pytest.mark.process
def test_other_answers_name_the_package_although_all_steps_are_equal(scene, tmp_path):
    # Training computes the adapter by the engine; PEFT serves it.
    scaled = "lora_B(lora_A(dropout(x))) * scaling"
    python = patched(tmp_path, "peft.tuners.lora.layer", scaled, f"{scaled} * 1.5")
    claim_version(tmp_path / "env", "peft", "99.0")
    done = upgrade(scene, python)
    assert done.returncode == 3, done.stdout
    assert "Verdict: differs." in done.answer
    assert "logits at position" in done.answer
    assert "differ only in peft (" in done.answer.replace("\n", " ")
