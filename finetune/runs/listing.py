"""`finetune runs`: the runs below a folder, how each stands, and its losses. Reads alone; imports no torch."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.compose import compose
from finetune.errors import CheckpointError, ConfigError
from finetune.logs import configure_logs
from finetune.runs.folder import RunFolder
from finetune.runs.metrics_reader import Event, number_in, read_events
from finetune.runs.record import read_run_record

if TYPE_CHECKING:
    from rich.table import Table

    from finetune.config.schema import Config

_DEEPEST = 4
"""Folders below the given one, so that a whole disk is not searched by mistake."""
_STYLES = {"running": "cyan", "completed": "green", "failed": "red", "stopped": "yellow", "preempted": "yellow"}


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run. What is not known is None."""

    name: str
    """Its folder, from the one that was searched."""
    path: str
    state: str
    """`running`, `completed`, `failed`, `stopped`, `preempted` or `unknown`, see `read_state_of`."""
    why: str | None
    """Why it failed or stopped, where it said so."""
    step: int | None
    num_steps: int | None
    train_loss: float | None
    """Of the last step, in nats per target token."""
    validation_loss: float | None
    """The last one."""
    best_loss: float | None
    best_step: int | None
    started: str | None
    """The last start, in UTC, ISO 8601."""
    finished: str | None
    model: str | None
    data: str | None
    world_size: int | None


def list_runs(folder: Path, *, as_json: bool = False) -> int:
    """Print the runs in a folder and below.

    Args:
        folder: searched; a run's own folder shows that run.
        as_json: write a list of objects in place of a table.

    Returns:
        The exit code: 0.

    Raises:
        CheckpointError: there is no such folder.
    """
    configure_logs(0, level=logging.ERROR)
    runs = find_runs(folder)
    if as_json:
        sys.stdout.write(json.dumps([asdict(run) for run in runs], indent=2, ensure_ascii=False) + "\n")
        return 0
    if not runs:
        sys.stdout.write(f"no run in {folder}\n")
        return 0
    from rich.console import Console

    Console().print(_table(runs))
    return 0


def find_runs(folder: Path) -> list[RunSummary]:
    """The runs in a folder and below, by the time of their last start.

    Raises:
        CheckpointError: there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder. Give the one that your runs are in: finetune runs runs (the default)."
        )
    found = [summarise(path, name=_name_below(path, folder)) for path in _run_folders(folder, _DEEPEST)]
    return sorted(found, key=lambda run: (run.started or "", run.name))


def summarise(path: Path, *, name: str | None = None) -> RunSummary:
    """What one run's folder says of it."""
    folder = RunFolder(path)
    record = read_run_record(folder.record_file) or {}
    events = read_events(folder.metrics_file)
    steps = [event for event in events if event["event"] == "step"]
    validations = [event for event in events if event["event"] == "validation"]
    best = min(validations, key=lambda event: _or_infinity(number_in(event, "loss")), default=None)
    config = read_config(folder)
    result = mapping_in(record, "result")
    starts = record.get("starts")
    return RunSummary(
        name=name or str(path),
        path=str(folder.path),
        state=read_state_of(folder, record),
        why=_text(result.get("why") or result.get("error")),
        step=_step(steps[-1]) if steps else None,
        num_steps=_whole(record.get("num_steps")),
        train_loss=_finite(number_in(steps[-1], "loss")) if steps else None,
        validation_loss=_finite(number_in(validations[-1], "loss")) if validations else None,
        best_loss=_finite(number_in(best, "loss")) if best else None,
        best_step=_step(best) if best else None,
        started=_text(starts[-1]) if isinstance(starts, list) and starts else None,
        finished=_text(record.get("finished")),
        model=config.model.path or config.model.init if config else None,
        data=(config.data.path or "mixture") if config else None,
        world_size=_whole(record.get("world_size")),
    )


def read_state_of(folder: RunFolder, record: dict[str, Any]) -> str:
    """How a run stands.

    A run that is killed leaves run.json as it was; only the kernel's lock tells it from a run that goes on.

    Args:
        folder: the run's.
        record: what its run.json says.

    Returns:
        `running`; `stopped` where it says so or nobody is left to say it; else what run.json says, `unknown` where it
        says nothing.
    """
    if is_being_written(folder):
        return "running"
    said = record.get("status")
    if said == "running":
        return "stopped"
    return said if isinstance(said, str) else "unknown"


def is_being_written(folder: RunFolder) -> bool:
    """Whether a living process holds the run's lock. Nothing is written, and the lock is not kept from anybody."""
    try:
        descriptor = os.open(folder.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def is_run(path: Path) -> bool:
    """Whether something lies in a folder that only a run writes."""
    folder = RunFolder(path)
    return any(file.exists() for file in (folder.record_file, folder.metrics_file, folder.checkpoints))


def refuse_what_is_no_run(path: Path) -> RunFolder:
    """The folder of a run.

    Raises:
        CheckpointError: it is none.
    """
    if not is_run(path):
        raise CheckpointError(
            f"{path} is not the folder of a run: it has neither run.json nor metrics.jsonl nor checkpoints/. "
            "finetune runs FOLDER lists those that are there."
        )
    return RunFolder(path)


def read_config(folder: RunFolder) -> Config | None:
    """The run's resolved configuration; None where it is missing, torn or of a schema that we cannot read."""
    if not folder.config_file.is_file():
        return None
    try:
        return compose([], run=str(folder.config_file), complete=False)
    except (ConfigError, OSError):
        return None


def mapping_in(record: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of run.json; empty where it is missing or something else."""
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in below:
        if not path.name.startswith("."):
            yield from _run_folders(path, depth - 1)


def _name_below(path: Path, folder: Path) -> str:
    return str(path) if path == folder else path.relative_to(folder).as_posix()


def _table(runs: list[RunSummary]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("run", overflow="fold")
    table.add_column("state")
    for name in ("step", "train loss", "validation", "best"):
        table.add_column(name, justify="right")
    for name in ("started", "model", "data"):
        table.add_column(name, overflow="fold")
    for run in runs:
        step = "" if run.step is None else f"{run.step}/{run.num_steps}" if run.num_steps else str(run.step)
        losses = [_shown(loss) for loss in (run.train_loss, run.validation_loss, run.best_loss)]
        texts = (_when(run.started), _last_part(run.model), _last_part(run.data))
        # A folder's name could be taken for markup.
        table.add_row(
            Text(run.name), Text(run.state, style=_STYLES.get(run.state, "")), step, *losses, *map(Text, texts)
        )
    return table


def _shown(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f}"


def _when(moment: str | None) -> str:
    try:
        return datetime.fromisoformat(moment or "").astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""


def _last_part(path: str | None) -> str:
    return Path(path).name if path else ""


def _step(event: Event) -> int | None:
    return _whole(event.get("step"))


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _finite(value: float | None) -> float | None:
    return None if value is None or value != value or abs(value) == float("inf") else value


def _or_infinity(value: float | None) -> float:
    return value if value is not None and value == value else float("inf")
