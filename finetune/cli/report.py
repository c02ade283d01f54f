"""`finetune report`: one page about one run or several."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from finetune.distributed.environment import is_first_process
from finetune.errors import ConfigError
from finetune.logs import configure_logs
from finetune.runs.durable import describe_os_error, replace_file

FILE_NAME = "report.html"


def report(
    run_folders: Annotated[
        list[Path], typer.Argument(metavar="RUN_FOLDER…", help="One run's folder, or several to lay over each other.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The page's file. Default: report.html in the run's folder; for several, where you are."),
    ] = None,
    data: Annotated[bool, typer.Option(help="Read the data of the runs again, to show a row of it.")] = True,
) -> None:
    """Write one page about one run or several: curves, what differs, data, answers. It opens without a network."""
    write_report(run_folders, output=output, with_data=data)


def write_report(folders: Sequence[Path], *, output: Path | None = None, with_data: bool = True) -> None:
    """Write the page. Nothing of a run is changed. Under a launcher the first process does it for all.

    Args:
        folders: of the runs; the first one's curves come first.
        output: the page's file; by default report.html, in the run's folder, or where we are for several runs. A
            report that stands there is replaced, anything else is not.
        with_data: read the data of the runs again, to show a row.

    Raises:
        CheckpointError: a folder holds no run.
        ConfigError: a library is missing, or the page cannot be written there.
    """
    if not is_first_process(os.environ):
        return
    configure_logs(0, level=logging.ERROR)  # what could not be read stands on the page

    from finetune.report.page import build_page, require_libraries
    from finetune.runs.recorded_run import open_runs

    require_libraries()
    runs = open_runs(folders)
    path = output or (runs[0].folder.path / FILE_NAME if len(runs) == 1 else Path(FILE_NAME))
    _refuse_to_replace(path)
    data = []
    if with_data:
        from finetune.report.data_preview import preview_data_of

        data = preview_data_of(runs)
    page = build_page(runs, data).encode()
    try:
        replace_file(path, page)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {describe_os_error(error)}. Name another file with --output."
        ) from error
    sys.stdout.write(f"wrote {path} ({len(page) / 1e6:.1f} MB). Open it in a browser; it needs no network.\n")


def _refuse_to_replace(path: Path) -> None:
    """Only a page of ours may be replaced.

    Raises:
        ConfigError: something else stands there.
    """
    from finetune.report.page import MARK

    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ConfigError(f"{path} is there and is no plain file. Nothing was written; name another with --output.")
    if not path.exists():
        return
    with path.open("rb") as file:
        if MARK.encode() not in file.read(200):
            raise ConfigError(
                f"{path} is there and was not written by finetune report. Nothing was written; name another file "
                "with --output."
            )
