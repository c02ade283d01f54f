"""Read how much energy the GPUs and processors of this machine have used, where their drivers tell it.

NVML counts the energy of a GPU, and the kernel's powercap counts that of processor packages and memory. Both count all
programs. Only root can read powercap on most machines.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

POWERCAP = Path("/sys/class/powercap")
_NVML = "libnvidia-ml.so.1"
_COUNTED = ("package", "dram")
"""Names of powercap's zones begin so; `core` and `uncore` are parts of a package, and `psys` is the whole machine."""


class _Counter(NamedTuple):
    """A counter of energy that only rises, until it starts again at 0."""

    read: Callable[[], float]
    """Returns joules."""
    wraps_at: float = 0.0
    """Joules after which it starts again; 0 if it does not."""


class EnergyMeter:
    """Measure the energy between two calls of `spent`.

    Args:
        num_gpus: the GPUs that the run uses, which are the first ones that torch sees.
        powercap: the folder of the kernel's counters.
    """

    def __init__(self, num_gpus: int, powercap: Path = POWERCAP) -> None:
        found = {"gpu_joules": gpu_counters(num_gpus), "cpu_joules": cpu_counters(powercap)}
        self._counters = {kind: counters for kind, counters in found.items() if counters}
        self._last = self._read()

    def spent(self) -> dict[str, float]:
        """Return the joules since the last call, or since the meter was made, of all devices of a kind.

        The kinds are `gpu_joules` and `cpu_joules`. A kind is missing if one of its counters cannot be read.
        """
        now, before = self._read(), self._last
        self._last = now
        spent = {}
        for kind in now.keys() & before.keys():
            counters = zip(self._counters[kind], now[kind], before[kind], strict=True)
            # A counter may start again once between two calls.
            spent[kind] = round(
                sum(end - begin + (counter.wraps_at if end < begin else 0) for counter, end, begin in counters), 3
            )
        return dict(sorted(spent.items()))

    def _read(self) -> dict[str, list[float]]:
        values = {}
        for kind, counters in self._counters.items():
            try:
                values[kind] = [counter.read() for counter in counters]
            except OSError:
                continue  # taken away while the run goes on
        return values


def cpu_counters(powercap: Path) -> list[_Counter]:
    """Return the counters of processor packages and memory; empty if there are none, or if one cannot be read."""
    counters = []
    try:
        for zone in sorted(powercap.glob("intel-rapl:*")):  # AMD's processors have this name, too
            if not (zone / "name").read_text().startswith(_COUNTED):
                continue
            counter = _Counter(partial(_joules, zone / "energy_uj"), _joules(zone / "max_energy_range_uj"))
            counter.read()
            counters.append(counter)
    except OSError:
        return []
    return counters


def _joules(file: Path) -> float:
    try:
        return int(file.read_text()) / 1e6
    except ValueError as error:
        raise OSError(f"{file} holds no number") from error


def gpu_counters(number: int) -> list[_Counter]:
    """Return the counters of the first GPUs that torch sees; empty if there are fewer, or if NVML does not count one.

    NVML counts millijoules since its driver was loaded, from Volta on (`nvmlDeviceGetTotalEnergyConsumption`).
    """
    if not 0 < number <= torch.cuda.device_count():
        return []
    return nvml_counters([f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(number)])


def nvml_counters(ids: list[str], library: str = _NVML) -> list[_Counter]:
    """Return the counters of GPUs, given NVML's ids of them; empty if NVML is missing or does not count one."""
    try:
        nvml = ctypes.CDLL(library)
        _succeed(nvml.nvmlInit_v2())
        counters = [_Counter(partial(_energy, nvml, _handle(nvml, name))) for name in ids]
        for counter in counters:
            counter.read()
    except (OSError, AttributeError):  # no library, an error of NVML, or a library without these functions
        return []
    return counters


def _handle(nvml: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _succeed(nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))
    return handle


def _energy(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> float:
    millijoules = ctypes.c_ulonglong()
    _succeed(nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)))
    return millijoules.value / 1e3


def _succeed(code: int) -> None:
    if code:
        raise OSError(f"NVML ended with code {code}")
