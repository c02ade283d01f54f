"""Describe the device of a plan: this machine's, or a device given by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import psutil
import torch

from finetune.distributed.device import Precision, _resolve_device, accelerator_type, best_precision
from finetune.errors import ConfigError
from finetune.training.memory.choice import free_memory

GIB = 2**30


class _Known(NamedTuple):
    gib: float
    """The whole memory, as torch reports it."""
    half: float
    """TFLOP/s of matrix products in `precision`."""
    fp32: float
    """TFLOP/s in full fp32, the default of torch."""
    precision: Precision = "bf16"
    """What `training.precision=auto` means there."""
    has_fp8: bool = False
    """Whether `model.frozen_precision=fp8` is possible there: from Hopper on."""


_KNOWN = {
    "GB200 186GB": _Known(184.3, half=2500, fp32=80, has_fp8=True),
    "B200 180GB": _Known(178.3, half=2250, fp32=75, has_fp8=True),
    "MI300X 192GB": _Known(191.9, half=1307, fp32=163.4),
    "H200 141GB": _Known(139.8, half=989, fp32=67, has_fp8=True),
    "GH200 96GB": _Known(94.5, half=989, fp32=67, has_fp8=True),
    "H100 80GB": _Known(79.1, half=989, fp32=67, has_fp8=True),
    "A100 80GB": _Known(79.2, half=312, fp32=19.5),
    "A100 40GB": _Known(39.4, half=312, fp32=19.5),
    "RTX PRO 6000 96GB": _Known(94.9, half=504, fp32=126, has_fp8=True),
    "L40S 48GB": _Known(44.4, half=362, fp32=91.6),
    "L40 48GB": _Known(44.4, half=181, fp32=90.5),
    "A6000 48GB": _Known(47.5, half=155, fp32=38.7),
    "RTX 5090 32GB": _Known(31.3, half=209.5, fp32=104.8, has_fp8=True),
    "RTX 4090 24GB": _Known(23.5, half=165, fp32=82.6),
    "RTX 3090 24GB": _Known(23.6, half=71, fp32=35.6),
    "A10G 24GB": _Known(22.0, half=70, fp32=35),
    "A10 24GB": _Known(22.0, half=125, fp32=31.2),
    "L4 24GB": _Known(22.0, half=121, fp32=30.3),
    "V100 32GB": _Known(31.7, half=125, fp32=15.7, precision="fp16"),
    "V100 16GB": _Known(15.8, half=125, fp32=15.7, precision="fp16"),
    "T4 16GB": _Known(14.6, half=65, fp32=8.1, precision="fp16"),
}
"""By name. Rates are from the makers' data sheets: the fastest variant of each device, dense, with sums in fp32. Memory
of the RTX 5090: TrajectoryCrafter/TrajectoryCrafter#20; of the L40: QwenLM/Qwen3-VL#2097; of the RTX PRO 6000:
antirez/ds4#431; of the MI300X: ROCm/legacy-rocm-build#4750; of the GB200, which is one of the two GPUs of a superchip:
vllm-project/vllm#43951; of the GH200: vllm-project/vllm#9630. An A10G has what an A10 has."""

_NAMES_OF_DRIVERS = {"GH200 480GB": "GH200 96GB", "GH200 120GB": "GH200 96GB"}
"""The driver names a GH200 after the memory of its CPU, which torch does not count: vllm-project/vllm#9630."""

_CUDA_RESERVE = 1 * GIB
"""For CUDA's context, workspaces of its libraries and fragmentation: a rule of thumb, not measured."""
_CPU_RESERVE = GIB // 4
"""For the tokenizer, the rows, and free pieces of the heap that glibc keeps between tensors: a rule of thumb. A model
of 135M parameters took 250 to 290 MB for them, with steps of 0.3 to 1.6 GB."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device to plan for.

    Attributes:
        name: its name in messages.
        type: cpu or cuda, which decides how the engine computes.
        memory: bytes that the process can use.
        reserve: the part of `memory` that is in use before the first tensor, in bytes.
        precision: what `training.precision=auto` means there.
        is_here: whether it belongs to this machine.
        teraflops: the highest rate of matrix products by precision, where it is known.
        has_fp8: whether it has products in fp8 that finetune uses; None: not known.
    """

    name: str
    type: str
    memory: int
    reserve: int
    precision: Precision
    is_here: bool
    teraflops: Mapping[str, float] = field(default_factory=dict)
    has_fp8: bool | None = None

    def limited_to(self, fraction: float) -> Device:
        """Return the part of the device that a run may use (`training.memory_fraction`)."""
        return self if fraction == 1 else replace(self, memory=int(fraction * self.memory))

    def shared_by(self, processes: int) -> Device:
        """Return a process's share, if this is the CPU at hand: processes on one machine share its memory."""
        if processes == 1 or self.type != "cpu":
            return self
        name = f"a share of {self.name} ({processes} processes)"
        return replace(self, name=name, memory=self.memory // processes)


def read_device(name: str) -> Device:
    """Find a device by name: `H100 80GB`, `a100-40gb`, `4090`, or any other with its size, `MyGPU 24GB`.

    Raises:
        ConfigError: the name is not known and has no size, or fits several devices.
    """
    name = next((own for other, own in _NAMES_OF_DRIVERS.items() if _folded(other) == _folded(name)), name)
    known = [full for full in _KNOWN if _folded(name) in (_folded(full), _folded(full.rpartition(" ")[0]))]
    if len(known) == 1:
        spec = _KNOWN[known[0]]
        return replace(_cuda(known[0], round(spec.gib * GIB), precision=spec.precision), has_fp8=spec.has_fp8)
    size = re.search(r"(\d+(?:\.\d+)?)\s*Gi?B$", name.strip(), re.IGNORECASE)  # the G of A10G is no unit
    if size is None:
        message = f"this device is not known. Known are {', '.join(_KNOWN)}. Give one of them, or a size"
        message = f"the name fits several devices: {', '.join(known)}. Give one of them" if known else message
        raise ConfigError(f"--device {name}: {message}, for example --device '{known[0] if known else 'MyGPU 24GB'}'.")
    # Makers count in GiB, and torch reports some percent less.
    return _cuda(name.strip(), round(0.97 * float(size[1]) * GIB), precision="bf16")


def find_device(wish: str) -> Device:
    """Find the device at hand that a run would use, given its `training.device`."""
    device = _resolve_device(wish if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = _cuda(properties.name, properties.total_memory, precision=best_precision(device))
        return replace(gpu, is_here=True)
    resident = psutil.Process().memory_info().rss  # Python, torch and transformers: a run has them too
    free = free_memory(device, num_sharing=1)
    is_apple = wish in ("auto", "mps") and accelerator_type() == "mps"
    return Device(
        name="this machine's CPU, for want of figures for its Apple GPU" if is_apple else "this machine's CPU",
        type="cpu",
        memory=free + resident,
        reserve=resident + _CPU_RESERVE,
        precision="fp32",
        is_here=True,
    )


def _cuda(name: str, memory: int, *, precision: Precision) -> Device:
    words = re.split(r"[\s_-]+", name.upper())  # it may be the driver's name: NVIDIA A100-SXM4-80GB
    known = next((rates for full, rates in _KNOWN.items() if full.split()[-2] in words), None)
    return Device(
        name=name,
        type="cuda",
        memory=memory,
        reserve=_CUDA_RESERVE,
        precision=precision,
        is_here=False,
        teraflops={} if known is None else {known.precision: known.half, "fp32": known.fp32},
    )


def _folded(name: str) -> str:
    """Return what tells a name from others. Drivers add the form and the memory's type: `Tesla V100-SXM2-32GB`."""
    return re.sub(r"nvidia|geforce|tesla|rtx|sxm\d?|pcie|hbm\d?e?|[\s_-]", "", name.lower())
