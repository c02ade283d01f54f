"""Make the reference of the command line from the typer application."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from finetune.cli.commands import app

_INTRODUCTION = """# Commands

The help of every command (`finetune COMMAND --help`) on one page, made from the application itself. Exit codes,
colours, completion and JSON: [In the terminal](../terminal.md).
"""


def commands_page() -> str:
    """Return the page as markdown."""
    root = typer.main.get_command(app)
    return "\n".join([_INTRODUCTION, *_parts_of(root, "finetune")]) + "\n"


def all_commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command and group, with the words that call it."""
    yield path, command
    for name in getattr(command, "commands", ()):
        yield from all_commands(command.load(name), f"{path} {name}")


def _parts_of(root: Any, name: str) -> Iterator[str]:
    for path, command in all_commands(root, name):
        context = command.context_class(command, info_name=path)
        yield f"\n## {path}\n"
        yield f"```text\n{path}{_usage(command)}\n```\n"
        yield f"{_cell(command.help or '')}\n"
        for kind in ("argument", "option"):
            records = [it.get_help_record(context) for it in command.params if it.param_type_name == kind]
            rows = [f"| `{_named(record[0], kind)}` | {_cell(record[1])} |" for record in records if record]
            if rows:
                yield "\n".join([f"| {kind} | meaning |", "| --- | --- |", *rows, ""])


def _usage(command: Any) -> str:
    """The words behind the command's name, as its own metavars say them."""
    arguments = [it for it in command.params if it.param_type_name == "argument"]
    words = [it.metavar or (it.name.upper() if it.required else f"[{it.name.upper()}]") for it in arguments]
    options = ["[OPTIONS]"] if any(it.param_type_name == "option" for it in command.params) else []
    inner = ["COMMAND"] if getattr(command, "commands", None) else []
    return "".join(f" {word}" for word in [*options, *words, *inner])


def _named(text: str, kind: str) -> str:
    """An argument's name; an option's names and the kind of its value."""
    return _cell(text.split(" <")[0] if kind == "argument" else text.replace(" range>", ">"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("[default", "\\[default")
