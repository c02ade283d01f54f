"""What holds for the whole package: layers, one home per fact, no pickle, no print."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.never_run import never_run
from tests.tiers import not_drawn

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = sorted((REPOSITORY / "finetune").rglob("*.py"))
LAUNCH_VARIABLE = re.compile(r"(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|(SLURM|OMPI|PMI|ACCELERATE|TORCHELASTIC)_\w+)")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def files_that_import(*packages: str) -> set[str]:
    """Those of which a module is imported; a file is parsed only where such a name is written."""

    def imports_one(path: Path) -> bool:
        return any(name in path.read_text() for name in packages) and any(
            name.split(".")[0] in packages for name in imports_of(path)
        )

    return files_where(imports_one)


def files_where(is_found) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in SOURCES if is_found(path)}


def test_every_module_imports_from_lower_layers_only():
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports")], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    asked = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"Contracts: {len(asked)} kept, 0 broken." in done.stdout


def test_one_module_imports_accelerate():
    assert files_that_import("accelerate") == {"finetune/distributed/accelerate_library.py"}


@pytest.mark.parametrize("call", ["init_process_group(", "destroy_process_group("])
def test_one_module_starts_and_ends_process_groups(call):
    assert files_where(lambda path: call in path.read_text()) == {"finetune/distributed/process_group.py"}


def test_one_module_names_launch_variables_and_one_those_of_accelerate():
    def reads_one(path: Path) -> bool:
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        return any(isinstance(value, str) and LAUNCH_VARIABLE.fullmatch(value) for value in constants)

    modules = ("environment", "accelerate_settings")
    assert files_where(reads_one) == {f"finetune/distributed/{name}.py" for name in modules}


def test_nothing_is_pickled_or_printed():
    assert files_that_import("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib") == set()
    assert (
        files_where(lambda path: re.search(r"torch\.(load|save)\(|^\s*print\(", path.read_text(), re.MULTILINE))
        == set()
    )


def test_no_module_has_a_name_that_says_nothing():
    vague = re.compile(r"(utils?|common|helpers?|misc|managers?|base_.*)")
    assert [path for path in SOURCES if vague.fullmatch(path.stem)] == []


def test_the_repository_names_no_path_of_one_machine():
    tracked = subprocess.run(["git", "--git-dir=.git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout: there is no list of the repository's own files")
    others = (".safetensors", ".jsonl", ".png")
    texts = [REPOSITORY / name for name in tracked.stdout.split() if not name.endswith(others)]
    found = re.compile(r"/(root|home/\w+|work)/[\w.]+")
    assert [str(path) for path in texts if path.is_file() and found.search(path.read_text(encoding="utf-8"))] == []


def test_a_test_that_ran_in_no_command_of_ci_is_found():
    lines = ["a::ran", "a::skipped\tSkipped: no AVX-512 here", "a::missing\tSkipped: trl: not installed"]
    collected = ["a::ran", "a::skipped", "a::missing", "a::new", "tests/gpu/test_x.py::y"]
    assert never_run(collected, lines) == ["a::missing", "a::new"]


def test_a_sample_is_the_same_each_time_and_the_others_are_what_is_left():
    cases = [*range(20)]
    left = not_drawn("a::sweep", cases, 3)
    assert len(left) == 17
    assert left == not_drawn("a::sweep", cases, 3) == sorted(left)
    assert left != not_drawn("a::other", cases, 3)
    assert not_drawn("a::sweep", cases, 20) == not_drawn("a::sweep", cases, 30) == []
