"""Every command that is marked as runnable runs, page by page, in an empty folder, at tiny size."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, README, Block, marked_blocks, name_of, pages_with
from tests.launches import run_command
from tests.warm import programs

_LONGEST_SECONDS = 400
_BIN = str(Path(sys.executable).parent)
_SET_UP = ("python3 -m venv ", ". .venv/", "pip install ")
"""Makes an environment, as this one was made; `.ci/run` does what the README says of it to the letter."""


@pytest.fixture(scope="module")
def kept() -> dict[tuple[str, ...], Path]:
    """Folders by all that was written and run in them: several pages begin with the same commands."""
    return {}


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.parametrize("page", pages_with("runnable"), ids=name_of)
def test_the_commands_of_a_page_work_in_their_order(page, kept, tmp_path, tmp_path_factory):
    done: tuple[str, ...] = ()
    for block in marked_blocks(page):
        if block.marker == "file":
            (tmp_path / block.more).write_text(block.text, encoding="utf-8")
            done = (*done, block.text)
        elif block.marker == "runnable":
            for command in _commands(block):
                done = (*done, command)
                if done in kept:
                    shutil.copytree(kept[done], tmp_path, dirs_exist_ok=True)
                    continue
                _run(command, tmp_path, f"{name_of(page)}:{block.line}")
                if command.startswith(("finetune train quickstart", "finetune merge")):
                    kept[done] = tmp_path_factory.mktemp("kept") / "folder"
                    shutil.copytree(tmp_path, kept[done])
    if page == README:
        report = (tmp_path / "runs/quickstart/report.html").read_text(encoding="utf-8")
        assert "runs/quickstart" in report


def _run(command: str, folder: Path, place: str) -> None:
    _require_the_extra_of(command)
    # The page says `finetune` and `torchrun`: those of this environment, without their imports.
    variables = {"PATH": os.pathsep.join([str(programs()), _BIN, os.environ["PATH"]]), "COLUMNS": "120"}
    words = ["bash", "-euo", "pipefail", "-c", command]
    done = run_command(words, cwd=folder, variables=variables, limit_seconds=_LONGEST_SECONDS)
    assert done.returncode == 0, f"{place}: {command}\n{done.stdout}"


def test_tiny_words_go_to_every_command_of_a_block():
    text = "finetune train quickstart  # a minute\n\nfinetune plan x || true\n"
    block = Block("runnable", "training.max_steps=1", text, 1)
    assert list(_commands(block)) == [
        "finetune train quickstart training.max_steps=1",
        "finetune plan x training.max_steps=1 || true",
    ]


def test_no_marker_gives_a_command_what_the_reader_has_to_choose():
    """A hidden `model=` would run a command that is refused when a reader types it. A run file may have one."""
    for page in pages_with("runnable"):
        for block in marked_blocks(page):
            hidden = {word.partition("=")[0] for word in block.more.split()} if block.marker == "runnable" else set()
            for command in _commands(Block("runnable", "", block.text, block.line)) if hidden else ():
                shown = {word.lstrip("-").partition("=")[0] for word in command.split()}
                missing = {"model", "data", "task", "run"} & hidden - shown
                assert not missing or ".yaml" in command, (
                    f"{name_of(page)}:{block.line}: {command}: write {missing} on the page"
                )


def test_no_two_pages_train_into_one_folder():
    """A reader who follows both in one folder would be refused, or use the model of the other page."""
    pages: dict[str, set[str]] = {}
    for page in PAGES:
        for folder in re.findall(r"^[^`|#\n]*output[_-]dir[= ](runs/[\w-]+)", page.read_text("utf-8"), re.MULTILINE):
            pages.setdefault(folder, set()).add(name_of(page))
    assert {folder: names for folder, names in pages.items() if len(names) > 1} == {}
    assert len(pages) > 20


def _require_the_extra_of(command: str) -> None:
    if command.startswith("finetune report"):
        pytest.importorskip("vl_convert", reason='a report is made with: pip install -e ".[report]"')
    if command.startswith("finetune export onnx"):
        pytest.importorskip("onnxruntime_genai", reason='an ONNX model is built with: pip install -e ".[onnx]"')


def _commands(block: Block) -> list[str]:
    lines = [_without_set_up(line.split("  #")[0].strip()) for line in block.text.splitlines()]
    parted = [line.partition(" || ") for line in lines if line]
    return [f"{command} {shlex.join(block.more.split())}".strip() + "".join(rest) for command, *rest in parted]


def _without_set_up(line: str) -> str:
    return " && ".join(part for part in line.split(" && ") if not part.startswith(_SET_UP))
