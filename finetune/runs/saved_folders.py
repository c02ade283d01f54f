"""Describe the folders that a run has saved: its checkpoints, `adapter/` and `base/`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from finetune.runs.durable import MANIFEST


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


def examine_folder(
    path: Path, verify: Callable[[Path], list[str]], *, step: int | None = None, validation_loss: float | None = None
) -> SavedFolder | None:
    """Examine a folder; None if it does not exist, since a run in progress may have removed an old checkpoint."""
    try:
        files = [file.lstat() for file in path.iterdir() if file.is_file() and not file.is_symlink()]
        problems = verify(path)
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
