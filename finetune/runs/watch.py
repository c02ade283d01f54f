"""`finetune watch`: follow a run from another terminal, or look at one that has ended. Reads its files alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.logs import configure_logs
from finetune.runs.folder import RunFolder
from finetune.runs.listing import is_being_written, mapping_in, read_state_of, refuse_what_is_no_run
from finetune.runs.metrics_reader import Event, MetricsReader, number_in
from finetune.runs.record import read_run_record
from finetune.runs.view import RunView

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_LOOK_SECONDS = 0.5
_LINE_EVERY = 10


class Watch:
    """A run as it is seen from outside.

    Args:
        folder: the run's.
        console: a terminal gets the live view, anything else a line now and then.
    """

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder = folder
        self._console = console
        self._reader = MetricsReader(folder.metrics_file)
        self._view = RunView()
        self._state = ""
        self._last_line_at = 0
        self._live: Live | None = None

    def follow(self, *, once: bool = False) -> str:
        """Show the run until it ends, or as it is now.

        Returns:
            Its state, see `read_state_of`.
        """
        with self._shown():
            # The state is read first: what was written before the end is then always shown.
            while (state := self._read_state()) == "running" and not once:
                self._look()
                time.sleep(_LOOK_SECONDS)
            self._look(is_last=True)
        return state

    def _read_state(self) -> str:
        record = read_run_record(self._folder.record_file) or {}
        state = read_state_of(self._folder, record)
        num_steps = record.get("num_steps")
        self._view.num_steps = num_steps if type(num_steps) is int else None
        result = mapping_in(record, "result")
        why = result.get("why") or result.get("error")
        if state == "stopped" and record.get("status") == "running":
            why = "its process is gone and left no word; resume=auto goes on from the last checkpoint"
        self._state = state if state in ("running", "completed") or not why else f"{state}: {why}"
        self._view.headline = f"{self._folder.path.name}, {self._state}"
        return state

    def _look(self, *, is_last: bool = False) -> None:
        is_new, events = self._reader.read()
        if is_new:
            fresh = RunView(self._view.num_steps)
            fresh.headline = self._view.headline
            self._view = fresh
            self._last_line_at = 0
            self._say("the run goes on from a checkpoint: what came behind it does not count")
        for event in events:
            self._view.take(event)
            self._say_event(event)
        if is_last:
            if self._view.step > self._last_line_at:
                self._say(self._view.line())
            self._say(self._view.headline)
        self._refresh()

    def _say_event(self, event: Event) -> None:
        kind, step = event["event"], int(number_in(event, "step") or 0)
        if kind == "step" and step % _LINE_EVERY == 0:
            self._last_line_at = step
            self._say(self._view.line())
        elif kind == "validation":
            self._say(f"step {step} · validation {number_in(event, 'loss')}")
        elif kind == "checkpoint":
            self._say(f"step {step} · saved {event.get('path')}")
        elif kind == "warning":
            self._say(f"step {step} · warning: {event.get('text')}")

    @contextmanager
    def _shown(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        from rich.live import Live

        with Live(get_renderable=lambda: self._view, console=self._console, auto_refresh=False) as live:
            self._live = live
            yield

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.refresh()

    def _say(self, text: str) -> None:
        """A line, where there is no view that shows the same."""
        if self._live is None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def watch_run(path: Path, console: Console, *, once: bool = False) -> int:
    """Show a run until it ends; one that has ended is shown as it stands.

    Ctrl-C ends the watching, not the run.

    Args:
        path: the run's folder.
        console: where to.
        once: show it as it is now, also if it goes on.

    Returns:
        The exit code: 0, however the run ended.

    Raises:
        CheckpointError: there is no run in the folder.
    """
    configure_logs(0, level=logging.ERROR)
    folder = RunFolder(path)
    if not is_being_written(folder):  # a run that has only just begun has its lock alone
        folder = refuse_what_is_no_run(path)
    with suppress(KeyboardInterrupt):
        Watch(folder, console).follow(once=once)
    return 0
