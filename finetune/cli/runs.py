"""The commands about run folders: `finetune runs`, `finetune checkpoints` and `finetune watch`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune import __version__
from finetune.cli.run_options import STYLES, JsonOption, RunFolderArgument
from finetune.findings import EXIT_PROBLEM
from finetune.logs import configure_logs, report_progress, waiting
from finetune.terminal import print_json, print_table, say
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.runs.recorded_run import RecordedRun, SavedFolder
    from finetune.runs.state import TrainerState


_LOSSES = {"train_loss": "train loss", "validation_loss": "validation", "best_loss": "best"}
_REWARDS = {"train_reward": "reward", "validation_reward": "validation reward"}
"""Columns for runs that learn from rewards. The table has them if it lists such a run."""
_INDEX_FORMAT = 2
"""Raise it when `summary` gets other keys within a version."""
_SHORT_LIVED = ("running", "unreadable", "unknown")
"""States that may change while the stamps of a run's files stay as they are."""


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The folder to search, with its subfolders.")
    ] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Print a table of the runs below a folder, in the order in which they were started."""
    configure_logs(0, level=logging.ERROR)
    with waiting(f"reading the runs in {folder}"):
        summaries = _summaries(folder)
    if as_json:
        print_json(summaries)
    elif summaries:
        has_rewards = any(run[name] is not None for run in summaries for name in _REWARDS)
        figures = _LOSSES | (_REWARDS if has_rewards else {})
        head = ("run", "state", "step", *figures.values(), "started", "model", "data")
        print_table(head, [_row(run, figures) for run in summaries], right=("step", *figures.values()))
    else:
        say(f"no run in {folder}")


def _summaries(folder: Path) -> list[dict[str, Any]]:
    """Summarize the runs in a folder. Those that have ended are read once: an index in the user's cache has the rest.

    Without a cache that can be written, all runs are read each time.
    """
    from finetune.runs.durable import replace_file
    from finetune.runs.file_lock import is_held
    from finetune.runs.recorded_run import find_runs, mapping

    name = hashlib.sha256(os.fsencode(f"{__version__} {_INDEX_FORMAT} {folder.resolve()}")).hexdigest()[:16]
    index = Path(os.path.expanduser("~/.cache/finetune"), f"runs-{name}.json")  # noqa: PTH111  # pathlib needs a home
    try:
        known = mapping(json.loads(index.read_bytes()))
    except (OSError, ValueError):
        known = {}
    kept, unread = {}, find_runs(folder)
    summaries = []
    while unread:
        run = unread.pop()  # what was read of it is then freed
        report_progress(f"{len(unread):,} left")
        files = (run.folder.config_file, run.folder.record_file, run.folder.metrics_file, run.note_file)
        key = json.dumps([run.name, *map(_stamp, files)])
        is_known = key in known and not is_held(run.folder.lock_file)
        values: dict[str, Any] = known[key] if is_known else summary(run)
        if values["state"] not in _SHORT_LIVED:
            kept[key] = values
        summaries.append({**values, "path": str(run.folder.path)})
    if kept != known:
        with suppress(OSError):
            index.parent.mkdir(parents=True, exist_ok=True)
            replace_file(index, json.dumps(kept).encode())
    return sorted(summaries, key=lambda each: (each["started"] or "", each["name"]))


def _stamp(file: Path) -> list[int]:
    """Return what changes when a file is written; empty for no file."""
    try:
        status = file.stat()
    except OSError:
        return []
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def summary(run: RecordedRun) -> dict[str, Any]:
    """Summarize a run for the list. Unknown values are None; losses are in nats per target token."""
    from finetune.runs.best_validation import best_validation

    config, best = run.config, best_validation(run)
    return {
        "name": run.name,
        "path": str(run.folder.path),
        "state": run.state,
        "why": run.why,
        "step": run.last_step,
        "num_steps": run.num_steps,
        "train_loss": run.last("step", "loss"),
        "validation_loss": run.last("validation", "loss"),
        "best_loss": best[1] if best else None,
        "best_step": best[0] if best else None,
        "train_reward": run.last("step", "reward"),
        "validation_reward": run.last("validation", "reward"),
        "started": run.started,
        "finished": run.finished,
        "model": config.model.path or config.model.init if config else None,
        "data": (config.data.label or None) if config else None,
        "world_size": run.record.get("world_size"),
    }


def _row(run: dict[str, Any], figures: Iterable[str]) -> list[str | tuple[str, str]]:
    from finetune.runs.recorded_run import name_on_one_line

    step = "" if run["step"] is None else f"{run['step']}/{run['num_steps']}" if run["num_steps"] else str(run["step"])
    shown = ["" if run[name] is None else f"{run[name]:z.4f}" for name in figures]
    name, model, data = (name_on_one_line(run[key] or "") for key in ("name", "model", "data"))
    return [
        name,
        (run["state"], STYLES.get(run["state"], "")),
        step,
        *shown,
        local_time(run["started"]),
        model,
        data,
    ]


def local_time(moment: str | None) -> str:
    """Format a time in ISO 8601 in the local time zone; empty if there is none."""
    try:
        return datetime.fromisoformat(moment or "").astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""


def checkpoints(run_folder: RunFolderArgument, as_json: JsonOption = False) -> None:
    """Print a table of a run's checkpoints. Exit with 1 if one is damaged."""
    from finetune.runs.folder import RunFolder
    from finetune.runs.recorded_run import open_run
    from finetune.runs.state import read_state

    configure_logs(0, level=logging.ERROR)  # damage is reported below
    run = open_run(run_folder, detail="recent")  # first: a folder without a run is refused with advice for this command
    RunFolder(run_folder).check("auto")
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
        rows = [_checkpoint_row(saved, run, state) for saved in folders]
        print_table(head, rows, right=("validation loss", "size"), title=str(run.folder.path))
    if damaged := [saved.name for saved in folders if saved.problems]:
        say(f"{len(damaged)} damaged: {', '.join(damaged)}.")
    for line in _describe(run, state):
        say(line)
    raise typer.Exit(exit_code)


def _checkpoint_row(saved: SavedFolder, run: RecordedRun, state: TrainerState | None) -> list[str | tuple[str, str]]:
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


def watch(
    run_folder: RunFolderArgument,
    once: Annotated[bool, typer.Option("--once", help="Show the present state, and exit.")] = False,
) -> None:
    """Show the live view of a run until it ends."""
    from rich.console import Console

    from finetune.runs.recorded_run import open_run
    from finetune.runs.watch import Watch

    configure_logs(0, level=logging.ERROR)
    folder = open_run(run_folder).folder
    with suppress(KeyboardInterrupt):
        Watch(folder, Console()).follow(once=once)
