"""Choose how the threads of a process wait for each other, and count the cores that they can use.

The OpenMP library of torch's wheels for Linux (libgomp) reads its settings once, when torch loads it. By default, a
waiting thread spins for about 3 ms before it sleeps. If another process is busy, the spinning thread occupies the core
that the other thread needs, and training falls to a fraction of its speed. Threads that sleep at once are slow on an
idle machine, because most waits are shorter than a wake-up. `benchmarks/busy.py` measures this; the results are in
benchmarks/README.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

_NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
_SPIN_COUNT = {"GOMP_SPINCOUNT": "1000"}
"""About 10 µs."""
_WIDE = 256
"""A second thread makes `phi_tiny`, which is 128 wide, 7 % faster, and a model that is 512 wide 58 %."""


class Waiting(NamedTuple):
    """How OpenMP's threads wait in this process."""

    variables: Mapping[str, str]
    """The environment variables that determine it, by name."""
    chosen_by: Literal["finetune", "user", "OpenMP"]

    def __str__(self) -> str:
        """Describe it for the log."""
        if self.chosen_by == "OpenMP":
            return "OpenMP's own way of waiting, because torch was loaded before finetune"
        shown = " ".join(f"{name}={value}" for name, value in self.variables.items())
        return f"{shown} ({'the default of finetune' if self.chosen_by == 'finetune' else 'from the environment'})"


def choose_waiting(environ: Mapping[str, str], *, is_torch_loaded: bool) -> Waiting:
    """Choose how threads wait: as the environment says, else finetune's own choice if torch is not loaded yet.

    A process that finetune started has its choice in the environment. torch loads OpenMP.
    """
    preset = {name: environ[name] for name in _NAMES if environ.get(name)}
    if preset:
        return Waiting(preset, "finetune" if preset == _SPIN_COUNT else "user")
    return Waiting({}, "OpenMP") if is_torch_loaded else Waiting(_SPIN_COUNT, "finetune")


@cache
def set_waiting() -> Waiting:
    """Set the choice in the environment of this process and its children. Later calls only return it."""
    waiting = choose_waiting(os.environ, is_torch_loaded="torch" in sys.modules)
    os.environ.update(waiting.variables)
    return waiting


def is_for_one_thread(width: int | None, environ: Mapping[str, str]) -> bool:
    """Return whether a model should use one thread, because a second thread makes it hardly faster.

    The load of the machine does not matter, because the number of threads can change the last bits of a sum. If
    OMP_NUM_THREADS is set, it holds.
    """
    return width is not None and width < _WIDE and not environ.get("OMP_NUM_THREADS")


def share_cores(num_processes: int) -> None:
    """Divide the cores among the processes that this one starts, as their threads, unless OMP_NUM_THREADS is set."""
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(num_cores() // num_processes)))


def num_cores(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Count the processor cores that this process may use, by its affinity and the limit of its container."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    names = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
    for files in ([root / name for name in pair] for pair in names):
        if all(file.is_file() for file in files):
            quota, period = " ".join(file.read_text() for file in files).split()
            if quota.isdigit():  # else `max` or -1: no limit
                cores = min(cores, int(quota) / int(period))
    return cores
