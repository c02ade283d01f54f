"""Wrap the parts of the accelerate library that finetune uses. No other module imports accelerate."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from accelerate import Accelerator as Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedType as DistributedType
from accelerate.utils import broadcast_object_list as broadcast_object_list
from accelerate.utils import gather_object as gather_object

_STATES = (PartialState, AcceleratorState, GradientState)
"""Accelerate's classes with process-wide state."""


class AccelerateCommand(NamedTuple):
    """What an `accelerate launch` was asked for, by its options and its config file."""

    num_processes: int | None
    """None if nobody asked for a number."""
    engine: str | None
    """The engine that was asked for instead of plain data parallelism, by its name in a config file."""


def read_launch_arguments(arguments: Sequence[str], folder: Path) -> AccelerateCommand | None:
    """Read the arguments of `accelerate launch` and its config file, relative to `folder`; None if that fails."""
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    try:
        with redirect_stderr(io.StringIO()):
            options = launch_command_parser().parse_args(list(arguments))
    except SystemExit:
        return None
    config = None
    if options.config_file or not options.cpu:  # --cpu makes accelerate ignore its default config file
        # It may be no file, or not one of accelerate's.
        with suppress(OSError, ValueError, TypeError, AttributeError, yaml.YAMLError):
            config = load_config_from_file(str(folder / options.config_file) if options.config_file else None)
    num_processes = options.num_processes or getattr(config, "num_processes", None)
    # accelerate itself refuses an option for an engine beside --cpu, but not a config file.
    engine = str(getattr(config, "distributed_type", "NO")).rpartition(".")[2].upper()
    is_engine = engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
    return AccelerateCommand(
        num_processes if num_processes and num_processes > 0 else None, engine if is_engine else None
    )


def forget_accelerate() -> None:
    """Reset Accelerate's state, which is process-wide: the first caller's arguments would hold for ever."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def copy_accelerate() -> list[dict[str, Any]]:
    """Copy Accelerate's state, for `restore_accelerate`."""
    return [dict(state._shared_state) for state in _STATES]


def restore_accelerate(copies: list[dict[str, Any]]) -> None:
    """Give Accelerate's state back to the accelerators that share it."""
    for state, copy in zip(_STATES, copies, strict=True):
        state._shared_state.clear()
        state._shared_state.update(copy)


def open_tracker(name: str, folder: Path, run: str, *, first_step: int) -> Any:
    """Start one of Accelerate's trackers, with `log`, `store_init_configuration` and `finish`.

    TensorBoard and wandb write to `folder`. TensorBoard drops its events after `first_step`.
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
