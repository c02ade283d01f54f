"""What `finetune bisect` prints, computes and refuses, and other environments."""

from __future__ import annotations

import shlex
import shutil
import sys
import tracemalloc
from importlib.util import find_spec
from pathlib import Path

import pytest

from finetune.errors import ConfigError
from finetune.replay.trace import run_other_python
from tests.in_process import run_finetune
from tests.launches import run_command
from tests.replay.scene import Scene, edit_lines, make_scene, other_environment


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("bisect"))


@pytest.mark.slow
def test_the_two_commands_show_the_difference(scene):
    scene.train("late", "training.drop_last=true")
    done = run_finetune("bisect", scene.place / "a", scene.place / "late")
    assert done.returncode == 3, done.stdout
    assert f"{scene.place / 'a'} and {scene.place / 'late'} differ from step 5 on: the loss is 5." in done.answer
    *_, cause, first, second = done.answer.splitlines()
    assert cause.startswith("Cause: training.drop_last is false in ")
    assert first.endswith(" --steps 5-5")  # from the checkpoint of step 4
    assert second == f"{first} training.drop_last=true"
    for command, code in {first: 0, second: 3}.items():
        done = run_finetune(*shlex.split(command)[1:])
        assert done.returncode == code, done.stdout


def test_a_run_that_can_be_computed_again_is_equal_and_is_not_changed(scene):
    before = {path: path.stat().st_mtime_ns for path in (scene.place / "a").rglob("*")}
    assert scene.bisect(str(scene.place / "a"))[1]["num_steps"] == 6
    code, found = scene.bisect(str(scene.place / "a"), "--steps", "3-5")
    assert (code, found["num_steps"], found["cause"]) == (0, 3, None)
    assert {path: path.stat().st_mtime_ns for path in (scene.place / "a").rglob("*")} == before


def test_a_run_with_an_equals_sign_in_its_name_is_a_run(scene, tmp_path):
    other = shutil.copytree(scene.place / "a", tmp_path / "lr=0.1")
    code, found = scene.bisect(str(scene.place / "a"), str(other))
    assert (code, found["b"], found["num_steps"]) == (0, str(other), 6)
    shown = run_finetune("config", "show", other, "seed=3", code=0).answer
    assert f"# {other}/config.yaml:" in shown


def test_rows_that_have_changed_since_a_run_are_named(scene, tmp_path):
    rows = shutil.copytree(scene.place / "rows", tmp_path / "rows")
    scene.train("c", f"data.path={rows}")

    def change(lines):
        lines[2]["messages"][1]["content"] = "Friday"
        return lines

    edit_lines(rows / "train.jsonl", change)
    code, found = scene.bisect(str(scene.place / "c"))
    assert (code, found["cause"]["type"], found["cause"]["name"]) == (3, "row", "row 3")
    assert '"Friday<|end|>' in found["cause"]["text"]
    (command,) = found["commands"]
    assert shlex.split(command)[-2:] == ["--set", f"data.cache_dir={scene.place / 'cache'}"]


@pytest.mark.slow
def test_keys_that_differ_only_together_are_all_named(scene):
    code, found = scene.bisect(str(scene.place / "a"), "training.batch_size=2", "training.global_batch_size=4")
    assert (code, found["num_steps"]) == (0, 6), "keys that change nothing"
    scene.train("two", "optim.weight_decay=0.1", "lora.alpha=8")
    code, found = scene.bisect(str(scene.place / "a"), str(scene.place / "two"))
    assert (code, found["cause"]["type"], found["cause"]["name"]) == (3, "key", "lora.alpha, optim.weight_decay")
    assert scene.bisect(*shlex.split(found["commands"][1])[2:])[0] == 3


def test_runs_without_a_common_step_and_wrong_arguments_are_refused(scene, tmp_path):
    shutil.copytree(scene.place / "a", tmp_path / "b")
    (tmp_path / "b/metrics.jsonl").write_text("")
    shutil.copytree(scene.place / "a", tmp_path / "later")
    edit_lines(tmp_path / "later/metrics.jsonl", lambda events: [{**event, "step": 99} for event in events])
    a = scene.place / "a"
    for arguments, part in (
        ([a, tmp_path / "b"], "b has no recorded step"),
        ([a, tmp_path / "later"], "have no recorded step in common"),
        ([a, tmp_path], "is not the folder of a run"),
        ([a, "--steps", "4-5"], "can begin at 1, 3, 5, 6."),
        ([a, "--steps", "7-8"], "can begin at 1, 3, 5, 6."),
        ([a, "--steps", "1-20"], "a has the steps 1 to 6."),
        ([a, a, "--steps", "1-2"], "--steps and another run cannot be given together"),
        ([a, "seed=1", "--python", "python3"], "--python and OVERRIDES cannot be given together"),
        ([a, "sed=1"], "Did you mean seed?"),
    ):
        done = run_finetune("bisect", *arguments)
        assert (done.returncode, part in done.errors) == (2, True), done.stdout


def test_steps_that_cannot_be_computed_leave_the_recorded_facts(scene, tmp_path):
    rows = shutil.copytree(scene.place / "rows", tmp_path / "rows")
    scene.train("gone", f"data.path={rows}", "optim.weight_decay=0.1")
    shutil.rmtree(rows)
    code, found = scene.bisect(str(scene.place / "a"), str(scene.place / "gone"))
    assert (code, found["step"], found["cause"]["name"]) == (3, 2, "data.path, optim.weight_decay")
    assert "no such file or folder" in found["notes"][0]
    assert [one["name"] for one in found["differences"]][:2] == ["data.path", "optim.weight_decay"]


@pytest.mark.slow
def test_a_random_base_follows_its_seed(scene):
    words = [*("model.path=null", "model.init=random", f"model.tokenizer={scene.place / 'base'}")]
    config = (scene.place / "base/config.json").read_text().replace("\n", " ")
    for name, word in {"r": "seed=0", "s": "seed=1", "t": "optim.weight_decay=0.1"}.items():
        scene.train(name, *words, f"model.config={config}", word)
    for name, key in (("s", "seed"), ("t", "optim.weight_decay")):
        code, found = scene.bisect(str(scene.place / "r"), str(scene.place / name))
        assert (code, found["cause"]["name"]) == (3, key)


@pytest.mark.slow
@pytest.mark.process
def test_another_environment_with_a_patched_optimizer(scene, tmp_path):
    source = Path(str(find_spec("torch.optim.adam").origin)).read_text()
    patched = tmp_path / "adam.py"
    patched.write_text(source.replace("step_size = lr / bias_correction1", "step_size = lr * 1.001 / bias_correction1"))
    assert patched.read_text() != source
    python = other_environment(tmp_path / "env", "torch.optim.adam", patched)
    code, found = scene.bisect(str(scene.place / "a"), "--python", python)
    cause = found["cause"]
    assert (code, found["step"], cause["type"], cause["name"]) == (3, 2, "computation", "loss of step 2")
    again = f"finetune bisect {scene.place / 'a'} --steps 1-2 --set data.cache_dir={scene.place / 'cache'}"
    assert found["commands"] == [again, f"{python} -m {again}"]


@pytest.mark.slow
@pytest.mark.warm
def test_an_equal_environment_and_one_without_finetune(scene, tmp_path):
    assert scene.bisect(str(scene.place / "a"), "--python", sys.executable)[0] == 0
    for wrong, part in ((tmp_path / "none", "cannot be started"), (shutil.which("false"), "did not compute the steps")):
        done = run_finetune("bisect", scene.place / "a", "--python", wrong)
        assert (done.returncode, part in done.errors) == (2, True), done.stdout


@pytest.mark.process
def test_of_what_another_python_prints_only_the_last_line_of_errors_is_kept(tmp_path):
    loud = tmp_path / "loud"
    loud.write_text("#!/bin/sh\nhead -c 200000000 /dev/zero\nhead -c 200000000 /dev/zero >&2\necho >&2\necho why >&2\n")
    loud.chmod(0o755)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"which did not verify the run \(exit code 0: why\)"):
        run_other_python(str(loud), ["any.module"], tmp_path / "none", "verify the run")
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.warm
def test_two_processes_are_equal_to_one(scene):
    words = [*scene.words("world"), "parallel.num_processes=2", "training.batch_size=2"]
    done = run_command([sys.executable, "-m", "finetune", "train", *words])
    assert done.returncode == 0, done.stdout
    code, found = scene.bisect(str(scene.place / "a"), str(scene.place / "world"))
    assert (code, found["cause"]) == (0, None), found
