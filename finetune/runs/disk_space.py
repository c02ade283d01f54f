"""Predict, before the first step, how much disk a run's checkpoints will take."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any, NamedTuple

import torch

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


def disk_need(folder: RunFolder, snapshot: Snapshot, optimizer: torch.optim.Optimizer, *, at_once: int) -> DiskNeed:
    """Predict the size of `at_once` checkpoints like this one.

    Args:
        folder: an open run folder.
        snapshot: a snapshot of the model and of this optimizer, whose state may still be empty.
        optimizer: the optimizer.
        at_once: the most checkpoints on disk at one time.
    """
    saved = snapshot.files.get(OPTIMIZER_FILE)
    held = saved.num_bytes if isinstance(saved, TensorFile) else 0
    model = snapshot.num_bytes - held
    return DiskNeed(model, held or _state_after_a_step(optimizer), at_once, shutil.disk_usage(folder.path).free)


def _state_after_a_step(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of an optimizer's state, from a copy that takes a step on the meta device."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    try:
        empty = partial(torch.empty, device="meta")  # not like the weight, which may lie in parts on several processes
        groups = [
            {**group, "params": [empty(weight.shape, dtype=weight.dtype) for weight in group["params"]]}
            for group in inner.param_groups
        ]
        twin = type(inner)(groups)
        for group in groups:
            for weight in group["params"]:
                weight.grad = torch.empty_like(weight)
        twin.step()
    except Exception:  # an optimizer that does not work on the meta device: its size is reported as unknown
        return None
    states = twin.state_dict()["state"].values()
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
