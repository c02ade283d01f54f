"""`finetune checkpoints`: list the checkpoints of a run, and the one from which `resume=auto` goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from finetune.cli.run_options import JsonOption, RunFolderArgument
from finetune.cli.runs import local_time
from finetune.findings import EXIT_PROBLEM
from finetune.logs import configure_logs
from finetune.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from finetune.runs.recorded_run import RecordedRun
    from finetune.runs.state import TrainerState
    from finetune.runs.verification import SavedFolder


def checkpoints(run_folder: RunFolderArgument, as_json: JsonOption = False) -> None:
    """List a run's checkpoints: validation loss, size, whether each is whole, and where resume=auto goes on."""
    from finetune.runs.folder import RunFolder
    from finetune.runs.recorded_run import open_run
    from finetune.runs.state import read_state

    configure_logs(0, level=logging.ERROR)  # damage is reported below
    RunFolder(run_folder).check("auto")
    run = open_run(run_folder, detail="recent")
    newest = next((saved for saved in reversed(run.checkpoints) if not saved.problems), None)
    state = read_state(run.folder.checkpoints / newest.name) if newest else None
    exit_code = EXIT_PROBLEM if run.checkpoints and newest is None else 0
    folders = [*run.checkpoints, *run.published]
    if as_json:
        print_json(
            {
                "run_folder": str(run.folder.path),
                "resumes_from": run.resumes_from,
                "best_step": state.best_step if state else None,
                "best_loss": state.best_loss if state else None,
                "checkpoints": [asdict(saved) for saved in run.checkpoints],
                "published": [asdict(saved) for saved in run.published],
                "exit_code": exit_code,
            }
        )
        raise typer.Exit(exit_code)
    if folders:
        head = ("saved", "validation loss", "size", "written", "is")
        rows = [_row(saved, run, state) for saved in folders]
        print_table(head, rows, right=("validation loss", "size"), title=str(run.folder.path))
    if damaged := [saved.name for saved in folders if saved.problems]:
        say(f"{len(damaged)} damaged: {', '.join(damaged)}.")
    for line in _describe(run, state):
        say(line)
    raise typer.Exit(exit_code)


def _row(saved: SavedFolder, run: RecordedRun, state: TrainerState | None) -> list[str | tuple[str, str]]:
    from finetune.units import format_bytes

    loss = "" if saved.validation_loss is None else f"{saved.validation_loss:.4f}"
    notes = list(saved.problems or ["whole"])
    if saved.step is not None and state is not None and saved.step == state.best_step:
        notes.append("the best")
    if saved.step is not None and saved.step == run.resumes_from:
        notes.append("resume=auto goes on from here")
    status = ("; ".join(notes), "red" if saved.problems else "")
    return [saved.name, loss, format_bytes(saved.num_bytes), local_time(saved.saved), status]


def _describe(run: RecordedRun, state: TrainerState | None) -> Iterator[str]:
    """Yield where `resume=auto` continues, and why not later. `state` is the newest intact checkpoint's."""
    if not run.checkpoints:
        yield "No checkpoint was saved yet: resume=auto starts from the beginning."
        return
    if state is None:
        yield "No checkpoint is whole: resume=auto would start from the beginning."
        return
    yield f"resume=auto goes on from step {run.resumes_from}."
    if state.step != run.resumes_from:
        yield f"Step {state.step} is whole, but its best step, {state.best_step}, must be trained again."
    best = state.best_step
    if best is not None and best not in [saved.step for saved in run.checkpoints]:
        yield f"The best validation, of step {best} (loss {state.best_loss:.4f}), has no checkpoint any more."
