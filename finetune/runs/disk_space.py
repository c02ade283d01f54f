"""How much disk a run's checkpoints will take, known before its first step."""

from __future__ import annotations

import shutil
from typing import Any, NamedTuple

import torch

from finetune.runs.checkpoints import Snapshot
from finetune.runs.durable import in_units
from finetune.runs.folder import RunFolder
from finetune.runs.tensors import TensorFile
from finetune.runs.verification import OPTIMIZER_FILE


class DiskNeed(NamedTuple):
    """In bytes; headers and small files left out."""

    model: int
    """Of a checkpoint: the adapter, or all weights."""
    optimizer: int | None
    """Of a checkpoint; None where it is not known before the first step."""
    at_once: int
    """Checkpoints on the disk at the same time, the one that is being written included."""
    free: int
    """Where the run's folder is."""

    @property
    def checkpoint(self) -> int:
        """One checkpoint."""
        return self.model + (self.optimizer or 0)

    @property
    def total(self) -> int:
        """All that there will be at once, with `adapter/`."""
        return self.checkpoint * self.at_once + self.model

    def __str__(self) -> str:
        optimizer = "not known yet" if self.optimizer is None else in_units(self.optimizer)
        return (
            f"a checkpoint takes {in_units(self.checkpoint)} (model {in_units(self.model)}, optimizer {optimizer}), at "
            f"most {self.at_once} at once with adapter/ {in_units(self.total)}; {in_units(self.free)} are free"
        )


def disk_need(folder: RunFolder, snapshot: Snapshot, optimizer: torch.optim.Optimizer, *, at_once: int) -> DiskNeed:
    """What `at_once` checkpoints like this one will take.

    Args:
        folder: an open run folder.
        snapshot: of the model and the optimizer, whose state may still be empty.
        optimizer: the same.
        at_once: how many checkpoints there are at the same time.
    """
    saved = snapshot.files.get(OPTIMIZER_FILE)
    held = saved.num_bytes if isinstance(saved, TensorFile) else 0
    model = snapshot.num_bytes - held
    return DiskNeed(model, held or _state_after_a_step(optimizer), at_once, shutil.disk_usage(folder.path).free)


def _state_after_a_step(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes of an optimizer's state: those of a twin that takes a step over parameters without memory."""
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    try:
        groups = [
            {**group, "params": [torch.empty_like(weight, device="meta") for weight in group["params"]]}
            for group in inner.param_groups
        ]
        twin = type(inner)(groups)
        for group in groups:
            for weight in group["params"]:
                weight.grad = torch.empty_like(weight)
        twin.step()
    except Exception:  # an optimizer of others that knows no such tensors; then its size is said to be unknown
        return None
    states = twin.state_dict()["state"].values()
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
