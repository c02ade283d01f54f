"""What a run's folder says of it, however far the run came: nothing is written, and a torn file is no error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.config.older_spelling import translate
from finetune.config.yaml_reader import read_file
from finetune.errors import CheckpointError
from finetune.runs.durable import describe_os_error
from finetune.runs.folder import RunFolder
from finetune.runs.metrics_reader import Event, examine_events, number_in
from finetune.runs.record import read_run_record

Points = list[tuple[int, float]]
"""Step and value. A value may be NaN or infinite."""

_LARGEST_STEP = 2**53
"""JavaScript counts no further."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run, as its files have it. Every text in it may be hostile."""

    label: str
    """The folder's name; of two that are called alike, enough of their paths to tell them apart."""
    folder: RunFolder
    record: dict[str, Any]
    """run.json; empty where there is none."""
    settings: dict[str, object]
    """config.yaml, by dotted key; empty where there is none."""
    events: list[Event]
    """metrics.jsonl."""
    written: datetime | None
    """When metrics.jsonl was last written, in UTC."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, as sentences without a full stop."""

    @property
    def status(self) -> str:
        """As in run.json, or unknown."""
        return str(self.record.get("status") or "unknown")

    @property
    def result(self) -> dict[str, Any]:
        """What run.json says of the outcome, which may be nothing."""
        return mapping(self.record.get("result"))

    @property
    def last_step(self) -> int:
        """The last optimizer step; 0 before the first."""
        return max((step for event in self.of("step") if (step := step_of(event)) is not None), default=0)

    def of(self, kind: str) -> list[Event]:
        """The events of one kind, in their order."""
        return [event for event in self.events if event["event"] == kind]

    def points(self, kind: str, name: str) -> Points:
        """One figure of the events of one kind, in rising steps; where a step comes twice, as it was last."""
        found = {
            step: value
            for event in self.of(kind)
            if (step := step_of(event)) is not None and (value := number_in(event, name)) is not None
        }
        return sorted(found.items())

    def scores(self) -> dict[str, dict[str, float]]:
        """What the test phase measured, by model (base, tuned) and figure."""
        figures = ("exact_match", "json_valid", "loss")
        return {
            str(event.get("model")): {
                name: value
                for name in figures
                if (value := number_in(event, name)) is not None and math.isfinite(value)
            }
            for event in self.of("test")
        }


def read_runs(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read runs from their folders.

    Raises:
        CheckpointError: one of them is no folder of a run, or is named twice.
    """
    folders = [RunFolder(path) for path in paths]
    labels = _labels([folder.path.resolve() for folder in folders])
    return [_read(folder, label) for folder, label in zip(folders, labels, strict=True)]


def finite(points: Points) -> Points:
    """Those that can be drawn."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def step_of(event: Event) -> int | None:
    """The step that an event belongs to, where that is a step."""
    step = event.get("step")
    return step if type(step) is int and 0 <= step < _LARGEST_STEP else None


def mapping(value: object) -> dict[str, Any]:
    """The value, where it is a mapping; else an empty one."""
    return value if isinstance(value, dict) else {}


def _labels(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of each path that no other path ends with."""
    twice = [path for path in paths if paths.count(path) > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is named twice. Name each run once.")
    labels = []
    for path in paths:
        others = [other for other in paths if other != path]
        ends = ("/".join(path.parts[-count:]) for count in range(1, len(path.parts) + 1))
        labels.append(next(end for end in ends if not any(f"/{other}".endswith(f"/{end}") for other in others)))
    return labels


def _read(folder: RunFolder, label: str) -> RecordedRun:
    files = (folder.config_file, folder.record_file, folder.metrics_file)
    if not any(file.is_file() for file in files):
        names = ", ".join(file.name for file in files)
        raise CheckpointError(
            f"{folder.path} is not the folder of a run: it has none of {names}. Give one, for example runs/quickstart."
        )
    problems = [f"{file.name} is missing" for file in files if not file.is_file()]
    record = read_run_record(folder.record_file)
    if record is None and folder.record_file.is_file():
        problems.append(f"{folder.record_file.name} is torn and is left out")
    settings = []
    if folder.config_file.is_file():
        unreadable: list[str] = []
        settings = translate(read_file(folder.config_file, folder.config_file.name, unreadable), unreadable)
        problems += unreadable
    return RecordedRun(
        label=label,
        folder=folder,
        record=record or {},
        settings={setting.dotted: setting.value for setting in settings},
        events=_read_events(folder.metrics_file, problems),
        written=_written(folder.metrics_file),
        problems=problems,
    )


def _read_events(path: Path, problems: list[str]) -> list[Event]:
    try:
        found = examine_events(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {describe_os_error(error)}")
        return []
    if found.num_left_out:
        what = f"{found.num_left_out} of {found.num_lines} lines"
        problems.append(f"{path.name}: left out, since torn or just being written: {what}")
    return found.events


def _written(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError:
        return None
