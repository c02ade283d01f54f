"""The file that holds a session's figures: JSON Lines, each line on the disk before the next task begins."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""One line: `part`, `task` and one outcome of `OUTCOMES`; with figures or an error also what `FACTS` names."""

OUTCOMES = ("figures", "error", "skipped", "again")
"""Figures by name; an error's text; the reason why a task was not run; true where a task is to be repeated."""
FACTS = ("device", "versions", "code", "command", "seconds", "at")


class Figures:
    """The figures of a session, over all its starts.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[Record] = list(_read(path)) if path.exists() else []

    def last(self, task: str) -> Record | None:
        """Return the newest record of a task; None if there is none."""
        return next((record for record in reversed(self.records) if record["task"] == task), None)

    def is_done(self, task: str) -> bool:
        """Return whether a task has its figures, or failed, since it was last asked for."""
        last = self.last(task)
        return last is not None and ("figures" in last or "error" in last)

    def add(self, task: str, **fields: Any) -> Record:
        """Write a record and wait until it is on the disk."""
        record = {"part": task.partition("/")[0], "task": task, **fields}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell() and _last_byte(file) != b"\n":
                file.write(b"\n")  # an earlier start was cut off in the middle of a line
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        return record


def is_failed(record: Record) -> bool:
    """Return whether a task ended with an error, or its figures say that a result is wrong."""
    return "error" in record or record.get("figures", {}).get("is_right") is False


def _read(path: Path) -> list[Record]:
    """Read the lines; one that was cut off is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _last_byte(file: Any) -> bytes:
    file.seek(-1, os.SEEK_END)
    return bytes(file.read(1))
