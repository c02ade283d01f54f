"""Pass the events of a run on to trackers, such as TensorBoard: `training.report_to`."""

from __future__ import annotations

import logging
import math
from textwrap import indent
from typing import TYPE_CHECKING, Any

from finetune.config.render import resolved_yaml
from finetune.distributed.accelerate_library import open_tracker
from finetune.errors import ConfigError
from finetune.fallbacks import Fallback
from finetune.runs.metrics import Event

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks
    from finetune.runs.folder import RunFolder

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
