"""Estimate the disk space of a run's checkpoints, and publish the best one as `adapter/`.

Main process only.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from finetune.runs.checkpoints import Snapshot, disk_need, prune, publish_adapter
from finetune.runs.folder import RunFolder
from finetune.runs.state import TrainerState
from finetune.runs.verification import verify_checkpoint, verify_published
from finetune.training.cadence import Cadence
from finetune.training.memory.forecast import optimizer_need

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def log_disk_need(
    folder: RunFolder,
    snapshot: Snapshot,
    optimizer: torch.optim.Optimizer,
    cadence: Cadence,
    *,
    keep: int,
    has_best: bool,
) -> None:
    """Log the size of a run's checkpoints before its first step, and warn where they do not fit.

    `snapshot` is of the model and the optimizer as they are now. For the last two arguments see
    `Cadence.most_checkpoints`.
    """
    at_once = cadence.most_checkpoints(keep=keep, has_best=has_best)
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    known = optimizer_need(inner, device_type="cpu")
    need = disk_need(folder, snapshot, optimizer_state=known and known.state, at_once=at_once)
    _log.info("disk: %s", need)
    used_bytes = sum(path.lstat().st_size for path in folder.checkpoints.rglob("*"))
    if need.total > need.free + used_bytes:
        _log.warning(
            "the checkpoints do not fit the disk of %s: make room, or lower checkpoint.save_total_limit", folder.path
        )


def publish_best(
    folder: RunFolder,
    state: TrainerState,
    cadence: Cadence,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keep: int,
    has_trained: bool,
) -> int | None:
    """Publish the best checkpoint as `adapter/`, or the last where nothing was validated or the best was not saved.

    A checkpoint that was saved only because the run was preempted does not count: the result would depend on it.

    Args:
        folder: an open run folder.
        state: where training ended.
        cadence: which steps save.
        tokenizer: saved beside the weights.
        keep: how many checkpoints stay.
        has_trained: False if the run was complete when it was started, so that `adapter/` may be there already.

    Returns:
        The step that `adapter/` holds; None if `adapter/` is kept, because it is intact and its checkpoint is damaged.

    Raises:
        CheckpointError: the checkpoint is damaged.
        RunFailedError: the disk is full or failing.
    """
    steps = [step for step in folder.checkpoint_steps() if cadence.saves_after(step)]
    best = state.best_step if state.best_step in steps else None
    if state.best_step is not None and best is None:
        _log.warning(
            "the best validation was at step %d, which has no checkpoint (checkpoint.save_every): "
            "adapter/ holds the last step, %d",
            state.best_step,
            state.step,
        )
    if best is not None and (problems := verify_checkpoint(folder.checkpoint(best))):
        stays = not has_trained and not verify_published(folder.adapter)
        outcome = "stays, and is whole" if stays else f"holds the last step, {state.step}"
        _log.warning("the best step, %d, is damaged (%s): adapter/ %s", best, "; ".join(problems), outcome)
        if stays:
            return None
        best = None
    published = best or state.step
    publish_adapter(folder, folder.checkpoint(published), tokenizer)
    prune(folder, keep, state.best_step)  # a killed run may have left too many
    _log.info("adapter/ holds step %d", published)
    return published
