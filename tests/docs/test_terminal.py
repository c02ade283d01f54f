"""The statements of docs/terminal.md on exit codes, colours, completion and JSON, on a real terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import typer.main

from finetune.cli import EXIT_BUG, EXIT_INTERRUPTED
from finetune.cli.commands import app
from finetune.errors import FinetuneError, PreemptedError, RunFailedError
from finetune.signals import Terminated
from tests.docs.pages import DOCS
from tests.in_process import run_finetune
from tests.terminals import run_on_terminal

sys.path.insert(0, str(DOCS / "generate"))
from commands import all_commands

PAGE = (DOCS / "terminal.md").read_text(encoding="utf-8")
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-7]|4[0-7]|9[0-7]|38;[25]|48;[25])[0-9;]*m")
FINETUNE = [sys.executable, "-m", "finetune"]


def test_no_color_is_obeyed():
    assert COLOUR.search(run_on_terminal(100, "--help").raw), "the terminal has colours, else this test says nothing"
    assert not COLOUR.search(run_on_terminal(100, "--help", NO_COLOR="1").raw)


@pytest.mark.process
def test_a_pipe_gets_no_escape_codes():
    done = subprocess.run([*FINETUNE, "--help"], capture_output=True, check=True)
    assert b"\x1b" not in done.stdout


@pytest.mark.process
def test_the_completion_of_the_shell_above_it_can_be_shown():
    command = ["bash", "-c", f"{shlex.join([*FINETUNE, '--show-completion'])}; exit"]  # exit: else it becomes python
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "_FINETUNE_COMPLETE=complete_bash" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("finetune pr", "preview"),
        ("finetune plan quickstart model=phi4_m", "model=phi4_mini"),
        ("finetune preview quickstart optim.learn", "optim.learning_rate="),
    ],
)
def test_the_shell_is_told_commands_runs_configs_and_keys(typed, offered):
    asked = {"_FINETUNE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    done = subprocess.run(FINETUNE, env={**os.environ, **asked}, capture_output=True, text=True)
    assert re.findall(r'"([^"]+?)"', done.stdout)[0].partition(":")[0] == offered, done.stdout + done.stderr


def test_the_exit_codes_are_those_of_the_code():
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)}
    errors = {FinetuneError.exit_code, RunFailedError.exit_code, PreemptedError.exit_code, Terminated.exit_code}
    assert table == {0, EXIT_BUG, EXIT_INTERRUPTED} | errors


FORMATS = ("gguf", "lora", "ollama", "onnx", "vllm", "smallest", "text")
ACTS = {"help", "init", "train", "sweep", "chat", "merge", "push", "watch", "report", "receipt"}
ACTS |= {"recipes copy", "config schema", *(f"export {name}" for name in FORMATS)}
"""Commands whose output is no data, or is nothing but JSON."""


def test_where_the_output_is_data_there_is_json():
    commands = {
        path.removeprefix("finetune").strip(): it for path, it in all_commands(typer.main.get_command(app), "finetune")
    }
    named = re.search(r"have `--json`: (.*?) and others", PAGE, re.DOTALL)
    assert named is not None
    assert set(re.findall("`(.+?)`", named[1])) <= commands.keys() - ACTS
    answering = {name for name, it in commands.items() if not getattr(it, "commands", None) or name == "recipes"}
    assert answering >= ACTS
    for name in answering - ACTS:
        assert any("--json" in parameter.opts for parameter in commands[name].params), f"{name} has no --json"


def test_a_configuration_as_json_has_values_and_where_they_came_from():
    said = json_of("config", "show", "quickstart", "optim.learning_rate=1e-4")
    assert said["config"]["optim"]["learning_rate"] == 1e-4
    assert said["origins"]["optim.learning_rate"] == "command line"
    assert said["origins"]["lora.dropout"] == "default"
    assert {"run", "model", "data", "task", "parallel"} == json_of("config", "list").keys()
    assert json_of("recipes")["finetune_lora"].startswith("Fine-tune a LoRA adapter")


def json_of(*words: str):
    done = run_finetune(*words, "--json")
    assert done.returncode == 0, done.stdout
    return json.loads(done.answer)
