"""Measure the steps between two log lines: time, waiting and memory of the main process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import psutil


class Interval:
    """Sums over the steps of one interval. No collective: the times of other ranks come with each step's result."""

    def __init__(self) -> None:
        self._seconds = self._slowest = 0.0
        self._num_tokens = 0
        self._data_wait: float | None = None
        self._busy: float | None = None

    def add(
        self,
        *,
        seconds: float,
        num_tokens: int,
        data_wait_seconds: float | None = None,
        rank_seconds: Sequence[float] = (),
    ) -> None:
        """Add one step.

        Args:
            seconds: the time of the step on this rank, from the end of the step before.
            num_tokens: over all ranks.
            data_wait_seconds: the part of `seconds` spent waiting for the data loader; None if it was not measured.
            rank_seconds: the seconds that each rank computed on its own; empty in a world of one.
        """
        self._seconds += seconds
        self._num_tokens += num_tokens
        if data_wait_seconds is not None:
            self._data_wait = (self._data_wait or 0.0) + data_wait_seconds
        if len(rank_seconds) > 1:
            self._busy = (self._busy or 0.0) + sum(rank_seconds) / len(rank_seconds)
            self._slowest += max(rank_seconds)

    def metrics(self) -> dict[str, Any]:
        """Return the values of a `resources` event, in bytes, seconds and shares; unknown values are left out."""
        seconds = max(self._seconds, 1e-9)
        waits = None if self._data_wait is None else round(min(self._data_wait / seconds, 1.0), 4)
        slowest = None if self._busy is None else round(1 - self._busy / max(self._slowest, 1e-9), 4)
        metrics = {
            "seconds": round(self._seconds, 6),
            "tokens_per_second": round(self._num_tokens / seconds, 1),
            "host_memory": peak_host_memory(),
            "device_memory": peak_device_memory(),
            "data_wait_share": waits,
            "slowest_rank_share": slowest,
        }
        return {name: value for name, value in metrics.items() if value is not None}


def peak_host_memory() -> int:
    """Return the peak resident set of this process in bytes; shared memory is included."""
    try:
        import resource
    except ImportError:  # Windows, where psutil knows the peak
        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_device_memory() -> int | None:
    """Return the peak of the bytes that torch allocated on this process's GPU; None if it uses none."""
    import torch

    if not torch.cuda.is_available():
        return None
    most = int(torch.cuda.max_memory_allocated())  # 0 where this process has not used it
    return most or None
