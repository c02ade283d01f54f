"""Predict, before the first step, how much disk a run's checkpoints will take."""

from __future__ import annotations

import shutil
from typing import NamedTuple

from finetune.runs.checkpoints import Snapshot
from finetune.runs.folder import RunFolder
from finetune.runs.tensors import TensorFile
from finetune.runs.verification import OPTIMIZER_FILE
from finetune.units import format_bytes


class DiskNeed(NamedTuple):
    """Sizes in bytes, without headers and small files."""

    model: int
    """The weights in one checkpoint: the adapter, or the whole model."""
    optimizer: int | None
    """The optimizer's state in one checkpoint; None if it is unknown before the first step."""
    at_once: int
    """The most checkpoints on disk at one time, including the one being written."""
    free: int
    """Free space at the run's folder."""

    @property
    def checkpoint(self) -> int:
        """Size of one checkpoint."""
        return self.model + (self.optimizer or 0)

    @property
    def total(self) -> int:
        """The most bytes on disk at the same time, including `adapter/`."""
        return self.checkpoint * self.at_once + self.model

    def __str__(self) -> str:
        optimizer = "not known yet" if self.optimizer is None else format_bytes(self.optimizer)
        checkpoint, model, total = map(format_bytes, (self.checkpoint, self.model, self.total))
        return (
            f"a checkpoint takes {checkpoint} (model {model}, optimizer {optimizer}); at most {self.at_once} of them "
            f"and adapter/ take {total}; {format_bytes(self.free)} are free"
        )


def disk_need(folder: RunFolder, snapshot: Snapshot, *, optimizer_state: int | None, at_once: int) -> DiskNeed:
    """Predict the size of `at_once` checkpoints like this one.

    `optimizer_state` has the bytes of the optimizer's state after a step, for a snapshot from before the first one.
    """
    saved = snapshot.files.get(OPTIMIZER_FILE)
    held = saved.num_bytes if isinstance(saved, TensorFile) else 0
    model = snapshot.num_bytes - held
    return DiskNeed(model, held or optimizer_state, at_once, shutil.disk_usage(folder.path).free)
