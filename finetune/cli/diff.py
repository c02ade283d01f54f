"""`finetune diff`: what two runs have different."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.run_options import JsonOption


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another.")],
    as_json: JsonOption = False,
) -> None:
    """Say what two runs have different: config, versions, data, world, results. Exit code 1 where anything is."""
    from finetune.runs.diff import diff_runs

    raise typer.Exit(diff_runs(first, second, as_json=as_json))
