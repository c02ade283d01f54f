"""Write metrics.jsonl, which has one event per line, and look at single events."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from finetune.limits import open_regular
from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replacing

Event = dict[str, Any]
"""A line of metrics.jsonl; docs/watching.md describes each type of event."""
OF_EVERY_VALIDATION = frozenset(
    ("event", "time", "step", "epoch", "loss", "standard_error", "num_targets", "best_metric")
)
_LONGEST_LINE = 1 << 20
_MOST_UNFINISHED = 64 << 20
"""The bytes without the end of a line after which reading ends: a sparse file may have no line at all."""
_LARGEST_STEP = 2**53
"""The largest integer that JavaScript, on the page of a report, represents exactly."""
FORGOTTEN = "forgotten"
"""The metric of a validation that is the divergence from the base on general prompts, in nats per token."""
_log = logging.getLogger(__name__)


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Append events to metrics.jsonl, one JSON object per line, without buffering.

    JSON cannot express numbers that are not finite. They are written as the strings "NaN", "Infinity" and
    "-Infinity", which `float()` reads back.

    All events of a step are written, and made durable by `sync`, before its checkpoint is committed. So a resumed run
    misses no line, and `cut_behind` removes those that it will write again.

    Args:
        path: the file.
        outlasts_disk: if the disk fails, keep the lines in memory and try again with the next event.
    """

    def __init__(self, path: Path, *, outlasts_disk: bool = False) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._outlasts_disk = outlasts_disk
        self._pending = b""
        self._lock = threading.Lock()  # `sync` is called by the thread that writes a checkpoint

    def write(self, event_type: str, /, **values: object) -> Event:
        """Append one event. Returns it as it will be read back.

        Raises:
            RunFailedError: the disk refused, without `outlasts_disk`.
        """
        event: Event = {"event": event_type, **{name: as_json(value) for name, value in values.items()}}
        had_trouble = bool(self._pending)
        with self._lock:
            self._pending += (json.dumps(event, allow_nan=False) + "\n").encode()
        if not self._outlasts_disk:
            with disk_failures_end_the_run("Writing", self.path):
                self._write_pending()
        elif (error := self._try_pending()) and not had_trouble:
            _log.warning("%s: %s; its lines are kept in memory meanwhile", self.path, describe_os_error(error))
        return event

    def sync(self) -> None:
        """Wait until every event written so far is on the disk.

        Raises:
            RunFailedError: the disk refused.
        """
        with disk_failures_end_the_run("Writing", self.path):
            self._write_pending()
            if self._file is not None:
                os.fsync(self._file.fileno())

    def cut_behind(self, step: int, *, owes_validation: bool = False) -> int:
        """Remove the events after a step, the test results and half-written lines, by replacing the file once.

        With `owes_validation`, the run will validate after this step again, so a validation of it is removed too.

        Returns:
            The number of lines removed.

        Raises:
            RunFailedError: the disk refused; the file is as it was.
        """
        self.close()
        with disk_failures_end_the_run("Cutting", self.path):
            if removed := sum(not _is_kept(step, owes_validation, line) for line in _lines_of(self.path)):
                with replacing(self.path) as file:
                    file.writelines(line for line in _lines_of(self.path) if _is_kept(step, owes_validation, line))
        if removed:
            _log.info("%s: removed %d lines after step %d", self.path.name, removed, step)
        return removed

    def close(self) -> None:
        """Close the file. The next event opens it again."""
        if self._pending and self._try_pending() and self._outlasts_disk:
            _log.error("%s lacks its last %d bytes: they could not be written", self.path, len(self._pending))
        self._pending = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try_pending(self) -> OSError | None:
        try:
            self._write_pending()
        except OSError as error:
            return error
        return None

    def _write_pending(self) -> None:
        """Write without a buffer, so that readers see each line at once. A nearly full disk may take part of a line."""
        with self._lock:
            while self._pending:
                if self._file is None:
                    self._file = FileIO(self.path, "ab")
                self._pending = self._pending[self._file.write(self._pending) :]


def iterate_events(path: Path) -> Iterator[Event]:
    """Yield all events of a file, one at a time; none if it does not exist.

    Raises:
        OSError: the file exists and cannot be read.
    """
    return (event for line in _lines_of(path) if (event := parse_event(line)) is not None)


def step_of(event: Event) -> int | None:
    """Return the step that an event belongs to; None if it has no valid step."""
    step = event.get("step")
    return step if type(step) is int and 0 <= step < _LARGEST_STEP else None


def number_in(event: Mapping[str, Any], name: str) -> float | None:
    """Return a number of an event, also one written as "NaN" or "Infinity"; None if it is missing or not a number."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def subset_key(metric: str, subset: str) -> str:
    """Return the key of a metric that is measured over one source, or over the rows with one value of a column."""
    return f"{metric}/{subset}"


def sign_of(metric: str) -> int:
    """Return 1 if a higher value of a metric is better, and -1 if a lower one is: `loss`, `loss/NAME`, `forgotten`."""
    return -1 if metric.partition("/")[0] in ("loss", FORGOTTEN) else 1


def as_json(value: object) -> object:
    """Convert a value for JSON: numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(inner) for inner in value]
    return value


def _lines_of(path: Path) -> Iterator[bytes]:
    with suppress(FileNotFoundError), open_regular(path) as file:
        yield from lines_in(file)


def lines_in(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines from a file's position on. A longer line than MetricsWriter writes comes in parts, no events.

    Raises:
        OSError: the file cannot be read, or has no end of a line for a long way.
    """
    unfinished = 0
    for line in iter(partial(file.readline, _LONGEST_LINE), b""):
        unfinished = 0 if line.endswith(b"\n") else unfinished + len(line)
        if unfinished > _MOST_UNFINISHED:
            raise OSError(errno.EFBIG, f"it has a line of more than {_MOST_UNFINISHED >> 20} MiB")
        yield line


def parse_event(line: bytes) -> Event | None:
    """Parse a line; None if it is half-written or not an event."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _is_kept(step: int, owes_validation: bool, line: bytes) -> bool:
    """Whether a line is intact and belongs to a kept step. Test results have no step, and are never kept."""
    event = parse_event(line) or {}
    at = event.get("step")
    return type(at) is int and at <= step and not (owes_validation and at == step and event["event"] == "validation")
