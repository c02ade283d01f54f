"""`finetune report` and `finetune receipt`: write an HTML page about one run or several, and the receipt of one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.run_options import RunFolderArgument, find_run_folder, refuse_several_processes
from finetune.distributed.environment import is_first_process
from finetune.errors import ConfigError
from finetune.logs import configure_logs
from finetune.runs.durable import replace_file
from finetune.runs.output_files import refuse_unwritable, writes
from finetune.terminal import say, shown_folder
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.runs.recorded_run import RecordedRun

_FILE_NAME = "report.html"


def report(
    run_folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_FOLDER…",
            help="The folder of one run, or of several to compare.",
            callback=lambda folders: [find_run_folder(folder) for folder in folders],
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. Default: report.html in the run's folder; for several runs, in this folder."
        ),
    ] = None,
    data: Annotated[bool, typer.Option(help="Read the data of the runs again, to show a row of it.")] = True,
) -> None:
    """Write the page, and print where it is.

    Raises:
        CheckpointError: a folder holds no run.
        ConfigError: the extra is missing, or see `write_report`.
    """
    if not is_first_process(os.environ):
        return
    configure_logs(0, level=logging.ERROR)  # what could not be read stands on the page
    from finetune.report.page import require_libraries
    from finetune.runs.recorded_run import open_runs

    require_libraries()
    say(f"wrote {write_report(open_runs(run_folders), output, data=data)}. Open it in a browser; it needs no network.")


def write_report(runs: Sequence[RecordedRun], output: Path | None, *, data: bool) -> str:
    """Write the page about runs, and return its path and its size. See `report` for the arguments.

    Raises:
        ConfigError: the file cannot be written or is not a report.
        RunFailedError: the disk is full.
    """
    from finetune.report.page import build_page

    path = output or (runs[0].folder.path / _FILE_NAME if len(runs) == 1 else Path(_FILE_NAME))
    _refuse_to_replace(path)
    previews = []
    if data:
        from finetune.report.data_preview import preview_data_of

        previews = preview_data_of(runs)
    page = build_page(runs, previews).encode()
    with writes(path, "Name another file with --output."):
        replace_file(path, page)
    return f"{path} ({format_bytes(len(page))})"


def _refuse_to_replace(path: Path) -> None:
    """Refuse to replace anything but a report, and a folder that takes no file."""
    from finetune.report.page import MARK

    refuse_unwritable("--output", path)
    if not path.exists() and not path.is_symlink():
        return
    if path.is_file() and not path.is_symlink():
        with path.open("rb") as file:
            if MARK.encode() in file.read(200):
                return
    problem = f"{path} exists and was not written by finetune report"
    raise ConfigError(f"{problem}. Nothing was written; name another file with --output.")


def receipt(run_folder: RunFolderArgument) -> None:
    """Write receipt.json and receipt.html into the run's folder."""
    refuse_several_processes("receipt")
    configure_logs(0, level=logging.WARNING)
    from finetune.report.receipt import write_receipt
    from finetune.runs.recorded_run import open_run

    written, page = write_receipt(open_run(run_folder))
    say(f"Written: {shown_folder(written)}, and the same as a page: {shown_folder(page)}")
