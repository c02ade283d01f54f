"""Read metrics.jsonl: all of it, thinned, or as it grows."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from finetune.limits import open_regular
from finetune.runs.metrics import OF_EVERY_VALIDATION, Event, lines_in, number_in, parse_event

Detail = Literal["all", "thinned", "recent"]
"""The events to read of a long file: all of them; of each type the highest and the lowest losses among neighbours, in
bounded memory; or, without parsing them, only the last steps and resources, and of other types as in `thinned`."""
_FREQUENT = (b'{"event": "step"', b'{"event": "resources"')
"""The first bytes of the lines of steps and resources, as `MetricsWriter` writes them."""
_EVENT_TYPES = frozenset(("step", "resources", "validation", "checkpoint", "warning", "test"))
_RECENT_BYTES = 1 << 20
"""Some thousand steps. The live view shows the last 400."""
_MOST_BYTES = 6 << 20
"""The most bytes of lines that are kept, about 25,000 steps. As Python objects they take up to 20 times as much."""


class MetricsReader:
    """Read the events that were added since the last call.

    A line without its end is left for the next call. A resumed run replaces the file by a shorter one, which is then
    read from its beginning. Of the steps that were written before the first call, it reads the last 1 MiB.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._offset = 0

    def read(self) -> tuple[bool, list[Event]]:
        """Return whether the file was replaced, which discards all events read before, and the new events."""
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                is_new = self._identity is not None and (identity != self._identity or status.st_size < self._offset)
                file.seek(0 if is_new else self._offset)
                read = _read(file, "recent")
        except OSError:  # not written yet, or being replaced
            return False, []
        self._identity = identity
        self._offset = read.num_bytes + (0 if is_new else self._offset)
        return is_new, read.events


class EventsRead(NamedTuple):
    """The events that were read from a metrics.jsonl, and counts of what was left out."""

    events: list[Event]
    num_left_out: int = 0
    """The number of lines that are half-written or are not events."""
    num_thinned: int = 0
    """The number of events that were read and not kept, see `Detail`."""
    num_tokens: float = 0.0
    """The tokens of all steps that were read."""
    num_bytes: int = 0
    """The size of the lines that have an end."""


def read_events(path: Path, detail: Detail = "all") -> EventsRead:
    """Read the events of a file; none if it does not exist.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        with open_regular(path) as file:
            return _read(file, detail)
    except FileNotFoundError:
        return EventsRead([])


def measured_beside_loss(event: Event) -> list[str]:
    """Return the names of a validation's metrics of answers and rewards, over all its rows."""
    return [
        name
        for name in event
        if name not in OF_EVERY_VALIDATION and "/" not in name and number_in(event, name) is not None
    ]


def subset_metrics_in(event: Event) -> list[str]:
    """Return the names of a validation's losses and metrics over subsets of its rows: `loss/NAME`, ..."""
    return [
        name
        for name in event
        if "/" in name
        and name.partition("/")[0] not in ("standard_error", "num_targets")
        and number_in(event, name) is not None
    ]


def _read(file: BinaryIO, detail: Detail) -> EventsRead:
    """Read from the file's position to its end.

    With `recent`, steps and resources before the last 1 MiB are passed over. Only the last such step is parsed, in case
    no step follows.
    """
    start = position = file.tell()
    recent_from = os.fstat(file.fileno()).st_size - _RECENT_BYTES if detail == "recent" else 0
    last_passed = b""
    events_with_sizes: list[tuple[int, Event]] = []
    num_left_out = num_thinned = kept_bytes = unfinished = 0
    num_tokens = 0.0
    for line in lines_in(file):
        is_passed = position < recent_from and line.startswith(_FREQUENT)
        position += len(line)
        unfinished = 0 if line.endswith(b"\n") else unfinished + len(line)
        if is_passed:
            last_passed = line if line.startswith(_FREQUENT[0]) else last_passed
            continue
        event = parse_event(line)
        if event is None:
            num_left_out += 1
            continue
        if event["event"] == "step":
            last_passed = b""
            num_tokens += number_in(event, "num_tokens") or 0.0
        events_with_sizes.append((len(line), event))
        kept_bytes += len(line)
        if detail != "all" and kept_bytes > _MOST_BYTES:
            thinned = _thinned(events_with_sizes)
            num_thinned += len(events_with_sizes) - len(thinned)
            events_with_sizes, kept_bytes = thinned, sum(length for length, _ in thinned)
    events = [event for _, event in events_with_sizes]
    if (step := parse_event(last_passed)) is not None:
        events.append(step)
    return EventsRead(events, num_left_out, num_thinned, num_tokens, position - start - unfinished)


def _thinned(kept: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """Drop about half of the events of each type that takes much room: two of four neighbours.

    The events with the lowest and the highest loss are kept, and the first and the last of each type.
    """
    of_type: dict[str, list[int]] = {name: [] for name in _EVENT_TYPES}
    for place, (_, event) in enumerate(kept):
        of_type.get(event["event"], []).append(place)
    chosen: list[int] = []
    for places in of_type.values():
        if sum(kept[place][0] for place in places) <= _MOST_BYTES // 16:
            chosen += places
            continue
        chosen += {places[0], places[-1]}
        for start in range(1, len(places) - 1, 4):
            group = sorted(places[start : min(start + 4, len(places) - 1)], key=lambda place: _loss(kept[place][1]))
            chosen += {group[0], group[-1]}
    return [kept[place] for place in sorted(chosen)]


def _loss(event: Event) -> float:
    loss = number_in(event, "loss")
    return math.inf if loss is None or math.isnan(loss) else loss
