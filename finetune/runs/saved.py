"""`finetune checkpoints`: what a run has saved, whether it is whole, and what `resume=auto` would go on from."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import CheckpointError
from finetune.findings import EXIT_PROBLEM
from finetune.logs import configure_logs
from finetune.runs.durable import MANIFEST, in_units
from finetune.runs.folder import RunFolder
from finetune.runs.metrics_reader import number_in, read_events
from finetune.runs.verification import newest_valid, read_state, verify, verify_published

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """One folder with a manifest: a checkpoint, or `adapter/` or `base/`, which have no step."""

    name: str
    step: int | None
    validation_loss: float | None
    """After that step, in nats per target token; None where none was measured then, or it was no number."""
    num_bytes: int
    saved: str
    """When its manifest was written, in UTC, ISO 8601."""
    problems: list[str]
    """What is wrong with it; empty where all bytes are as they were written."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """All that a run has saved."""

    run_folder: str
    resumes_from: int | None
    """The step that `resume=auto` goes on from; None: it would start from the beginning."""
    best_step: int | None
    """The step with the lowest validation loss, as the newest whole checkpoint knows it."""
    best_loss: float | None
    checkpoints: list[SavedFolder]
    published: list[SavedFolder]
    """`adapter/` and `base/`, those that are there."""

    @property
    def exit_code(self) -> int:
        """0 where there is something whole to go on from, or nothing was saved yet."""
        return EXIT_PROBLEM if self.checkpoints and self.resumes_from is None else 0


def list_checkpoints(path: Path, *, as_json: bool = False) -> int:
    """Print what a run has saved; every byte is read and compared with what was written. Nothing is changed.

    Args:
        path: the run's folder.
        as_json: write the figures as JSON in place of a table.

    Returns:
        The exit code, see `SavedRun.exit_code`.

    Raises:
        CheckpointError: there is no run in the folder.
    """
    configure_logs(0, level=logging.ERROR)  # what is damaged is told below
    run = examine_run(path)
    if as_json:
        text = json.dumps({**asdict(run), "exit_code": run.exit_code}, indent=2, ensure_ascii=False)
        sys.stdout.write(f"{text}\n")
        return run.exit_code
    if run.checkpoints or run.published:
        from rich.console import Console

        Console().print(_table(run))
    sys.stdout.write(f"{_in_words(run)}\n")
    return run.exit_code


def examine_run(path: Path) -> SavedRun:
    """Read and verify everything with a manifest in a run's folder.

    Raises:
        CheckpointError: there is no run in the folder.
    """
    folder = RunFolder(path)
    folder.check("auto")
    if not any(file.exists() for file in (folder.record_file, folder.metrics_file, folder.checkpoints)):
        raise CheckpointError(
            f"{path} is not the folder of a run: it has neither {folder.record_file.name} nor "
            f"{folder.metrics_file.name} nor {folder.checkpoints.name}/. Give one, for example runs/quickstart."
        )
    losses = dict(_validation_losses(folder.metrics_file))
    checkpoints = [
        saved
        for step in folder.checkpoint_steps()
        if (saved := _examine(folder.checkpoint(step), step=step, validation_loss=losses.get(step)))
    ]
    taken = newest_valid(folder)
    newest = next((folder.checkpoint(saved.step or 0) for saved in reversed(checkpoints) if not saved.problems), None)
    state = read_state(newest) if newest else None
    return SavedRun(
        run_folder=str(folder.path),
        resumes_from=read_state(taken).step if taken else None,
        best_step=state.best_step if state else None,
        best_loss=state.best_loss if state else None,
        checkpoints=checkpoints,
        published=[saved for path in (folder.adapter, folder.base) if (saved := _examine(path))],
    )


def _examine(path: Path, *, step: int | None = None, validation_loss: float | None = None) -> SavedFolder | None:
    """None where there is no such folder, or no longer: a run that goes on removes old checkpoints meanwhile."""
    try:
        files = [file.lstat() for file in path.iterdir() if file.is_file() and not file.is_symlink()]
        problems = verify_published(path) if step is None else verify(path)
        manifest = path / MANIFEST
        written = (manifest if manifest.exists() else path).lstat().st_mtime
    except FileNotFoundError:
        return None
    return SavedFolder(
        name=path.name,
        step=step,
        validation_loss=validation_loss,
        num_bytes=sum(file.st_size for file in files),
        saved=datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        problems=problems,
    )


def _validation_losses(metrics_file: Path) -> Iterator[tuple[int, float]]:
    """Step and loss of each validation; lines that are torn or not ours are passed over."""
    for event in read_events(metrics_file):
        step, loss = event.get("step"), number_in(event, "loss")
        if event["event"] == "validation" and type(step) is int and loss is not None and math.isfinite(loss):
            yield step, loss


def _table(run: SavedRun) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=run.run_folder)
    table.add_column("saved")
    table.add_column("validation loss", justify="right")
    table.add_column("size", justify="right")
    table.add_column("written", no_wrap=True)
    table.add_column("is", overflow="fold")
    for saved in (*run.checkpoints, *run.published):
        loss = "" if saved.validation_loss is None else f"{saved.validation_loss:.4f}"
        written = datetime.fromisoformat(saved.saved).astimezone().strftime("%Y-%m-%d %H:%M")
        what = "; ".join([*(saved.problems or ["whole"]), *_marks(saved, run)])
        # A file's name could be taken for markup.
        table.add_row(
            saved.name, loss, in_units(saved.num_bytes), written, Text(what, style="red" * bool(saved.problems))
        )
    return table


def _marks(saved: SavedFolder, run: SavedRun) -> Iterator[str]:
    if saved.step is None:
        return
    if saved.step == run.best_step:
        yield "the best"
    if saved.step == run.resumes_from:
        yield "resume=auto goes on from here"


def _in_words(run: SavedRun) -> str:
    damaged = [saved.name for saved in (*run.checkpoints, *run.published) if saved.problems]
    lines = [f"{len(damaged)} damaged: {', '.join(damaged)}."] if damaged else []
    whole = [saved.step for saved in run.checkpoints if not saved.problems]
    if not run.checkpoints:
        lines.append("No checkpoint was saved yet: resume=auto starts from the beginning.")
    elif not whole:
        lines.append("No checkpoint is whole: resume=auto would start from the beginning.")
    else:
        lines.append(f"resume=auto goes on from step {run.resumes_from}.")
    if whole and whole[-1] != run.resumes_from:
        lines.append(f"Step {whole[-1]} is whole, but its best step, {run.best_step}, must be trained again.")
    if run.best_step is not None and run.best_step not in [saved.step for saved in run.checkpoints]:
        lines.append(
            f"The lowest validation loss, {run.best_loss:.4f}, was at step {run.best_step}, which was not kept."
        )
    return "\n".join(lines)
