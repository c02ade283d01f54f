"""A tiny run, and copies of it in which one thing is different."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.runs.durable import replace_file
from finetune.runs.tensors import TensorFile, read_tensors
from tests.in_process import run_finetune
from tests.tiny import CHAT_TEMPLATES
from tests.tiny_runs import write_base, write_rows

CHANGED = "model.layers.1.mlp.down_proj.weight"
OTHER_TEMPLATE = (
    CHAT_TEMPLATES["phi4_mini"]
    .replace("<|user|>", "<|system|>")
    .replace("{{ '<|' + message['role'] + '|>'", "{{ '<|' + message['role'] + '|>:'")
)

PATCH = """
import importlib.util, sys

class Patched:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            return importlib.util.spec_from_file_location(name, {file!r})

sys.meta_path.insert(0, Patched())
"""


@dataclass
class Scene:
    """A folder with a base, rows and a run `a`. Run `b` is trained after a fault was planted.

    Attributes:
        place: the folder.
    """

    place: Path

    def train(self, name: str, *overrides: str) -> None:
        done = run_finetune("train", *self.words(name), *overrides)
        assert done.returncode == 0, done.stdout

    def words(self, name: str) -> list[str]:
        place = self.place
        return [
            *("task=finetune_lora", f"model.path={place / 'base'}", f"data.path={place / 'rows'}"),
            *(f"data.cache_dir={place / 'cache'}", f"output_dir={place / name}", "data.on_overlap=warn"),
            *("training.max_steps=6", "training.global_batch_size=4", "training.batch_size=4", "training.device=cpu"),
            *("optim.learning_rate=1e-2", "testing.num_samples=0", "testing.compare_base=false"),
            "testing.general_prompts=none",
            *("checkpoint.save_every=2", "checkpoint.save_total_limit=9"),
        ]

    def copy_of(self, folder: str) -> Path:
        """Copy a folder for `b` alone."""
        return shutil.copytree(self.place / folder, self.place / f"other-{folder}")

    def bisect(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        # The cache that a run's folder names is not read, see docs/security.md.
        done = run_finetune("bisect", *arguments, "--set", f"data.cache_dir={self.place / 'cache'}", "--json")
        assert done.returncode in (0, 3), done.stdout
        return done.returncode, json.loads(done.answer)

    def bisect_both(self) -> tuple[int, dict[str, Any]]:
        return self.bisect(str(self.place / "a"), str(self.place / "b"))


def make_scene(place: Path) -> Scene:
    """Write base and rows, and train `a`."""
    write_base(place / "base")
    write_rows(place / "rows")
    scene = Scene(place)
    scene.train("a")
    return scene


def copied(scene: Scene, place: Path) -> Scene:
    """Copy a scene to another place. Run `a` names the files there, with their dates."""
    for folder in ("base", "rows", "cache", "a"):
        shutil.copytree(scene.place / folder, place / folder)
    for file in ("config.yaml", "run.json"):
        path = place / "a" / file
        path.write_text(path.read_text().replace(str(scene.place), str(place)))
    return Scene(place)


def edit_lines(file: Path, change: Callable[[list[Any]], list[Any]]) -> None:
    """Change the JSON lines of a file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_tensor(file: Path, name: str, by: float = 0.5) -> None:
    """Change one value of a tensor."""
    tensors, _ = read_tensors(file)
    with torch.no_grad():
        tensors[name].view(-1)[0] += by
    replace_file(file, b"".join(bytes(part) for part in TensorFile(tensors, ("format", "pt"))))


def change_losses(run: Path, since: int = 2, by: float = 1e-3) -> None:
    """Let the record of a run have other losses from a step on."""

    def change(events: list[Any]) -> list[Any]:
        return [
            {**event, "loss": event["loss"] + by} if event["event"] == "step" and event["step"] >= since else event
            for event in events
        ]

    edit_lines(run / "metrics.jsonl", change)


def other_environment(folder: Path, module: str, file: Path) -> str:
    """A Python with the packages of this one, of which a module comes from another file."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    (site / "patch_of_a_module.py").write_text(PATCH.format(module=module, file=str(file)))
    (site / "patched.pth").write_text("import patch_of_a_module\n")
    return str(folder / "bin/python")


def claim_version(environment: Path, package: str, version: str) -> None:
    """Let an environment say that it has another version of a package."""
    (site,) = environment.glob("lib/python*/site-packages")
    metadata = site / f"{package}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
