"""Choose the device of one of several ranks, and refuse devices on which the ranks cannot train together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import torch

from finetune.distributed.device import _resolve_device
from finetune.errors import LaunchError
from finetune.units import format_ranks

_CHOICES_OF_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Set by a launcher or the user, perhaps to other GPUs for each process."""


def _pick_device(local_rank: int, *, shares_gpus: bool = False) -> torch.device:
    """Return this rank's own device: the GPU with its local rank, or the CPU if there is no GPU.

    A launcher may show each process only its own GPU (`srun --gpus-per-task=1`, CUDA_VISIBLE_DEVICES per rank), which
    is then number 0 in each. `refuse_shared_devices` compares them once the ranks can talk.

    Raises:
        LaunchError: there are GPUs, but fewer than processes on this node: two ranks would silently share one.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    if count == 1 and any(os.environ.get(name) for name in _CHOICES_OF_GPUS):
        return torch.device("cuda", 0)
    if shares_gpus:
        return torch.device("cuda", local_rank % count)
    if local_rank >= count:
        raise LaunchError(
            f"local rank {local_rank} needs GPU {local_rank}, but this node shows {count} GPU(s). "
            f"Start at most {count} processes per node, widen CUDA_VISIBLE_DEVICES, or set training.device=cpu."
        )
    return torch.device("cuda", local_rank)


def device_of_rank(local_rank: int, wish: str | torch.device | None, *, shares_gpus: bool = False) -> torch.device:
    """Return the CPU if it was asked for, else the GPU with the local rank.

    Raises:
        LaunchError: an Apple GPU was asked for.
    """
    device_type = "cuda" if wish is None else _resolve_device(wish).type
    if device_type == "mps":
        raise LaunchError(
            "training.device=mps computes in one process alone: torch has no collectives for an Apple GPU. Start one "
            "process, or set training.device=cpu."
        )
    return torch.device("cpu") if device_type == "cpu" else _pick_device(local_rank, shares_gpus=shares_gpus)


def device_identity(device: torch.device) -> str | None:
    """Return host and UUID of a GPU, which are unique; None for a device that several ranks may use."""
    if device.type != "cuda":
        return None
    index = device.index or 0
    visible = os.environ.get(_CHOICES_OF_GPUS[0], "").split(",")
    # All slices of a divided GPU (MIG) may answer with the UUID of the whole; their names in the list differ.
    name = visible[index].strip() if index < len(visible) else ""
    uuid = name if name.startswith("MIG-") else f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return f"{socket.gethostname()} {uuid}"


def refuse_different_devices(device_types: Mapping[int, str]) -> None:
    """Raise LaunchError if the ranks' types of device and backends, as text, differ: a backend waits for all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, device_type in device_types.items():
        ranks.setdefault(device_type, []).append(rank)
    if len(ranks) > 1:
        groups = ", ".join(f"{device_type} ({format_ranks(members)})" for device_type, members in ranks.items())
        raise LaunchError(
            f"The ranks compute on different types of device, or with different backends: {groups}. All need the same. "
            "If a node should have GPUs, run `finetune doctor` there: its driver may be broken, or "
            "CUDA_VISIBLE_DEVICES hides them. Otherwise give all ranks the same training.device and parallel.backend."
        )


def refuse_shared_devices(identities: Mapping[int, str | None]) -> None:
    """Raise LaunchError if two ranks have the same `device_identity`: they would compete, and nccl would not start."""
    ranks: dict[str, list[int]] = {}
    for rank, identity in identities.items():
        if identity is not None:
            # A UUID is unique in the world; two containers of one machine differ in their host's name.
            ranks.setdefault(identity.split(" ")[-1], []).append(rank)
    shared = [f"ranks {', '.join(map(str, them))} ({identities[them[0]]})" for them in ranks.values() if len(them) > 1]
    if shared:
        raise LaunchError(
            f"Several ranks compute on the same GPU: {'; '.join(shared)}. Each needs its own. Show every process all "
            "GPUs of its node or one that no other has (CUDA_VISIBLE_DEVICES; `srun --gpus-per-task=1`), start fewer "
            "processes, or set training.device=cpu."
        )
