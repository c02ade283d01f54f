"""The answers that a run learned from: one compressed file for each rollout, whole or absent."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

from finetune.errors import CheckpointError
from finetune.limits import open_regular
from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replace_file
from finetune.runs.folder import RunFolder
from finetune.units import format_bytes

Rollout = Mapping[str, Any]
"""`step`: the first step that learned from it. `temperature`: of the `nats`, if there are some. `server`: metrics of
the server that sampled it, if one did. `groups`: for each prompt `source`, the file and line of its row, `prompt`, its
tokens, `text`, the same as text, and `answers`. Each answer has its tokens `ids`, its `text`, its `rewards` by function
(null: none), its `advantage`, and -log p of each token: `sampled_nats` as the sampler drew it, before temperature and
filters, and `nats` as training computes it, if it is in the loss and the loss needs it. With tools, `ids` also has what
the model read: `parts` are the numbers of tokens of the first answer, of what follows it, of the second answer, and so
on, and `texts` are their texts. Only tokens of answers have -log p. `calls` has the results after each answer that
called something, and `has_end` says whether the last answer is whole and calls nothing. An answer has a `prompt` of its
own if an environment added turns to the one of its row."""

MOST_UNPACKED_BYTES = 1 << 30
"""A file from elsewhere may unpack to much more than it takes on the disk."""


def write_rollout(folder: RunFolder, rollout: Rollout) -> None:
    """Write the file of a rollout; equal rollouts have equal bytes. Remove the rollouts of later steps.

    There are later ones if the answers of a damaged rollout are generated again. Weights that learn from these answers
    may differ from those that generated the later ones.

    Raises:
        RunFailedError: the disk refused.
    """
    path = folder.rollout(rollout["step"])
    remove_rollouts_after(folder, rollout["step"])
    text = json.dumps(rollout, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    with disk_failures_end_the_run("Writing", path):
        folder.rollouts.mkdir(exist_ok=True)
        # A byte of a file name that is no UTF-8 is half of a surrogate pair here; JSON writes it as \udcff, too.
        replace_file(path, gzip.compress(text.encode(errors="backslashreplace"), compresslevel=6, mtime=0))


def read_rollout(folder: RunFolder, step: int) -> Rollout:
    """Read the file of a rollout.

    Raises:
        CheckpointError: it is not there or damaged.
    """
    path = folder.rollout(step)
    try:
        with open_regular(path) as packed, gzip.open(packed) as file:
            text = file.read(MOST_UNPACKED_BYTES + 1)
        if len(text) > MOST_UNPACKED_BYTES:
            raise ValueError(f"it unpacks to more than {format_bytes(MOST_UNPACKED_BYTES)}")
        rollout = json.loads(text)
        if not isinstance(rollout, dict) or not isinstance(rollout.get("groups"), list):
            raise ValueError("it holds no rollout")
    except (OSError, EOFError, ValueError, zlib.error) as error:  # gzip's errors are among them
        reason = describe_os_error(error) if isinstance(error, OSError) else error
        raise unusable_rollout(folder, step, f"cannot be read: {reason}") from error
    return rollout


def unusable_rollout(folder: RunFolder, step: int, problem: str) -> CheckpointError:
    """Return the error for a rollout that no step can learn from."""
    return CheckpointError(
        f"{folder.rollout(step)} {problem}. Step {step} learns from it. To generate its answers and all later ones "
        f"again, delete this file and the folders of step {step} and later in checkpoints/, then go on with "
        "resume=auto."
    )


def remove_rollouts_after(folder: RunFolder, step: int) -> None:
    """Remove the rollouts of steps after this one. A run that goes on as it began learns from them again instead.

    Raises:
        RunFailedError: the disk refused.
    """
    with disk_failures_end_the_run("Clearing", folder.rollouts):
        for later in folder.rollout_steps():
            if later > step:
                folder.rollout(later).unlink()
