"""Refuse more trials at once than the memory of this machine's devices allows, by the forecast of `finetune plan`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from finetune.config.keys import values
from finetune.diagnose.plan import make_plan
from finetune.diagnose.plan_devices import find_device
from finetune.errors import ConfigError
from finetune.logs import waiting
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.config.schema import Config

_NOT_IN_MEMORY = (
    *("seed", "output_dir", "lora.alpha", "optim.learning_rate", "optim.weight_decay", "optim.warmup_steps"),
    *("optim.schedule", "optim.max_grad_norm"),
)
"""Keys that do not change the memory of a run: one forecast serves trials that differ in them only."""


def places_for(configs: Mapping[str, Config], at_once: int) -> tuple[list[str], str]:
    """Return the GPUs of each place for a trial, and a sentence about the memory of all trials at once.

    Each trial gets as many GPUs as it has processes. If there are fewer GPUs, trials share them.

    Args:
        configs: the configuration of each trial, by its name.
        at_once: the most trials at once, more than 1. A trial counts once, with all of its processes.

    Returns:
        The GPUs as CUDA_VISIBLE_DEVICES names them, empty if the trials do not use a GPU; and the sentence.

    Raises:
        ConfigError: the trials that take the most memory do not fit beside each other.
    """
    first = next(iter(configs.values()))
    processes = max(config.parallel.num_processes or 1 for config in configs.values())
    device = find_device(first.training.device)
    places = _gpu_places(processes) if device.type == "cuda" else []
    sharing = -(-at_once // len(places)) if places else at_once
    needs: dict[str, int | None] = {}
    by_settings: dict[str, int | None] = {}
    with waiting("planning the trials"):
        for name, config in configs.items():
            settings = str([value for key, value in values(config).items() if key not in _NOT_IN_MEMORY])
            if settings not in by_settings:
                needed = make_plan(config, device).needed
                of_all = 1 if places else config.parallel.num_processes or 1  # the processes of a CPU share its memory
                by_settings[settings] = None if needed is None else needed * of_all
            needs[name] = by_settings[settings]
    if None in needs.values():
        return places, f"the memory of {sharing} trials at once cannot be predicted: see finetune plan"
    largest = sorted(((need or 0, name) for name, need in needs.items()), reverse=True)[:sharing]
    total = sum(need for need, _ in largest)
    where = f"{device.name} has {format_bytes(device.memory)}"
    which = ", ".join(f"{name} {format_bytes(need)}" for need, name in largest)
    if total > device.memory:
        raise ConfigError(
            f"--at-once is {at_once}, so {len(largest)} trials may share a device and take {format_bytes(total)} "
            f"({which}), but {where}. Lower --at-once, or let each trial take less: training.memory=least, or "
            f"training.memory_fraction={1 / sharing:.2g}."
        )
    each = f" of {processes} processes each" if processes > 1 else ""
    return places, f"{len(largest)} trials{each} on one device take up to {format_bytes(total)}, and {where}"


def _gpu_places(processes: int) -> list[str]:
    """Return the visible GPUs in groups of one for each process of a trial; all in one group if there are fewer."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    groups = [names[start : start + processes] for start in range(0, len(names) - processes + 1, processes)]
    return [",".join(group) for group in groups or [names]]
