"""Everything that finetune uses of the accelerate library: no other module imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedType, broadcast_object_list, gather_object

__all__ = [
    "Accelerator",
    "DistributedType",
    "PartialState",
    "broadcast_object_list",
    "forget_accelerate",
    "gather_object",
    "open_tracker",
]


def forget_accelerate() -> None:
    """Reset Accelerate's state, which is process-wide: the first caller's arguments would hold for ever."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def open_tracker(name: str, folder: Path, run: str, *, first_step: int) -> Any:
    """Start one of Accelerate's trackers, with `log`, `store_init_configuration` and `finish`.

    Args:
        name: Accelerate's name for it.
        folder: for the files of TensorBoard and wandb.
        run: the name of the run.
        first_step: number of steps done before; TensorBoard drops its events after them.
    """
    if name in ("tensorboard", "wandb"):  # the others have places of their own
        folder.mkdir(exist_ok=True)
    settings: dict[str, dict[str, Any]] = {
        "tensorboard": {"logging_dir": str(folder), "run_name": name, "purge_step": first_step + 1},
        "wandb": {"run_name": "finetune", "name": run, "dir": str(folder)},
        "trackio": {"run_name": "finetune", "name": run},
        "mlflow": {"experiment_name": "finetune", "run_name": run},
    }
    tracker = LOGGER_TYPE_TO_CLASS[name](**settings[name])
    if hasattr(tracker, "start"):  # older ones start when they are made
        tracker.start()
    return tracker
