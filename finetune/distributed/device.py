"""Choose the device and the precision of this process, and convert weights to the types of the run."""

from __future__ import annotations

import ctypes
import logging
import mmap
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from finetune.errors import LaunchError
from finetune.units import ceil_div

_log = logging.getLogger(__name__)

_WISH = re.compile(r"(cuda|gpu|mps|cpu)(?::([0-9]{1,4}))?")
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of frozen weights and of products."""


def _resolve_device(device: str | torch.device | int | None) -> torch.device:
    """Return the device that was asked for, or the best one if none was.

    A device that this machine lacks is replaced by the CPU, with a warning.
    """
    if device is None or device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device_type, index = _parse(device)
    if device_type == "cuda" and index < torch.cuda.device_count():
        return torch.device("cuda", index)
    if device_type == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    if device_type != "cpu":
        wish = f"cuda:{device}" if isinstance(device, int) else device
        _log.warning(
            "device %s is not on this machine (%d CUDA devices): the CPU is used", wish, torch.cuda.device_count()
        )
    return torch.device("cpu")


def accelerator_type() -> str | None:
    """Return the type of accelerator that torch sees here: `cuda`, `mps`, or one that finetune cannot use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def _parse(device: str | torch.device | int) -> tuple[str, int]:
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    match = _WISH.fullmatch(text.strip().lower())
    if match is None:
        raise LaunchError(
            f"The device {str(device)!r} is not known; expected auto, cpu, cuda (or gpu), cuda:1, mps, or the index of "
            "a GPU. Set training.device to one of these."
        )
    return "cuda" if match[1] == "gpu" else match[1], int(match[2] or 0)


def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU has bf16 in hardware. torch's `is_bf16_supported` answers True for emulation too."""
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

    Each weight moves to the device, if one is given, in the same step, so that main memory holds no other copy. On the
    CPU it is copied, because a weight that is mapped from a file would change with the file.
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
    files = [] if device is None else _mapped_files()
    for parameter in parameters:
        if parameter.is_floating_point():
            dtype, weight = torch.float32 if parameter.requires_grad else frozen, parameter.data
            parameter.data = weight.to(weight.device if device is None else device, dtype, copy=is_copied)
            if files:
                _release_pages(weight, files)


def _mapped_files() -> list[range]:
    """Return the addresses of mapped files; empty on other systems than Linux."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(errors="replace").splitlines() if maps.is_file() else []
    return [range(*(int(end, 16) for end in line.partition(" ")[0].split("-"))) for line in lines if "/" in line]


def _release_pages(weight: torch.Tensor, files: Sequence[range]) -> None:
    """Take a weight that is mapped from a file out of resident memory. It stays in the system's cache of the file."""
    start, end, page = weight.data_ptr(), weight.data_ptr() + weight.nbytes, mmap.PAGESIZE
    if weight.is_cpu and weight.is_contiguous() and any(start in file and end <= file.stop for file in files):
        first, last = ceil_div(start, page) * page, end // page * page  # others may use the rest of its pages
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(0, last - first)), mmap.MADV_DONTNEED)


def rounded_products() -> dict[str, str]:
    """Return the type to which torch was told to round the factors of products in fp32, by device; empty if to none."""
    backends: Any = torch.backends
    types = {"cuda": backends.cuda.matmul.fp32_precision, "cpu": backends.mkldnn.matmul.fp32_precision}
    return {device: name for device, name in types.items() if name not in ("none", "ieee")}


def refuse_modes(*, trains: bool, is_launched: bool = False) -> None:
    """Raise LaunchError for a mode of torch around the caller that would change the numbers of a run, or stop it.

    Without `trains`, gradients may be off. A launch sets the precision of products, so it is refused only inside one.
    """
    default = torch.get_default_device()
    device_types = {"cpu", default.type, accelerator_type() or "cpu"} - {"meta"}
    modes = {
        "torch.autocast": any(map(torch.is_autocast_enabled, device_types)),
        f"torch.set_default_dtype({torch.get_default_dtype()})": torch.get_default_dtype() != torch.float32,
        f"torch.set_default_device({str(default)!r})": default.type != "cpu",
        "torch.set_float32_matmul_precision": is_launched and bool(rounded_products()),
        "torch.inference_mode": trains and torch.is_inference_mode_enabled(),
        "torch.no_grad": trains and not torch.is_grad_enabled(),
    }
    if on := [mode for mode, is_on in modes.items() if is_on]:
        what = "train" if trains else "compute with"
        raise LaunchError(
            f"{on[0]} is in force around this call. It would also hold inside the run, whose numbers the configuration "
            f"alone decides. Leave it before you {what} a run; training.precision and training.device choose type and "
            "device."
        )
