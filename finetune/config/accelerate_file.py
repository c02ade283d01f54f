"""Recognise the configuration file of `accelerate launch`, and say which keys here mean the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.config.config_files import shown_path
from finetune.config.render import inline_yaml

_PRECISIONS = ("bf16", "fp16")


def is_accelerate_file(values: Mapping[str, Any]) -> bool:
    """Return whether settings, by their dotted names, are those that `accelerate config` writes."""
    return "compute_environment" in values or {"distributed_type", "num_processes"} <= values.keys()


def describe_accelerate_file(path: Path, values: Mapping[str, Any]) -> str:
    """Say what the file of accelerate is for, and which overrides mean the same without accelerate."""
    ours = overrides_of_accelerate(values)
    same = f" In a run file, or without accelerate, these mean the same: {shlex.join(ours)}." if ours else ""
    place = shlex.quote(str(path))
    return (
        f"{shown_path(path)} is a configuration of accelerate. It says how processes are started, and not what is "
        f"trained. Keep it: accelerate launch --config_file {place} -m finetune train RUN reads it, and names what "
        f"finetune does not support.{same} See docs/launching.md."
    )


def overrides_of_accelerate(values: Mapping[str, Any]) -> list[str]:
    """Return the overrides that mean the same as the settings of accelerate, given by their dotted names."""
    machines, processes = values.get("num_machines"), values.get("num_processes")
    ours: dict[str, Any] = {}
    if machines in (None, 1) and isinstance(processes, int) and processes > 1:
        ours["parallel.num_processes"] = processes
    elif machines not in (None, 1):
        ours["parallel.world_size"] = processes
    uses_fsdp = values.get("distributed_type") == "FSDP"
    if uses_fsdp or values.get("deepspeed_config.zero_stage") in (1, 2, 3):
        ours["parallel.sharding"] = "fsdp2"
    if uses_fsdp and values.get("fsdp_config.fsdp_reshard_after_forward") in (False, "SHARD_GRAD_OP"):
        ours["parallel.reshard_after_forward"] = False
    if uses_fsdp and values.get("fsdp_config.fsdp_activation_checkpointing") is True:
        ours["training.gradient_checkpointing"] = True
    if values.get("mixed_precision") in _PRECISIONS:
        ours["training.precision"] = values["mixed_precision"]
    if values.get("use_cpu") is True:
        ours["training.device"] = "cpu"
    if isinstance(clipping := values.get("deepspeed_config.gradient_clipping"), (int, float)):
        ours["optim.max_grad_norm"] = clipping
    return [f"{key}={inline_yaml(value)}" for key, value in ours.items() if value is not None]
