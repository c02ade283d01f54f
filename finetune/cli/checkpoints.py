"""`finetune checkpoints`: list the checkpoints of a run, and the one from which `resume=auto` goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from finetune.cli.run_options import JsonOption, RunFolderArgument
from finetune.cli.runs import local_time
from finetune.logs import configure_logs
from finetune.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from finetune.runs.saved import SavedFolder, SavedRun


def checkpoints(run_folder: RunFolderArgument, as_json: JsonOption = False) -> None:
    """List a run's checkpoints: validation loss, size, whether each is whole, and where resume=auto goes on."""
    from finetune.runs.saved import examine_run

    configure_logs(0, level=logging.ERROR)  # damage is reported below
    run = examine_run(run_folder)
    if as_json:
        print_json({**asdict(run), "exit_code": run.exit_code})
        raise typer.Exit(run.exit_code)
    if run.folders:
        head = ("saved", "validation loss", "size", "written", "is")
        rows = [_row(saved, run) for saved in run.folders]
        print_table(head, rows, right=("validation loss", "size"), title=run.run_folder)
    for line in _describe(run):
        say(line)
    raise typer.Exit(run.exit_code)


def _row(saved: SavedFolder, run: SavedRun) -> list[str | tuple[str, str]]:
    from finetune.units import format_bytes

    loss = "" if saved.validation_loss is None else f"{saved.validation_loss:.4f}"
    notes = list(saved.problems or ["whole"])
    if saved.step is not None and saved.step == run.best_step:
        notes.append("the best")
    if saved.step is not None and saved.step == run.resumes_from:
        notes.append("resume=auto goes on from here")
    what = ("; ".join(notes), "red" if saved.problems else "")
    return [saved.name, loss, format_bytes(saved.num_bytes), local_time(saved.saved), what]


def _describe(run: SavedRun) -> Iterator[str]:
    damaged = [saved.name for saved in run.folders if saved.problems]
    whole = [saved.step for saved in run.checkpoints if not saved.problems]
    if damaged:
        yield f"{len(damaged)} damaged: {', '.join(damaged)}."
    if not run.checkpoints:
        yield "No checkpoint was saved yet: resume=auto starts from the beginning."
    elif not whole:
        yield "No checkpoint is whole: resume=auto would start from the beginning."
    else:
        yield f"resume=auto goes on from step {run.resumes_from}."
    if whole and whole[-1] != run.resumes_from:
        yield f"Step {whole[-1]} is whole, but its best step, {run.best_step}, must be trained again."
    if run.best_step is not None and run.best_step not in [saved.step for saved in run.checkpoints]:
        yield f"The best validation, of step {run.best_step} (loss {run.best_loss:.4f}), has no checkpoint any more."
