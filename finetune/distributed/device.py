"""Which device this process computes on."""

from __future__ import annotations

import logging

import torch

from finetune.errors import LaunchError

_log = logging.getLogger(__name__)


def _resolve_device(device: str | torch.device | int | None) -> torch.device:
    """Turn a wish into a device that is there; an absent or out-of-range one becomes the CPU, with a warning.

    Args:
        device: ``cuda``, ``gpu``, ``cuda:1``, ``mps``, ``cpu``, an index, a device, or None for the best there is.
    """
    if device is None or device == "auto":
        return _best_device()
    wish = (
        torch.device(f"cuda:{device}") if isinstance(device, int) else torch.device(str(device).replace("gpu", "cuda"))
    )
    if wish.type == "cuda" and (wish.index or 0) < torch.cuda.device_count():
        return torch.device("cuda", wish.index or 0)
    if wish.type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    if wish.type != "cpu":
        _log.warning(
            "device %s is not on this machine (%d CUDA devices): the CPU is used",
            wish,
            torch.cuda.device_count(),
        )
    return torch.device("cpu")


def _pick_device(local_rank: int) -> torch.device:
    """This rank's own device: the GPU with its local rank, or the CPU where there is no GPU.

    Raises:
        LaunchError: there are GPUs, but fewer than processes on this node: two ranks would share one in silence.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return torch.device("cpu")
    if local_rank >= count:
        raise LaunchError(
            f"local rank {local_rank} needs GPU {local_rank}, but this node shows {count} GPU(s). "
            f"Start at most {count} processes per node, widen CUDA_VISIBLE_DEVICES, or set training.device=cpu."
        )
    return torch.device("cuda", local_rank)


def _best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    return torch.device("mps") if torch.backends.mps.is_available() else torch.device("cpu")
