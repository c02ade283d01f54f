"""The answers that a run learned from: one compressed file for each rollout, whole or absent."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

from finetune.errors import CheckpointError
from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replace_file
from finetune.runs.folder import RunFolder

Rollout = Mapping[str, Any]
"""`step`: the first step that learned from it. `groups`: for each prompt `source`, the file and line of its row,
`prompt`, its tokens, `text`, the same as text, and `answers`. Each answer has its tokens `ids`, its `text`, its
`rewards` by function (null: none), its `advantage`, and where later steps need it `nats`, -log p of each token when it
was generated."""


def write_rollout(folder: RunFolder, rollout: Rollout) -> None:
    """Write the file of a rollout; equal rollouts have equal bytes.

    Raises:
        RunFailedError: the disk refused.
    """
    path = folder.rollout(rollout["step"])
    text = json.dumps(rollout, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    with disk_failures_end_the_run("Writing", path):
        folder.rollouts.mkdir(exist_ok=True)
        replace_file(path, gzip.compress(text.encode(), compresslevel=6, mtime=0))


def read_rollout(folder: RunFolder, step: int) -> Rollout:
    """Read the file of a rollout.

    Raises:
        CheckpointError: it is not there or damaged.
    """
    path = folder.rollout(step)
    try:
        found = json.loads(gzip.decompress(path.read_bytes()))
        if not isinstance(found, dict) or not isinstance(found.get("groups"), list):
            raise ValueError("it holds no rollout")
    except OSError as error:  # gzip's errors are among them
        raise CheckpointError(_damaged(path, describe_os_error(error))) from error
    except (EOFError, ValueError, zlib.error) as error:
        raise CheckpointError(_damaged(path, str(error))) from error
    return found


def remove_rollouts_after(folder: RunFolder, step: int) -> None:
    """Remove the rollouts of steps after this one, which a resumed run generates again.

    Raises:
        RunFailedError: the disk refused.
    """
    with disk_failures_end_the_run("Clearing", folder.rollouts):
        for later in folder.rollout_steps():
            if later > step:
                folder.rollout(later).unlink()


def _damaged(path: object, why: str) -> str:
    return (
        f"{path} cannot be read: {why}. The next step would learn from the same answers as the step before, so the run "
        "cannot go on from this checkpoint. Delete the newest folder in checkpoints/ to go on from an earlier one."
    )
