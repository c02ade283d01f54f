"""Compare what `accelerate launch` was asked for with the configuration of the run.

`accelerate launch --cpu --num_processes 2` (1.15) silently starts one process, and with `--cpu` it ignores the engine
of its config file. Both show only in the command line of the parent process and in the config file named there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config.yaml_reader import COMMAND_LINE
from finetune.distributed.accelerate_library import AccelerateCommand, read_launch_arguments
from finetune.distributed.accelerate_variables import (
    FSDP_SWITCHES,
    is_cpu_requested,
    refused_settings,
    requested_accumulation,
    requested_precision,
    requested_sharding,
)
from finetune.distributed.environment import LaunchEnvironment, is_started_by_accelerate_alone
from finetune.errors import LaunchError
from finetune.fallbacks import Fallback

if TYPE_CHECKING:
    from finetune.config.schema import Config

_INSTEAD_OF_ENGINE = (
    "Use a config file with distributed_type MULTI_GPU, MULTI_CPU or NO, and for a model larger than one GPU "
    "parallel.sharding=fsdp2"
)
_INSTEAD_OF_CPU = (
    "Leave out --cpu and set training.device=cpu, with which fsdp_version: 2 starts all processes on CPUs too; or use "
    "torchrun with parallel.sharding=fsdp2"
)
_MAX_ANCESTORS = 8


def refuse_another_precision(precision: str, wish: str, environ: Mapping[str, str]) -> None:
    """Refuse an accumulation of `accelerate launch`, or a precision that `training.precision` (`wish`) does not mean.

    Raises:
        LaunchError: names both sides.
    """
    asked = requested_precision(environ)
    if asked not in (None, precision):
        raise LaunchError(
            f"accelerate launch asks for mixed precision {asked} (ACCELERATE_MIXED_PRECISION), but training.precision "
            f"{wish} means {precision} here. Set training.precision, or remove mixed_precision from accelerate's "
            "config file."
        )
    steps = requested_accumulation(environ)
    if steps is not None:
        raise LaunchError(
            f"the environment asks for {steps} accumulation steps (ACCELERATE_GRADIENT_ACCUMULATION_STEPS), but here "
            "training.batch_size and training.global_batch_size determine them. Unset it."
        )


def settings_of_accelerate(
    config: Config, environ: Mapping[str, str], *, world_size: int, trains: bool
) -> dict[str, tuple[object, str]]:
    """Read the settings of `accelerate launch` that become the run's own: the settings of FSDP.

    Args:
        config: the run as its files and arguments describe it.
        environ: the environment of the launch.
        world_size: the number of processes that were started, or will be.
        trains: whether the run will train. A command that only reads a run finds the settings of its training in the
            configuration. They may differ from accelerate's; only the command line may not.

    Returns:
        Values with their origins, for `Config.with_values`.

    Raises:
        LaunchError: accelerate was asked for something that finetune does not support, or that contradicts the
            configuration or the launch.
    """
    refused = refused_settings(environ)
    if refused:
        listed = "; ".join(f"{setting}: {why}" for setting, why in refused)
        raise LaunchError(f"accelerate launch asks for something that finetune does not support. {listed}")
    asked = requested_sharding(environ)
    if asked is None:
        return {}
    for key, (value, variable) in asked.keys.items():
        section, _, name = key.partition(".")
        ours = getattr(getattr(config, section), name)
        is_asked = config.origin(key) != "default" if trains else config.origin(key).startswith(COMMAND_LINE)
        if is_asked and ours not in (value, "auto", None):
            raise LaunchError(
                f"accelerate launch asks for {key}={_yaml(value)} ({variable}), but {key} is {_yaml(ours)} "
                f"({config.origin(key)}). Remove one of them."
            )
    if asked.world_size not in (None, world_size):
        raise LaunchError(
            f"parallelism_config of accelerate launch is made for {asked.world_size} processes (dp_replicate_size x "
            f"dp_shard_size), but {world_size} were started. Change num_processes, or one of the two."
        )
    return {key: (value, f"accelerate's {variable}") for key, (value, variable) in asked.keys.items()}


@contextmanager
def fsdp_is_hidden() -> Iterator[None]:
    """Hide from the libraries inside the block that accelerate was asked for FSDP. Only finetune may shard."""
    hidden = {name: os.environ.pop(name) for name in FSDP_SWITCHES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def compare_accelerate_command(config: Config, environment: LaunchEnvironment) -> Fallback | None:
    """Compare the command line of `accelerate launch` with the configuration and with what it started.

    Returns:
        The fallback to take if it started fewer processes than it was asked for, else None.

    Raises:
        LaunchError: it asks for another device or for an engine.
    """
    if is_cpu_requested(os.environ) and config.training.device not in ("auto", "cpu"):
        raise LaunchError(
            f"accelerate launch --cpu was asked for, but training.device is {config.training.device} "
            f"({config.origin('training.device')}). Drop one of them."
        )
    command = read_accelerate_command(os.environ)
    if command is None:
        return None
    if command.engine is not None:
        instead = _INSTEAD_OF_CPU if command.engine == "FSDP" else _INSTEAD_OF_ENGINE
        raise LaunchError(
            f"accelerate launch was asked for {command.engine}, and with --cpu it silently dropped it and started one "
            f"process. {instead}."
        )
    asked = command.num_processes
    if asked is None or asked <= environment.world_size:
        return None
    why = (
        f"accelerate launch was asked for {asked} processes on the CPU and started one. Use torchrun "
        f"--nproc_per_node {asked}, parallel.num_processes={asked}, or accelerate launch --multi_gpu "
        f"--num_processes {asked}, which starts {asked} without any GPU too"
    )
    return Fallback(what="accelerate launch", wanted=f"{asked} processes", used="one process", why=why)


def read_accelerate_command(environ: Mapping[str, str]) -> AccelerateCommand | None:
    """Return what the `accelerate launch` that started only this process was asked for.

    None if another launcher started this process, or if the command line cannot be read.
    """
    if not is_started_by_accelerate_alone(environ):
        return None
    import psutil

    try:
        for parent in psutil.Process().parents()[:_MAX_ANCESTORS]:
            arguments = launch_arguments(parent.cmdline())
            if arguments is not None:
                return read_launch_arguments(arguments, Path(parent.cwd()))
    except (psutil.Error, OSError):
        pass  # the process has ended or belongs to another user
    return None


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of an `accelerate launch`, the script and its arguments included; None: another command."""
    for position, argument in enumerate(command):
        name = Path(argument).name
        if name == "accelerate-launch" or argument == "accelerate.commands.launch":
            return list(command[position + 1 :])
        is_command = name == "accelerate" or argument == "accelerate.commands.accelerate_cli"
        if is_command and command[position + 1 : position + 2] == ["launch"]:
            return list(command[position + 2 :])
    return None
