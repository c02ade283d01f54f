"""metrics.jsonl: one event a line, written while a run goes on, and read as a whole or line by line behind it."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replace_file

Event = dict[str, Any]
"""A line of metrics.jsonl; docs/watching.md describes each kind."""
_log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends events to metrics.jsonl, one JSON object a line, each handed to the system at once.

    JSON has no word for numbers that are not finite; they are written as the strings "NaN", "Infinity" and
    "-Infinity", which `float()` of most languages reads back, so that a reader still sees which it was.

    Everything about a step is written before its checkpoint is committed, and `sync` makes it durable: a start
    from that checkpoint then misses no line, and `cut_behind` removes those that will come again.

    Args:
        path: of the file.
        outlasts_disk: what a failing disk does not take is no error: it is kept, and tried again with the next event.
    """

    def __init__(self, path: Path, *, outlasts_disk: bool = False) -> None:
        self.path = path
        self._file: FileIO | None = None
        self._outlasts_disk = outlasts_disk
        self._pending = b""
        self._lock = threading.Lock()  # `sync` is called by the thread that writes a checkpoint

    def write(self, kind: str, /, **values: object) -> Event:
        """Append one event, and return it as it will be read back.

        Raises:
            RunFailedError: the disk refused, and this writer does not outlast that.
        """
        event: Event = {"event": kind, **{name: as_json(value) for name, value in values.items()}}
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
        """Remove what came after a step, test results, and lines that are not whole, all in one go.

        Args:
            step: the last step to keep; 0 for a start from scratch.

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
            _log.info("%s: removed %d lines behind step %d", self.path.name, removed, step)
        return removed

    def close(self) -> None:
        """Close the file. The next event opens it again."""
        if self._pending and self._try_pending() and self._outlasts_disk:
            _log.error("%s misses its last %d bytes: the disk did not take them", self.path, len(self._pending))
        self._pending = b""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _try_pending(self) -> OSError | None:
        try:
            self._write_pending()
        except OSError as error:
            return error
        return None

    def _write_pending(self) -> None:
        """Unbuffered, so a reader has each line at once; a disk that is nearly full takes a part of it."""
        with self._lock:
            while self._pending:
                if self._file is None:
                    self._file = FileIO(self.path, "ab")
                self._pending = self._pending[self._file.write(self._pending) :]


class MetricsReader:
    """Reads what was added since the last time.

    A line without its end is left until the rest is there. A run that goes on from a checkpoint puts a shorter file
    in the place of the old one: then everything is read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[bool, list[Event]]:
        """Whether all that was read before counts no more, and the events that are new."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                is_new = self._identity is not None and (identity != self._identity or status.st_size < self._offset)
                file.seek(0 if is_new else self._offset)
                data = file.read()
        except OSError:  # not there yet, or between two names
            return False, []
        whole = data[: data.rfind(b"\n") + 1]
        self._identity = identity
        self._offset = len(whole) + (0 if is_new else self._offset)
        return is_new, _events_in(whole).events


class EventsRead(NamedTuple):
    """What a file holds."""

    events: list[Event]
    num_lines: int
    """Those that are torn, just being written, or not ours among them."""


def read_events(path: Path) -> EventsRead:
    """All events of a file. One that is not there holds nothing.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return _events_in(path.read_bytes())
    except FileNotFoundError:
        return EventsRead([], 0)


def number_in(event: Mapping[str, Any], name: str) -> float | None:
    """A figure of an event, which may stand there as "NaN" or "Infinity"; None where it is missing or no number."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def as_json(value: object) -> object:
    """A value that JSON can hold: numbers that are not finite become their names."""
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
    """One line; None where it is torn or not ours."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _is_event_up_to(step: int, line: bytes) -> bool:
    """Whether a line is whole and belongs to a step that is kept. A test has none: it comes last."""
    event = _parse(line)
    at = event.get("step") if event is not None else None
    return type(at) is int and at <= step
