"""`finetune runs`: list runs with their states and losses."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune import __version__
from finetune.cli.run_options import JsonOption
from finetune.logs import configure_logs, report_progress, waiting
from finetune.terminal import print_json, print_table, say

if TYPE_CHECKING:
    from finetune.runs.recorded_run import RecordedRun

STYLES = {
    **{"running": "cyan", "completed": "green", "failed": "red"},
    **dict.fromkeys(("stopped", "preempted", "ended early"), "magenta"),
}
_LOSSES = {"train_loss": "train loss", "validation_loss": "validation", "best_loss": "best"}


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="The folder to search, with its subfolders.")
    ] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List the runs in a folder: state, step, losses, when, model, data."""
    configure_logs(0, level=logging.ERROR)
    with waiting(f"reading the runs in {folder}"):
        summaries = _summaries(folder)
    if as_json:
        print_json(summaries)
    elif summaries:
        head = ("run", "state", "step", *_LOSSES.values(), "started", "model", "data")
        print_table(head, [_row(run) for run in summaries], right=("step", *_LOSSES.values()))
    else:
        say(f"no run in {folder}")


def _summaries(folder: Path) -> list[dict[str, Any]]:
    """Summarize the runs in a folder. Those that have ended are read once: an index in the user's cache has the rest.

    Without a cache that can be written, all runs are read each time.
    """
    from finetune.runs.durable import replace_file
    from finetune.runs.file_lock import is_held
    from finetune.runs.recorded_run import find_runs, mapping

    name = hashlib.sha256(f"{__version__} {folder.resolve()}".encode()).hexdigest()[:16]
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
        if values["state"] != "running":
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
    config, best = run.config, run.best_validation
    world_size = run.record.get("world_size")
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
        "started": run.started,
        "finished": run.finished,
        "model": config.model.path or config.model.init if config else None,
        "data": (config.data.label or None) if config else None,
        "world_size": world_size if type(world_size) is int else None,
    }


def _row(run: dict[str, Any]) -> list[str | tuple[str, str]]:
    step = "" if run["step"] is None else f"{run['step']}/{run['num_steps']}" if run["num_steps"] else str(run["step"])
    losses = ["" if run[name] is None else f"{run[name]:.4f}" for name in _LOSSES]
    return [
        run["name"],
        (run["state"], STYLES.get(run["state"], "")),
        step,
        *losses,
        local_time(run["started"]),
        run["model"] or "",
        run["data"] or "",
    ]


def local_time(moment: str | None) -> str:
    """Format a time in ISO 8601 in the local time zone; empty if there is none."""
    try:
        return datetime.fromisoformat(moment or "").astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""
