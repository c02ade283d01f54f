"""`finetune diff`: compare two runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.run_options import JsonOption
from finetune.logs import configure_logs
from finetune.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from finetune.runs.comparison import Difference


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another run's folder.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two runs: config, versions, data, world, results. Exit code 1 if they differ."""
    from finetune.runs.comparison import compare_runs
    from finetune.runs.recorded_run import open_run

    configure_logs(0, level=logging.ERROR)
    runs = [open_run(path, detail="recent") for path in (first, second)]
    facts = compare_runs(runs)
    unread = [str(run.folder.config_file) for run in runs if run.config is None]
    if as_json:
        a, b = (str(run.folder.path) for run in runs)
        print_json({"a": a, "b": b, "differences": [fact.as_record() for fact in facts], "not_compared": unread})
    elif facts:
        show_differences(facts, (str(first), str(second)))
    else:
        say(f"{first} and {second}: no differences except their folders and times")
    for file in [] if as_json else unread:
        say(f"{file} is missing or cannot be read: the configurations were not compared")
    raise typer.Exit(1 if facts else 0)


def show_differences(facts: Sequence[Difference], titles: Sequence[str]) -> None:
    """Print a table of the facts that differ, with a column for each run."""
    print_table(["what", *titles], [[f"{fact.part} {fact.name}", *fact.texts()] for fact in facts])
