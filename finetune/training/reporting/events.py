"""Pass each event of a run on: to metrics.jsonl, the live view, warnings and trackers; and measure its resources."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from finetune.runs.metrics import MetricsWriter, iterate_events
from finetune.training.reporting.progress import TrainingProgress

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks
    from finetune.runs.folder import RunFolder
    from finetune.training.reporting.run_warnings import RunWarnings
    from finetune.training.reporting.trackers import Trackers

_log = logging.getLogger(__name__)


class RunEvents:
    """Write each event to metrics.jsonl, the view and the trackers, and log the warnings that follow from it."""

    def __init__(self, config: Config, folder: RunFolder, fallbacks: Fallbacks, warnings: RunWarnings) -> None:
        self.metrics = MetricsWriter(folder.metrics_file, outlasts_disk=config.checkpoint.on_disk_failure == "continue")
        self._config = config
        self._warnings = warnings
        self._trackers: Trackers | None = None
        if config.training.report_to:
            from finetune.training.reporting.trackers import Trackers

            self._trackers = Trackers(config, folder, fallbacks)
        self._progress: TrainingProgress | None = None

    def start(self, first_step: int, num_steps: int, *, owes_validation: bool) -> None:
        """Remove the events after a step from metrics.jsonl, and open the trackers and the live view."""
        self.metrics.cut_behind(first_step, owes_validation=owes_validation)
        if self._trackers is not None:
            self._trackers.start(first_step=first_step)
        self._progress = TrainingProgress(self._config, num_steps, first_step=first_step)
        for event in iterate_events(self.metrics.path):
            self._warnings.take(event)
            self._progress.recall(event)
        self._progress.__enter__()

    def write(self, name: str, /, **values: Any) -> None:
        """Write one event."""
        event = self.metrics.write(name, **values)
        if self._progress is not None:
            self._progress.write(event)
        if self._trackers is not None:
            self._trackers.write(event)
        if warning := self._warnings.take(event):
            _log.warning("step %d: %s", event["step"], warning.text, extra={"is_on_view": True})
            self.write("warning", step=event["step"], kind=warning.name, text=warning.text)

    def close_view(self) -> None:
        """Close the live view. Later events do not appear on it."""
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
            self._progress = None

    def close(self) -> None:
        """Close everything. Later calls do nothing."""
        self.close_view()
        if self._trackers is not None:
            self._trackers.close()
        self.metrics.close()


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
        """Add one step, with its seconds on this rank from the end of the step before, and the tokens over all ranks.

        `rank_seconds` are the seconds that each rank computed on its own; empty in a world of one.
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


def energy_reader(device_type: str, *, world_size: int, num_here: int) -> Callable[[], dict[str, float]]:
    """Return a function that returns the joules since its last call, see `EnergyMeter.spent`.

    It returns {} if no driver counts them, or if only `num_here` of `world_size` processes are on this node.
    """
    is_told = device_type == "cuda" or os.access("/sys/class/powercap/intel-rapl:0/energy_uj", os.R_OK)
    if not is_told or world_size > num_here:
        return dict
    from finetune.training.reporting.energy import EnergyMeter

    return EnergyMeter(world_size if device_type == "cuda" else 0).spent


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
