"""Write and read metrics.jsonl, which has one event per line."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self

from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replace_file

Event = dict[str, Any]
"""A line of metrics.jsonl; docs/watching.md describes each type of event."""
_OF_EVERY_VALIDATION = frozenset(
    ("event", "time", "step", "epoch", "loss", "standard_error", "num_targets", "best_metric")
)
_log = logging.getLogger(__name__)


class MetricsWriter:
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

    def cut_behind(self, step: int) -> int:
        """Remove the events after a step, the test results and half-written lines, by replacing the file once.

        Returns:
            The number of lines removed.

        Raises:
            RunFailedError: the disk refused; the file is as it was.
        """
        self.close()
        with disk_failures_end_the_run("Cutting", self.path):
            lines = self.path.read_bytes().splitlines(keepends=True) if self.path.is_file() else []
            kept = [line for line in lines if _is_event_up_to(step, line)]
            if len(kept) < len(lines):
                replace_file(self.path, b"".join(kept))
        if removed := len(lines) - len(kept):
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

    def __enter__(self) -> Self:
        return self

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


class MetricsReader:
    """Read the events that were added since the last call.

    A line without its end is left for the next call. A resumed run replaces the file by a shorter one, which is then
    read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[bool, list[Event]]:
        """Return whether the file was replaced, which discards all events read before, and the new events."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                is_new = self._identity is not None and (identity != self._identity or status.st_size < self._offset)
                file.seek(0 if is_new else self._offset)
                data = file.read()
        except OSError:  # not written yet, or being replaced
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        self._identity = identity
        self._offset = len(whole) + (0 if is_new else self._offset)
        return is_new, _events_in(whole).events


class EventsRead(NamedTuple):
    """The content of a file."""

    events: list[Event]
    num_lines: int
    """The number of lines, including lines that are half-written or are not events."""


def read_events(path: Path) -> EventsRead:
    """Read all events of a file; none if it does not exist.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        return _events_in(path.read_bytes())
    except FileNotFoundError:
        return EventsRead([], 0)


def number_in(event: Mapping[str, Any], name: str) -> float | None:
    """Return a number of an event, also one written as "NaN" or "Infinity"; None if it is missing or not a number."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def measured_beside_loss(event: Event) -> list[str]:
    """Return the names of a validation's metrics of answers and rewards, over all its rows."""
    return [
        name
        for name in event
        if name not in _OF_EVERY_VALIDATION and "/" not in name and number_in(event, name) is not None
    ]


def subset_key(metric: str, subset: str) -> str:
    """Return the key of a metric that is measured over one source, or over the rows with one value of a column."""
    return f"{metric}/{subset}"


def measured_in_subsets(event: Event) -> list[str]:
    """Return the names of a validation's losses and metrics over subsets of its rows: `loss/NAME`, ..."""
    return [
        name
        for name in event
        if "/" in name
        and name.partition("/")[0] not in ("standard_error", "num_targets")
        and number_in(event, name) is not None
    ]


def sign_of(metric: str) -> int:
    """Return 1 if a higher value of a metric is better, and -1 for the loss, of all rows or of a subset."""
    return -1 if metric.partition("/")[0] == "loss" else 1


def as_json(value: object) -> object:
    """Convert a value for JSON: numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(inner) for inner in value]
    return value


def _events_in(data: bytes) -> EventsRead:
    lines = data.splitlines(keepends=True)
    return EventsRead([event for line in lines if (event := _parse(line)) is not None], len(lines))


def _parse(line: bytes) -> Event | None:
    """Parse a line; None if it is half-written or not an event."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _is_event_up_to(step: int, line: bytes) -> bool:
    """Whether a line is intact and belongs to a kept step. Test results have no step, and are never kept."""
    event = _parse(line)
    at = event.get("step") if event is not None else None
    return type(at) is int and at <= step
