"""`finetune watch`: follow a run from another terminal."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Annotated

import typer

from finetune.cli.run_options import RunFolderArgument
from finetune.logs import configure_logs


def watch(
    run_folder: RunFolderArgument,
    once: Annotated[bool, typer.Option("--once", help="Show the present state, and exit.")] = False,
) -> None:
    """Follow a run from another terminal, or show one that has ended. Ctrl-C leaves; the run goes on."""
    from rich.console import Console

    from finetune.runs.recorded_run import open_run
    from finetune.runs.view import Watch

    configure_logs(0, level=logging.ERROR)
    folder = open_run(run_folder).folder
    with suppress(KeyboardInterrupt):
        Watch(folder, Console()).follow(once=once)
