"""metrics.jsonl, read: as a whole, or while a run writes it. The only place that parses its lines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Event = dict[str, Any]
"""A line of metrics.jsonl; docs/watching.md describes each kind."""


class EventsRead(NamedTuple):
    """What a file holds."""

    events: list[Event]
    num_lines: int
    """Those that are no event among them."""

    @property
    def num_left_out(self) -> int:
        """Lines that are torn, just being written, or not ours."""
        return self.num_lines - len(self.events)


def examine_events(path: Path) -> EventsRead:
    """The events, and how many lines had to be left out. A file that is not there holds nothing.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return _events_in(path.read_bytes())
    except FileNotFoundError:
        return EventsRead([], 0)


def read_events(path: Path) -> list[Event]:
    """The events, for those who take what there is: lines that are torn or not ours are passed over."""
    try:
        return examine_events(path).events
    except OSError:
        return []


def parse_event(line: bytes) -> Event | None:
    """One line of metrics.jsonl; None where it is torn or not ours."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def number_in(event: Mapping[str, Any], name: str) -> float | None:
    """A figure of an event, which may stand there as "NaN" or "Infinity"; None where it is missing or no number."""
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


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
                return self._read(file.fileno())
        except OSError:  # not there yet, or between two names
            return False, []

    def _read(self, descriptor: int) -> tuple[bool, list[Event]]:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        is_new = self._identity is not None and (identity != self._identity or status.st_size < self._offset)
        if is_new:
            self._offset = 0
        self._identity = identity
        with os.fdopen(os.dup(descriptor), "rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return is_new, _events_in(whole).events


def _events_in(data: bytes) -> EventsRead:
    lines = data.splitlines(keepends=True)
    return EventsRead([event for line in lines if (event := parse_event(line)) is not None], len(lines))
