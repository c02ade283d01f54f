"""What a run leaves for others to read: metrics.jsonl event by event, run.json at each change."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import finetune
from finetune.durable import describe_os_error, disk_failures_end_the_run, replace_file

Status = Literal["running", "completed", "failed", "stopped", "preempted"]

_PACKAGES = ("torch", "transformers", "accelerate", "peft")
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

    def step(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        learning_rate: float,
        grad_norm: float,
        num_targets: int,
        num_tokens: int,
        num_computed: int,
        tokens_per_second: float,
        is_skipped: bool = False,
    ) -> None:
        """One optimizer step; `"skipped": true` stands only where it made no update."""
        self._write(
            "step",
            step=step,
            epoch=epoch,
            loss=loss,
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            num_targets=num_targets,
            num_tokens=num_tokens,
            num_computed=num_computed,
            tokens_per_second=tokens_per_second,
            **({"skipped": True} if is_skipped else {}),
        )

    def validation(self, *, step: int, epoch: int, loss: float, standard_error: float, num_targets: int) -> None:
        """Loss over the whole validation split after a step, in nats per target token."""
        self._write(
            "validation", step=step, epoch=epoch, loss=loss, standard_error=standard_error, num_targets=num_targets
        )

    def checkpoint(
        self, *, step: int, path: Path, num_bytes: int, blocked_seconds: float, write_seconds: float
    ) -> None:
        """A checkpoint that is durable, by its path within the run's folder, and for how long training waited."""
        self._write(
            "checkpoint",
            step=step,
            path=path.relative_to(self.path.parent).as_posix(),
            num_bytes=num_bytes,
            blocked_seconds=blocked_seconds,
            write_seconds=write_seconds,
        )

    def test(
        self,
        *,
        model: Literal["base", "tuned"],
        exact_match: float | None,
        json_valid: float | None,
        loss: float | None,
    ) -> None:
        """One model on the test split; null for a measure that was not taken."""
        self._write("test", model=model, exact_match=exact_match, json_valid=json_valid, loss=loss)

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

    def _write(self, event: str, **values: object) -> None:
        record = {"event": event, **{name: _finite(value) for name, value in values.items()}}
        had_trouble = bool(self._pending)
        with self._lock:
            self._pending += (json.dumps(record, allow_nan=False) + "\n").encode()
        if not self._outlasts_disk:
            with disk_failures_end_the_run("Writing", self.path):
                self._write_pending()
        elif (error := self._try_pending()) and not had_trouble:
            _log.warning("%s: %s; its lines are kept in memory meanwhile", self.path, describe_os_error(error))

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


class RunRecord:
    """run.json: what a run was, on what, and how it ended; replaced whole at each change.

    Only what is passed in by name gets here: no environment, no arguments, nothing that could be a secret.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}

    def start(
        self,
        *,
        world_size: int,
        processes_started: int,
        launcher: str,
        backend: str | None,
        global_batch: Mapping[str, Any],
        fallbacks: list[dict[str, str]],
        fingerprints: Mapping[str, str],
        started_with: Mapping[str, Any] | None = None,
        resume_changes: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Write the record of a run that begins or goes on. Times of starts, and what they changed, are kept.

        Args:
            world_size: processes that train together.
            processes_started: processes of the launch; more than world_size where one of them goes on alone.
            launcher: what started them.
            backend: that of the process group; None for a single process.
            global_batch: how the global batch is made up, for example batch_size, world_size, accumulation.
            fallbacks: what `Fallbacks.as_records` gives.
            fingerprints: digests by name, for example of the data and the configuration.
            started_with: what the next start is compared with.
            resume_changes: what this start changed of the curve, by `resume.allow`; added to that of earlier starts.

        Raises:
            RunFailedError: the disk refused.
        """
        earlier = read_run_record(self.path) or {}
        starts, changes = (_list(earlier.get(name)) for name in ("starts", "resume_changes"))
        now = _now()
        self._values = {
            "status": "running",
            "world_size": world_size,
            "processes_started": processes_started,
            "launcher": launcher,
            "backend": backend,
            "global_batch": dict(global_batch),
            "fallbacks": fallbacks,
            "versions": read_versions(),
            "fingerprints": dict(fingerprints),
            "starts": [*starts, now],
            "started_with": dict(started_with) if started_with is not None else None,
            "resume_changes": [*changes, *({"at": now, **change} for change in resume_changes)],
            "finished": None,
            "result": None,
        }
        self._save()

    def update(self, **values: Any) -> None:
        """Change fields that `start` wrote.

        Raises:
            KeyError: there is no such field.
            RunFailedError: the disk refused.
        """
        unknown = values.keys() - self._values.keys()
        if unknown:
            raise KeyError(f"run.json has no field {sorted(unknown)}")
        self._values |= values
        self._save()

    def finish(self, status: Status, result: Mapping[str, Any] | None = None) -> None:
        """Note how the run ended, when, and with what.

        Raises:
            RunFailedError: the disk refused.
        """
        self.update(status=status, finished=_now(), result=dict(result) if result is not None else None)

    def _save(self) -> None:
        data = json.dumps(_finite(self._values), indent=2, allow_nan=False) + "\n"
        with disk_failures_end_the_run("Writing", self.path):
            replace_file(self.path, data.encode())


def read_run_record(path: Path) -> dict[str, Any] | None:
    """What run.json says; None where it is missing, empty or torn, with a warning in the latter cases."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s cannot be read and is written anew: %s", path, error)
        return None
    return record if isinstance(record, dict) else None


def read_versions() -> dict[str, str]:
    """Versions of Python, of this package and of those below it, without importing them."""
    found = {"python": platform.python_version(), "finetune": finetune.__version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _is_event_up_to(step: int, line: bytes) -> bool:
    """Whether a line is whole and belongs to a step that is kept. A test has none: it comes last."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    at = record.get("step") if isinstance(record, dict) else None
    return line.endswith(b"\n") and type(at) is int and at <= step


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _finite(value: object) -> object:
    """A value that JSON can hold: numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
