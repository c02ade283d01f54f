"""List what a run has saved, and check every byte of it. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from finetune.findings import EXIT_PROBLEM
from finetune.runs.durable import MANIFEST
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import finite, open_run
from finetune.runs.verification import newest_valid, read_state, verify_checkpoint, verify_published


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """One folder with a manifest: a checkpoint, or `adapter/` or `base/`, which have no step."""

    name: str
    step: int | None
    validation_loss: float | None
    """The validation loss after that step, in nats per target token; None if it was not measured or is not finite."""
    num_bytes: int
    saved: str
    """The time when its manifest was written, in UTC, ISO 8601."""
    problems: list[str]
    """A line for each damaged file; empty if all bytes are as they were written."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The folders that a run has saved."""

    run_folder: str
    resumes_from: int | None
    """The step from which `resume=auto` continues; None if it would start from the beginning."""
    best_step: int | None
    """The step of the best validation, according to the newest intact checkpoint."""
    best_loss: float | None
    checkpoints: list[SavedFolder]
    published: list[SavedFolder]
    """`adapter/` and `base/`, if they exist."""

    @property
    def folders(self) -> list[SavedFolder]:
        """The checkpoints, then the published folders."""
        return [*self.checkpoints, *self.published]

    @property
    def exit_code(self) -> int:
        """0 if a checkpoint is intact, or none was saved yet."""
        return EXIT_PROBLEM if self.checkpoints and self.resumes_from is None else 0


def examine_run(path: Path) -> SavedRun:
    """Read every byte that a run has saved, once, and compare it with the manifests. Nothing is changed.

    Raises:
        CheckpointError: there is no run in the folder.
    """
    RunFolder(path).check("auto")
    run = open_run(path, detail="recent")
    folder = run.folder
    losses = dict(finite(run.points("validation", "loss")))
    verified = functools.cache(verify_checkpoint)
    checkpoints = [
        saved
        for step in folder.checkpoint_steps()
        if (saved := _examine(folder.checkpoint(step), verified, step=step, validation_loss=losses.get(step)))
    ]
    taken = newest_valid(folder, verified)
    newest = next((folder.checkpoint(saved.step or 0) for saved in reversed(checkpoints) if not saved.problems), None)
    state = read_state(newest) if newest else None
    return SavedRun(
        run_folder=str(folder.path),
        resumes_from=read_state(taken).step if taken else None,
        best_step=state.best_step if state else None,
        best_loss=state.best_loss if state else None,
        checkpoints=checkpoints,
        published=[saved for path in (folder.adapter, folder.base) if (saved := _examine(path, verify_published))],
    )


def _examine(
    path: Path,
    verified: Callable[[Path], list[str]],
    *,
    step: int | None = None,
    validation_loss: float | None = None,
) -> SavedFolder | None:
    """Examine a folder; None if it does not exist, since a run in progress may have removed an old checkpoint."""
    try:
        files = [file.lstat() for file in path.iterdir() if file.is_file() and not file.is_symlink()]
        problems = verified(path)
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
