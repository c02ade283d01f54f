"""`finetune watch`: a run seen from another terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from finetune.cli.run_options import RunFolderArgument


def watch(
    run_folder: RunFolderArgument,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and leave.")] = False,
) -> None:
    """Follow a run from another terminal, or look at one that has ended. Ctrl-C leaves; the run goes on."""
    from rich.console import Console

    from finetune.runs.watch import watch_run

    raise typer.Exit(watch_run(run_folder, Console(), once=once))
