"""A run's folder from somebody else executes nothing, and nothing outside of it is touched."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.crash import IS_FULL
from tests.crash.runs import Nursery, contents

pytestmark = pytest.mark.slow

STEP = "checkpoints/step-000006"
OTHER_NAMES = [
    *("pytorch_model.bin", "adapter_model.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth"),
    *("training_args.bin", "model.pkl", "modeling_phi3.py", "handler.py", "__init__.py"),
]


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def sign(folder: Path) -> None:
    """Make a manifest that agrees with what lies in a folder: an attacker can do that too."""
    files = {
        file.name: {"size": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in folder.iterdir()
        if file.is_file() and file.name != "manifest.json"
    }
    write_manifest(folder, files)


def write_manifest(folder: Path, files: dict[str, Any]) -> None:
    record = {"files": dict(sorted(files.items())), "schema_version": 1}
    (folder / "manifest.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def shared(cases: list[Any]) -> list[Any]:
    """All of them in the full sweep, else a few."""
    return cases if IS_FULL else cases[::10]


@pytest.fixture
def outside(nursery: Nursery) -> Path:
    """Files that no run may change."""
    folder = nursery.folder / "outside"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "folder").mkdir(parents=True)
    for name in ("a.txt", "folder/b.txt"):
        (folder / name).write_text("mine")
    return folder


def assert_harmless(nursery: Nursery, outside: Path, what: str, *, commands: tuple[str, ...] = ("train",)) -> list[int]:
    """Every command ends well or with a typed error in one line; nothing was executed or touched outside.

    Returns:
        The exit codes.
    """
    before = contents(outside)
    codes = []
    for command in commands:
        words = {"generate": ["generate", str(nursery.run), "hello"], "evaluate": ["evaluate", str(nursery.run)]}
        ended = nursery.end(nursery.start(command=words.get(command)))
        assert ended.status in (0, 2), f"{what}: {command}\n{ended.screen}"
        assert "Traceback" not in ended.screen, f"{what}: {command}\n{ended.screen}"
        assert ended.status == 0 or "finetune: " in ended.screen
        assert not (nursery.folder / "canary").exists(), f"{what}: {command} executed something"
        assert contents(outside) == before, f"{what}: {command} changed what is outside"
        codes.append(int(ended.status))
    return codes


def test_pickles_under_every_name(nursery: Nursery, whole: Path, outside: Path, tried: Callable[..., None]) -> None:
    payload = pickle.dumps(Touch(nursery.folder / "canary"))
    names = [name for name in contents(whole) if "/" in name and not name.endswith("manifest.json")]
    names += [f"{folder}/{name}" for folder in (STEP, "adapter", "base") for name in OTHER_NAMES]
    count = 0
    for signed in (True, False):
        for name in shared(names if signed else names[::7]):
            nursery.put(whole)
            file = nursery.run / name
            file.write_bytes(payload)
            if signed:
                sign(file.parent)
            commands = ("train", "generate") if name.startswith(("adapter", "base")) and signed else ("train",)
            assert_harmless(nursery, outside, name, commands=commands)
            count += 1
    nursery.put(whole)
    for name in ("run.json", "metrics.jsonl", "config.yaml", "log.txt", ".lock"):
        (nursery.run / name).write_bytes(payload)
    assert_harmless(nursery, outside, "every file of the run", commands=("train", "generate"))
    tried(f"{count + 1} pickles, none executed")


LINKS = [
    *("checkpoints", "adapter", "base", "run.json", "metrics.jsonl", "config.yaml", "log.txt", ".lock", STEP),
    *(f"{STEP}/{name}" for name in ("state.json", "optimizer.safetensors", "manifest.json")),
    *("adapter/adapter_model.safetensors", "base/model.safetensors", ".tmp-run.json", ".tmp-adapter", ".old-adapter"),
    *("checkpoints/.tmp-step-000006", "checkpoints/.tmp-step-000008", "checkpoints/.old-step-000006"),
    *("checkpoints/step-000008", "checkpoints/.old-step-000008", ".tmp-metrics.jsonl", ".tmp-base", ".tmp-config.yaml"),
]


@pytest.mark.parametrize("target", ["folder", "a.txt", "not there"])
def test_links_lead_nowhere(
    nursery: Nursery, whole: Path, outside: Path, tried: Callable[..., None], target: str
) -> None:
    codes = []
    names = shared(LINKS)
    for name in names:
        nursery.put(whole)
        link = nursery.run / name
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(outside / target)
        codes += assert_harmless(nursery, outside, name)
        assert not (outside / "not there").exists(), name
    assert set(codes) <= {0, 2}
    tried(f"{len(names)} links to {target}: {codes.count(2)} refused, {codes.count(0)} passed over or replaced")


DEEP = "[" * 200_000
STATES: dict[str, Any] = {
    "step": [-1, 10**400, 1e308, "6", "../../outside", None, True],
    "epoch": [10**30, -1, 7, [3]],
    "steps_in_epoch": [10**30, 5, "0"],
    "best_step": [10**30, 10**4000, "../../outside/a.txt", "/etc/passwd", -4, 4],
    "best_loss": [float("nan"), float("inf"), 10**400, "low"],
    "num_targets": [10**400, {"a": 1}],
    "world_size": [0, 10**30, "2"],
    "global_batch_size": [0, 10**30],
    "validations_without_improvement": [10**30],
    "schema_version": [2, "1", None],
    "../../outside/a.txt": ["x"],
}


def test_fields_of_the_state(nursery: Nursery, whole: Path, outside: Path, tried: Callable[..., None]) -> None:
    file = nursery.run / STEP / "state.json"
    cases = shared([(field, value) for field, values in STATES.items() for value in values])
    for field, value in cases:
        nursery.put(whole)
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}, indent=2) + "\n")
        sign(file.parent)
        assert_harmless(nursery, outside, f"{field}={str(value)[:40]}")
    tried(f"{len(cases)} values in state.json, each passed over or refused")


def test_fields_of_manifest_and_adapter_config(
    nursery: Nursery, whole: Path, outside: Path, tried: Callable[..., None]
) -> None:
    names = ("../../../outside/a.txt", str(outside / "a.txt"), "..", ".", "", "a/b", ".hidden", "a\0b", "x" * 300)
    cases = shared([(folder, name) for folder in (STEP, "adapter", "base") for name in names])
    for folder, name in cases:
        nursery.put(whole)
        files = json.loads((nursery.run / folder / "manifest.json").read_text())["files"]
        entry = {"size": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}
        write_manifest(nursery.run / folder, {**files, name: entry})
        assert_harmless(nursery, outside, f"{folder}: {name[:40]!r} in the manifest")
    fields = ("base_model_name_or_path", "auto_mapping", "peft_type", "target_modules", "revision", "task_type")
    values = (str(outside), "../../outside", {"base_model_class": "os", "parent_library": "os"}, None, 7)
    changes = shared([(f, v, folder) for f in fields for v in values for folder in (STEP, "adapter")])
    for field, value, folder in changes:
        nursery.put(whole)
        file = nursery.run / folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}, indent=2))
        sign(file.parent)
        commands = ("train", "generate") if folder == "adapter" else ("train",)
        assert_harmless(nursery, outside, f"{folder}: {field}={value}", commands=commands)
    tried(f"{len(cases) + len(changes)} names and values in manifests and adapter configs, none led out of the folder")


def test_json_that_is_deep_or_huge(nursery: Nursery, whole: Path, outside: Path, tried: Callable[..., None]) -> None:
    texts = {"deep": DEEP, "deep and closed": DEEP + "]" * len(DEEP), "a huge number": "9" * 10_000}
    texts["huge"] = " " * 20_000_000
    files = [f"{STEP}/state.json", f"{STEP}/manifest.json", "adapter/manifest.json", "base/manifest.json"]
    files += ["run.json", "metrics.jsonl", ".lock", "config.yaml"]
    cases = shared([(file, what) for file in files for what in texts])
    for file, what in cases:
        nursery.put(whole)
        (nursery.run / file).write_text(texts[what])
        if file.endswith("state.json"):
            sign(nursery.run / STEP)
        assert_harmless(nursery, outside, f"{file} is {what}")
    tried(f"{len(cases)} files of deep or huge JSON, each passed over or refused")
