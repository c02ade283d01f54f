"""metrics.jsonl, written event by event while a run goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self

from finetune.runs.durable import describe_os_error, disk_failures_end_the_run, replace_file
from finetune.runs.metrics_reader import Event, parse_event

_NO_FIGURES: Mapping[str, float] = MappingProxyType({})
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
        figures: Mapping[str, float] = _NO_FIGURES,
    ) -> Event:
        """One optimizer step; `"skipped": true` stands only where it made no update, and `figures` by their names."""
        return self._write(
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
            **figures,
        )

    def validation(
        self,
        *,
        step: int,
        epoch: int,
        loss: float,
        standard_error: float,
        num_targets: int,
        figures: Mapping[str, float] = _NO_FIGURES,
    ) -> Event:
        """Loss over the whole validation split after a step, in nats per target token. `figures` as in `step`."""
        return self._write(
            "validation",
            step=step,
            epoch=epoch,
            loss=loss,
            standard_error=standard_error,
            num_targets=num_targets,
            **figures,
        )

    def resources(
        self,
        *,
        step: int,
        seconds: float,
        tokens_per_second: float,
        host_memory: int,
        device_memory: int | None = None,
        data_wait_share: float | None = None,
        slowest_rank_share: float | None = None,
    ) -> Event:
        """What the steps since the last such event took, on rank 0. What is not known does not stand there.

        Args:
            step: the last of them.
            seconds: that they took together, validation and saving left out.
            tokens_per_second: over all of them and all ranks.
            host_memory: the most that the process has held since it was started, in bytes.
            device_memory: the most that torch had allocated on the accelerator, in bytes.
            data_wait_share: of `seconds`, spent waiting for the data loader.
            slowest_rank_share: of the ranks' time, spent waiting for the slowest of them.
        """
        shares = {"data_wait_share": data_wait_share, "slowest_rank_share": slowest_rank_share}
        known = {name: round(share, 4) for name, share in shares.items() if share is not None}
        device = {} if device_memory is None else {"device_memory": device_memory}
        return self._write(
            "resources",
            step=step,
            seconds=round(seconds, 6),
            tokens_per_second=round(tokens_per_second, 1),
            host_memory=host_memory,
            **device,
            **known,
        )

    def warning(self, *, step: int, kind: str, text: str) -> Event:
        """Something that the user should look at, in words, see `finetune.training.curve_warnings`."""
        return self._write("warning", step=step, kind=kind, text=text)

    def checkpoint(
        self, *, step: int, path: Path, num_bytes: int, blocked_seconds: float, write_seconds: float
    ) -> Event:
        """A checkpoint that is durable, by its path within the run's folder, and for how long training waited."""
        return self._write(
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
    ) -> Event:
        """One model on the test split; null for a measure that was not taken."""
        return self._write("test", model=model, exact_match=exact_match, json_valid=json_valid, loss=loss)

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

    def _write(self, event: str, **values: object) -> Event:
        record: Event = {"event": event, **{name: as_json(value) for name, value in values.items()}}
        had_trouble = bool(self._pending)
        with self._lock:
            self._pending += (json.dumps(record, allow_nan=False) + "\n").encode()
        if not self._outlasts_disk:
            with disk_failures_end_the_run("Writing", self.path):
                self._write_pending()
        elif (error := self._try_pending()) and not had_trouble:
            _log.warning("%s: %s; its lines are kept in memory meanwhile", self.path, describe_os_error(error))
        return record

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


def as_json(value: object) -> object:
    """A value that JSON can hold: numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(inner) for inner in value]
    return value


def _is_event_up_to(step: int, line: bytes) -> bool:
    """Whether a line is whole and belongs to a step that is kept. A test has none: it comes last."""
    event = parse_event(line)
    at = event.get("step") if event is not None else None
    return type(at) is int and at <= step
