"""Write a new folder, if its disk has room for it, so that it is complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from finetune.errors import CheckpointError, RunFailedError
from finetune.runs.durable import (
    FolderWriter,
    committed_folder,
    describe_os_error,
    disk_failures_end_the_run,
    remove,
)
from finetune.runs.file_lock import FileLock, describe_holder, try_file_lock
from finetune.units import format_bytes

SPARE_BYTES = 64 << 20
"""For the files beside the weights: tokenizer, configuration, headers."""


@contextmanager
def new_folder(out: Path, num_bytes: int) -> Iterator[FolderWriter]:
    """Yield a writer for a temporary folder, and rename it at the end. If anything fails, `out` stays as it was.

    `num_bytes` is the size of what the block will write, without small files.

    Raises:
        CheckpointError: see `refuse_taken`; `out` may also have been taken while the block wrote, or another process
            is writing it.
        RunFailedError: the disk has too little room, or failed, or a file that the block reads cannot be read.
    """
    out = refuse_taken(out)
    above = _nearest_parent(out)
    free, needed = shutil.disk_usage(above).free, num_bytes + SPARE_BYTES
    if free < needed:
        raise RunFailedError(
            f"{out} needs {format_bytes(needed)}, but only {format_bytes(free)} are free at {above}. Make room, or "
            "name a folder on another disk. Nothing was written."
        )
    again = disk_failures_end_the_run("Writing", out, then="run the command again")
    with again, _lock(out), committed_folder(out) as writer:
        try:
            yield writer
        except OSError as error:
            # An error without a file name comes from writing. An error with a name may come from a file that is read.
            if error.filename is None or Path(error.filename).is_relative_to(writer.path):
                raise
            raise RunFailedError(
                f"Writing {out} failed: {error.filename}: {describe_os_error(error)}. Nothing was written."
            ) from error
        refuse_taken(out)


@contextmanager
def folder_beside(out: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of `out`, and remove it at the end.

    If this process is killed, the next call for the same `out` removes it.

    Raises:
        CheckpointError: see `refuse_taken`; or another process is writing `out`.
        RunFailedError: the disk refused.
    """
    out = refuse_taken(out)
    aside = out.with_name(f".{out.name}.aside")
    with ExitStack() as stack:
        with disk_failures_end_the_run("Writing", aside, then="run the command again"):
            stack.enter_context(_lock(out, "aside.lock"))
            remove(aside)
            stack.callback(remove, aside)
            aside.mkdir()
        yield aside


def refuse_taken(out: Path) -> Path:
    """Refuse to overwrite anything. Returns the folder's absolute path.

    Raises:
        CheckpointError: `out` exists and is not an empty folder, or its parent cannot be written.
    """
    out = out.expanduser().absolute()
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} already exists and is not an empty folder. Name another; nothing was changed.")
    above = _nearest_parent(out)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise CheckpointError(f"{above} is not a folder that you can write to. Name a folder elsewhere.")
    return out


def _lock(out: Path, name: str = "lock") -> FileLock:
    """Take a lock of a folder, because a second writer would remove the temporary folder of the first.

    Raises:
        CheckpointError: another process has it.
        OSError: the disk refused, or has no locks.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_name(f".{out.name}.{name}")
    lock = try_file_lock(file)
    if lock is None:
        raise CheckpointError(
            f"{out} is being written by {describe_holder(file)}. Wait for it to end, or name another "
            "folder. Nothing was changed."
        )
    return lock


def _nearest_parent(out: Path) -> Path:
    """Return the nearest folder above a path that exists."""
    return next(folder for folder in out.parents if os.path.lexists(folder))
