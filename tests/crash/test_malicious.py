"""A run's folder from somebody else executes nothing, and nothing outside of it is touched."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.crash import IS_FULL
from tests.crash.runs import Nursery, contents, explained

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


@pytest.fixture
def outside(nursery: Nursery) -> Path:
    """Files that no run may change."""
    folder = nursery.folder / "outside"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "folder").mkdir(parents=True)
    for name in ("a.txt", "folder/b.txt"):
        (folder / name).write_text("mine")
    return folder


TRAIN, BOTH = ("train",), ("train", "generate")
Case = tuple[str, Callable[[], object], tuple[str, ...]]
"""What it is, what makes it of a whole run, and the commands that meet it."""


def pickles(run: Path, whole: Path, outside: Path) -> Iterator[Case]:
    payload = pickle.dumps(Touch(outside.with_name("canary")))
    names = [name for name in contents(whole) if "/" in name and not name.endswith("manifest.json")]
    names += [f"{folder}/{name}" for folder in (STEP, "adapter", "base") for name in OTHER_NAMES]

    def put(name: str, *, signed: bool) -> None:
        (run / name).write_bytes(payload)
        if signed:
            sign((run / name).parent)

    for name in names:
        yield name, partial(put, name, signed=True), BOTH if name.startswith(("adapter", "base")) else TRAIN
        yield f"{name}, not in the manifest", partial(put, name, signed=False), TRAIN
    for name in ("run.json", "metrics.jsonl", "config.yaml", "log.txt", ".lock"):
        yield name, partial(put, name, signed=False), BOTH


LINKS = [
    *("checkpoints", "adapter", "base", "run.json", "metrics.jsonl", "config.yaml", "log.txt", ".lock", STEP),
    *(f"{STEP}/{name}" for name in ("state.json", "optimizer.safetensors", "manifest.json")),
    *("adapter/adapter_model.safetensors", "base/model.safetensors", ".tmp-run.json", ".tmp-adapter", ".old-adapter"),
    *("checkpoints/.tmp-step-000006", "checkpoints/.tmp-step-000008", "checkpoints/.old-step-000006"),
    *("checkpoints/step-000008", "checkpoints/.old-step-000008", ".tmp-metrics.jsonl", ".tmp-base", ".tmp-config.yaml"),
]


def links(run: Path, whole: Path, outside: Path) -> Iterator[Case]:
    def put(name: str, target: str) -> None:
        link = run / name
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(outside / target)

    for name in LINKS:
        for target in ("folder", "a.txt", "not there"):
            yield f"{name} to {target}", partial(put, name, target), TRAIN


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
NAMES = ("../../../outside/a.txt", "..", ".", "", "a/b", ".hidden", "a\0b", "x" * 300)
FIELDS = ("base_model_name_or_path", "auto_mapping", "peft_type", "target_modules", "revision", "task_type")
DEEP = "[" * 200_000
TEXTS = {"deep": DEEP, "deep, closed": DEEP + "]" * len(DEEP), "a huge number": "9" * 10_000, "huge": " " * 20_000_000}


def values(run: Path, whole: Path, outside: Path) -> Iterator[Case]:
    """Of state.json, manifests and adapter configurations."""

    def change(file: Path, field: str, value: Any) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), field: value}, indent=2) + "\n")
        sign(file.parent)

    def add_to_manifest(folder: Path, name: str) -> None:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        write_manifest(folder, {**files, name: {"size": 4, "sha256": hashlib.sha256(b"mine").hexdigest()}})

    for field, wrong in STATES.items():
        for value in wrong:
            yield f"{field}={str(value)[:40]}", partial(change, run / STEP / "state.json", field, value), TRAIN
    for folder in (STEP, "adapter", "base"):
        for name in (*NAMES, str(outside / "a.txt")):
            yield f"{folder}: {name[:40]!r} in the manifest", partial(add_to_manifest, run / folder, name), TRAIN
    for value in (str(outside), "../../outside", {"base_model_class": "os", "parent_library": "os"}, None, 7):
        for field in FIELDS:
            for folder, commands in ((STEP, TRAIN), ("adapter", BOTH)):
                file = run / folder / "adapter_config.json"
                yield f"{folder}: {field}={value}", partial(change, file, field, value), commands


def texts(run: Path, whole: Path, outside: Path) -> Iterator[Case]:
    def put(name: str, text: str) -> None:
        (run / name).write_text(text)
        if name.endswith("state.json"):
            sign(run / STEP)

    files = [f"{STEP}/state.json", f"{STEP}/manifest.json", "adapter/manifest.json", "base/manifest.json"]
    for file in [*files, "run.json", "metrics.jsonl", ".lock", "config.yaml"]:
        for what, text in TEXTS.items():
            yield f"{file} is {what}", partial(put, file, text), TRAIN


@pytest.mark.parametrize("cases", [pickles, links, values, texts])
def test_nothing_is_executed_or_touched_outside(
    nursery: Nursery, whole: Path, outside: Path, tried: Callable[..., None], cases: Callable[..., Iterator[Case]]
) -> None:
    """Every command ends well or with a typed error in one line."""
    chosen = list(cases(nursery.run, whole, outside))[:: 1 if IS_FULL else 10]
    before = contents(outside)
    for what, spoil, commands in chosen:
        nursery.put(whole)
        spoil()
        for command in commands:
            generate = ["generate", str(nursery.run), "hello"] if command == "generate" else None
            ended = nursery.end(nursery.start(command=generate))
            with explained(f"{what}: {command}\n{ended.screen}"):
                assert ended.status in (0, 2)
                assert "Traceback" not in ended.screen
                assert ended.status == 0 or "finetune: " in ended.screen
                assert not (nursery.folder / "canary").exists(), "something was executed"
                assert contents(outside) == before, "files outside have changed"
    tried(f"{len(chosen)} cases, each passed over, replaced or refused")
