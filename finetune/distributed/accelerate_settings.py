"""Honour the settings of `accelerate launch` that finetune supports, and refuse all others by name.

`accelerate launch` (1.15) passes its settings on as environment variables. It exports many of them with their defaults
when nobody set them, for example ACCELERATE_MIXED_PRECISION=no and FSDP_RESHARD_AFTER_FORWARD=true, which then mean
"not set".

With `--cpu` it silently starts one process, whatever number was asked for, and ignores the engine of its config file.
Both show only in the command line of the parent process and in the config file named there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.config.yaml_reader import OVERRIDES
from finetune.distributed.accelerate_library import AccelerateCommand, read_launch_arguments
from finetune.distributed.environment import LaunchEnvironment, is_started_by_accelerate_alone
from finetune.errors import LaunchError
from finetune.fallbacks import Fallback

if TYPE_CHECKING:
    from finetune.config.schema import Config

_FSDP_SWITCHES = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG")
"""With these, Accelerate would shard too, and transformers would load the weights on one process of a node alone."""
_TRUE = ("1", "y", "yes", "t", "true", "on")
_FALSE = ("", "0", "f", "false", "n", "no", "none", "off")
_OFF = "|".join(_FALSE)
_REPLICATE, _SHARD = "PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE"

_ALLOWED = {
    "ACCELERATE_USE_CPU": ".*",
    "ACCELERATE_MIXED_PRECISION": f"bf16|fp16|{_OFF}",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    # These change no result, or belong to a part that is refused as a whole.
    "ACCELERATE_(ALLOW_CP_STANDALONE|BYPASS_DEVICE_MAP|CONFIG_DS_FIELDS|CONFIG_FILE|CPU_AFFINITY|DEBUG_MODE"
    r"|DEBUG_RDV_FILE|DEEPSPEED_\w+|DYNAMO_MODE|DYNAMO_USE_\w+|ENABLE_RICH|FP8_\w+|GRADIENT_CLIPPING"
    "|INIT_INCLUDE_BUFFERS|LOG_LEVEL|NUM_PROCESSES|USE_SAGEMAKER)": ".*",
    "FSDP_VERSION": "2",
    "FSDP_(RESHARD_AFTER_FORWARD|ACTIVATION_CHECKPOINTING)": f"true|{_OFF}",
    "FSDP_SHARDING_STRATEGY": f"full_shard|1|{_OFF}",
    "FSDP_AUTO_WRAP_POLICY": f"transformer_based_wrap|{_OFF}",
    # finetune has its own way to load, prefetch and save weights.
    "FSDP_(BACKWARD_PREFETCH|CPU_RAM_EFFICIENT_LOADING|FORWARD_PREFETCH|MIN_NUM_PARAMS|STATE_DICT_TYPE"
    "|SYNC_MODULE_STATES|TRANSFORMER_CLS_TO_WRAP|USE_ORIG_PARAMS)": ".*",
    "PARALLELISM_CONFIG_(TP|CP|SP)_SIZE": f"1|{_OFF}",
    r"PARALLELISM_CONFIG_[CS]P_(?!SIZE)\w+": ".*",
    _REPLICATE: "[0-9]{1,9}",
    _SHARD: "[2-9]|[1-9][0-9]{1,8}",
}
"""Patterns of settings, and of their values in lower case. A setting that is not here may only be off."""

_OTHER_ENGINE = (
    "finetune does not support it: training would silently be plain data parallelism. Use an accelerate config file "
    "with distributed_type MULTI_GPU, MULTI_CPU or NO, and for a model larger than one GPU set parallel.sharding=fsdp2."
)
_LAYER_BY_LAYER = "finetune shards each decoder layer. Remove it, or use TRANSFORMER_BASED_WRAP."
_WHY_REFUSED = {
    "ACCELERATE_USE_FSDP": "finetune does not support version 1 of FSDP. Set fsdp_version: 2 in accelerate's config "
    "file (--fsdp_version 2); or leave FSDP out there, and set parallel.sharding=fsdp2.",
    "ACCELERATE_USE_DEEPSPEED": _OTHER_ENGINE,
    "ACCELERATE_USE_MEGATRON_LM": _OTHER_ENGINE,
    "ACCELERATE_MIXED_PRECISION": "finetune trains in fp32, bf16 and fp16 only. Set mixed_precision to one of them "
    "(fp32: no), and training.precision.",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "training.batch_size and training.global_batch_size determine the "
    "accumulation steps. Unset it.",
    "ACCELERATE_TORCH_DEVICE": "every process would compute on that one device. Unset it and set training.device.",
    "FSDP_SHARDING_STRATEGY": "version 2 of FSDP has no such setting, and accelerate ignores it. Remove it; "
    "fsdp_reshard_after_forward: false replaces SHARD_GRAD_OP, and parallel.shard_size replaces HYBRID_SHARD.",
    "FSDP_AUTO_WRAP_POLICY": _LAYER_BY_LAYER,
    "FSDP_IGNORED_MODULES": _LAYER_BY_LAYER,
    _SHARD: "then no weights are sharded. Set parallelism_config_dp_shard_size to 2 or more.",
}
_NOT_SUPPORTED = "finetune does not support it. Remove it from accelerate's config file or options, or unset it."

_INSTEAD_OF_CPU = (
    "Leave out --cpu and set training.device=cpu, with which fsdp_version: 2 starts all processes on CPUs too; or use "
    "torchrun with parallel.sharding=fsdp2"
)
_MAX_ANCESTORS = 8


def is_cpu_requested(environ: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch --cpu` asked for the CPU."""
    return environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE


def refused_settings(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings of `accelerate launch` that finetune refuses always, ``NAME=value``, each with its reason."""
    prefixes: tuple[str, ...] = ("ACCELERATE_",)
    if _is_fsdp2(environ):
        prefixes += ("FSDP_", "PARALLELISM_CONFIG_") if _uses_sizes(environ) else ("FSDP_",)
    return [
        (f"{name}={environ[name]}", _WHY_REFUSED.get(name, _NOT_SUPPORTED))
        for name in sorted(environ)
        if name.startswith(prefixes)
        and not (name in _FSDP_SWITCHES and _is_fsdp2(environ))
        and not re.fullmatch(
            next((values for pattern, values in _ALLOWED.items() if re.fullmatch(pattern, name)), _OFF),
            environ[name].lower(),
        )
    ]


def refuse_another_precision(precision: str, wish: str, environ: Mapping[str, str]) -> None:
    """Raise LaunchError if `accelerate launch` asks for another mixed precision than the run's."""
    requested = environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if requested not in (*_FALSE, precision):
        raise LaunchError(
            f"accelerate launch asks for mixed precision {requested} (ACCELERATE_MIXED_PRECISION), but "
            f"training.precision {wish} means {precision} here. Set training.precision, or remove mixed_precision from "
            "accelerate's config file."
        )


def settings_of_accelerate(
    config: Config, environ: Mapping[str, str], *, world_size: int, trains: bool
) -> dict[str, tuple[object, str]]:
    """Return the settings of FSDP that `accelerate launch` asks for, with their origins, for `Config.with_values`.

    A command that only reads a run (`trains=False`) finds the settings of its training in the configuration. They may
    differ from accelerate's; only the command line may not. `world_size` counts the processes that are started.

    Raises:
        LaunchError: accelerate was asked for something that finetune does not support, or that contradicts the
            configuration or the launch.
    """
    refused = refused_settings(environ)
    if refused:
        listed = "; ".join(f"{setting}: {reason}" for setting, reason in refused)
        raise LaunchError(f"accelerate launch asks for something that finetune does not support. {listed}")
    if not _is_fsdp2(environ):
        return {}
    requested: dict[str, tuple[object, str]] = {"parallel.sharding": ("fsdp2", "FSDP_VERSION")}
    if environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() in _FALSE:
        requested["parallel.reshard_after_forward"] = (False, "FSDP_RESHARD_AFTER_FORWARD")
    if environ.get("FSDP_ACTIVATION_CHECKPOINTING", "").lower() in _TRUE:
        requested["training.gradient_checkpointing"] = (True, "FSDP_ACTIVATION_CHECKPOINTING")
    if _uses_sizes(environ):
        shard_size = int(environ.get(_SHARD, 1))
        requested["parallel.shard_size"] = (shard_size, _SHARD)
        size = int(environ.get(_REPLICATE, 1)) * shard_size
        if size != world_size:
            raise LaunchError(
                f"parallelism_config of accelerate launch is made for {size} processes (dp_replicate_size x "
                f"dp_shard_size), but {world_size} were started. Change num_processes, or one of the two."
            )
    accepted = {}
    for key, (value, variable) in requested.items():
        section, _, name = key.partition(".")
        configured = getattr(getattr(config, section), name)
        is_asked = config.origin(key) != "default" if trains else config.origin(key) in OVERRIDES
        setting = f"{variable}={environ.get(variable, '')}"
        if is_asked and configured not in (value, "auto", None):
            raise LaunchError(
                f"accelerate launch asks for {key}={_yaml(value)} ({setting}), but {key} is {_yaml(configured)} "
                f"({config.origin(key)}). Remove one of them."
            )
        accepted[key] = (value, f"accelerate's {setting}")
    return accepted


@contextmanager
def hide_fsdp() -> Iterator[None]:
    """Hide from the libraries inside the block that accelerate was asked for FSDP. Only finetune may shard."""
    hidden = {name: os.environ.pop(name) for name in _FSDP_SWITCHES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def compare_accelerate_command(config: Config, environment: LaunchEnvironment) -> Fallback | None:
    """Return the fallback to take if `accelerate launch` started fewer processes than it was asked for, else None.

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
        instead = _INSTEAD_OF_CPU if command.engine == "FSDP" else _OTHER_ENGINE.partition(". ")[2]
        raise LaunchError(
            f"accelerate launch was asked for {command.engine}, and with --cpu it silently dropped it and started one "
            f"process. {instead}"
        )
    requested = command.num_processes
    if requested is None or requested <= environment.world_size:
        return None
    why = (
        f"accelerate launch was asked for {requested} processes on the CPU and started one. Use torchrun "
        f"--nproc_per_node {requested}, parallel.num_processes={requested}, or accelerate launch --multi_gpu "
        f"--num_processes {requested}, which starts {requested} without any GPU too"
    )
    return Fallback(what="accelerate launch", wanted=f"{requested} processes", used="one process", why=why)


def read_accelerate_command(environ: Mapping[str, str]) -> AccelerateCommand | None:
    """Return what the `accelerate launch` that started only this process was asked for; None if not known."""
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


def _is_fsdp2(environ: Mapping[str, str]) -> bool:
    return environ.get(_FSDP_SWITCHES[0], "").lower() in _TRUE and environ.get("FSDP_VERSION") == "2"


def _uses_sizes(environ: Mapping[str, str]) -> bool:
    return environ.get(_FSDP_SWITCHES[1], "").lower() in _TRUE


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
