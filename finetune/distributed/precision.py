"""Choose the precision of a run, and convert its weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.utils.deterministic

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of frozen weights and of products."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def has_bf16(device: torch.device) -> bool:
    """Return whether a device is a GPU with bf16 in hardware: NVIDIA's from Ampere on, and AMD's.

    Older GPUs emulate bf16 slowly, and torch's `is_bf16_supported` answers True for them.
    """
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def best_precision(device: torch.device) -> Precision:
    """Return the value of `training.precision=auto` on a device: the fastest precision that the device has."""
    if device.type != "cuda":
        return "fp32"
    return "bf16" if has_bf16(device) else "fp16"


def choose_precision(wish: Precision | Literal["auto"], *, best: Precision) -> Precision:
    """Return the precision that `training.precision` means on a device with this `best_precision`."""
    return best if wish == "auto" else wish


def convert_weights(model: torch.nn.Module, precision: Precision, device: torch.device | None = None) -> None:
    """Convert a model's weights: trained weights to fp32, frozen weights to the run's precision.

    Args:
        model: on the CPU, or where it was loaded.
        precision: of the run.
        device: each weight moves there in the same step, so that main memory holds no other copy. On the CPU each
            weight is copied, because a weight that is mapped from a file would change with the file. None: the
            weights stay on their device.
    """
    set_compute_dtype(model, precision)
    convert_parameters(model.parameters(), precision, device)


def set_compute_dtype(model: torch.nn.Module, precision: Precision) -> None:
    """In an fp16 run, let bitsandbytes compute the products of its 4-bit layers in fp16, since the GPU has no bf16."""
    modules: Iterable[Any] = model.modules()
    for module in modules if precision == "fp16" else ():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float16


def convert_parameters(
    parameters: Iterable[torch.nn.Parameter], precision: Precision, device: torch.device | None = None
) -> None:
    """Do as `convert_weights`, for some weights of a model."""
    frozen = DTYPES[precision]
    is_copied = device is not None and device.type == "cpu"
    for parameter in parameters:
        if parameter.is_floating_point():
            dtype = torch.float32 if parameter.requires_grad else frozen
            parameter.data = parameter.data.to(parameter.device if device is None else device, dtype, copy=is_copied)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make torch compute the same bits every time inside the block. On CUDA, other operations are an error."""
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # without a fixed workspace, torch refuses all products on CUDA
    settings: Any = torch.utils.deterministic
    fills_memory = settings.fill_uninitialized_memory
    was_enabled = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings.fill_uninitialized_memory = False  # takes time, and only shows reads of memory that was never written
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=only_warned)
        settings.fill_uninitialized_memory = fills_memory
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
