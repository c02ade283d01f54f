"""The folder that a command writes: free before, with room on its disk."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from finetune.errors import CheckpointError, RunFailedError
from finetune.runs.durable import in_units

SPARE_BYTES = 64 << 20
"""For what comes beside the weights: tokenizer, configuration, headers; generously."""


def refuse_taken(out: Path) -> Path:
    """Nothing is overwritten. Returns the folder's absolute path.

    Raises:
        CheckpointError: something is there, or the folder above cannot be written.
    """
    out = out.expanduser().absolute()
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} is there already and not an empty folder. Name another; nothing was changed.")
    above = _nearest(out)
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise CheckpointError(f"{above} is no folder that can be written. Name a folder elsewhere.")
    return out


def refuse_small_disk(out: Path, num_bytes: int) -> None:
    """Say so before hours of writing.

    Raises:
        RunFailedError: there is not as much room.
    """
    above = _nearest(out)
    free, needed = shutil.disk_usage(above).free, num_bytes + SPARE_BYTES
    if free < needed:
        raise RunFailedError(
            f"{out} takes {in_units(needed)}, and {in_units(free)} are free at {above}. Make room, or name a folder on "
            "another disk. Nothing was written."
        )


def _nearest(out: Path) -> Path:
    """The folder above that is there."""
    return next(folder for folder in out.parents if os.path.lexists(folder))
