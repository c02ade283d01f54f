"""Pass each event of a run on: to metrics.jsonl, the live view, warnings, and trackers such as TensorBoard."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any

import psutil

from finetune.config.render import resolved_yaml
from finetune.distributed.accelerate_library import open_tracker
from finetune.errors import ConfigError
from finetune.fallbacks import Fallback
from finetune.runs.metrics import Event, MetricsWriter, iterate_events
from finetune.training.reporting.progress import TrainingProgress

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks
    from finetune.runs.folder import RunFolder
    from finetune.training.reporting.run_warnings import RunWarnings


_log = logging.getLogger(__name__)
_NOT_REPORTED = {"event", "step"}
_FOLDER = "trackers"


class Trackers:
    """Pass events on to trackers, which write their files to `trackers/` in the run's folder.

    A tracker that fails during training is dropped, and a fallback is recorded.
    """

    def __init__(self, config: Config, folder: RunFolder, fallbacks: Fallbacks) -> None:
        self._config = config
        self._folder = folder
        self._fallbacks = fallbacks
        self._open: dict[str, Any] = {}
        self._step = 0

    def start(self, *, first_step: int) -> None:
        """Open the trackers that the configuration names.

        Raises:
            ConfigError: one cannot be opened.
        """
        for name in dict.fromkeys(self._config.training.report_to):
            try:
                tracker = open_tracker(name, self._folder.path / _FOLDER, self._folder.path.name, first_step=first_step)
                if name == "tensorboard":  # it shows indented Markdown as plain text
                    tracker.log({"config": indent(resolved_yaml(self._config), " " * 4)}, step=first_step)
                else:
                    tracker.store_init_configuration(_flat(self._config.model_dump(mode="json")))
            except Exception as error:
                raise ConfigError(
                    f"training.report_to: {name} cannot be started: {_in_a_line(error)}. Set it up as its own "
                    "documentation describes (wandb: WANDB_MODE=offline needs no login), or remove it."
                ) from error
            self._open[name] = tracker

    def write(self, event: Event) -> None:
        """Report the values of an event, as `step/loss`, `validation/loss`, `resources/host_memory`, ..."""
        prefix = f"test_{event.get('model')}" if event["event"] == "test" else event["event"]
        values = {
            f"{prefix}/{name}": value
            for name, value in event.items()
            if name not in _NOT_REPORTED and isinstance(value, (int, float)) and math.isfinite(value)
        }
        step = event.get("step")
        if step is not None:  # a checkpoint in the background is reported late, and wandb takes no lower step
            step = self._step = max(self._step, step)
        for name, tracker in list(self._open.items()) if values else ():
            try:
                tracker.log(values, step=step)
            except Exception as error:  # of the network, the disk or the service
                del self._open[name]
                reason = f"{_in_a_line(error)}; metrics.jsonl has every figure"
                self._fallbacks.take(Fallback(what="training.report_to", wanted=name, used="none", why=reason))

    def close(self) -> None:
        """Let each tracker finish writing. May be called twice."""
        for name, tracker in self._open.items():
            try:
                tracker.finish()
            except Exception as error:  # the run is over and must still record how it ended
                _log.warning("training.report_to: %s could not finish: %s", name, _in_a_line(error))
        self._open.clear()


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _flat(values: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested values under dotted names, with lists and inner mappings as text, which every tracker accepts."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and not above:
            flat |= _flat(value, f"{name}.")
        else:
            flat[f"{above}{name}"] = value if isinstance(value, (int, float, str)) else str(value)
    return flat


class RunEvents:
    """Write each event to metrics.jsonl, the view and the trackers, and log the warnings that follow from it."""

    def __init__(self, config: Config, folder: RunFolder, fallbacks: Fallbacks, warnings: RunWarnings) -> None:
        self.metrics = MetricsWriter(folder.metrics_file, outlasts_disk=config.checkpoint.on_disk_failure == "continue")
        self._log_every = config.training.log_every
        self._warnings = warnings
        self._trackers = Trackers(config, folder, fallbacks)
        self._progress: TrainingProgress | None = None

    def start(self, first_step: int, num_steps: int) -> None:
        """Remove the events after a step from metrics.jsonl, and open the trackers and the live view."""
        self.metrics.cut_behind(first_step)
        self._trackers.start(first_step=first_step)
        self._progress = TrainingProgress(num_steps, first_step=first_step, log_every=self._log_every)
        for event in iterate_events(self.metrics.path):
            self._warnings.take(event)
            self._progress.recall(event)
        self._progress.__enter__()

    def write(self, name: str, /, **values: Any) -> None:
        """Write one event."""
        event = self.metrics.write(name, **values)
        if self._progress is not None:
            self._progress.write(event)
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
