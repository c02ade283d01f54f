"""`finetune runs`: which runs there are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.run_options import JsonOption


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Searched with all below it.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder: state, step, losses, when, model, data."""
    from finetune.runs.listing import list_runs

    raise typer.Exit(list_runs(folder, as_json=as_json))
