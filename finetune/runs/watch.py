"""Follow a run by the files in its folder: `finetune watch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from finetune.runs.folder import RunFolder
from finetune.runs.metrics import Event
from finetune.runs.metrics_reader import MetricsReader
from finetune.runs.progress_line import shown_step
from finetune.runs.recorded_run import RecordedRun, name_on_one_line
from finetune.runs.view import RunView
from finetune.terminal import visible

_LOOK_SECONDS = 0.5
_LINE_EVERY = 10


class Watch:
    """Show a run until it ends: a live view on a terminal, elsewhere a line every few steps."""

    def __init__(self, folder: RunFolder, console: Console) -> None:
        self._folder = folder
        self._console = console
        self._reader = MetricsReader(folder.metrics_file)
        self._view = RunView()
        self._last_line_at = 0
        self._live: Live | None = None

    def follow(self, *, once: bool = False) -> None:
        """Show the run until it ends. With `once`, show its present state and return."""
        with self._live_view():
            # The state is read before the events, so that all events before the end are shown.
            while self._read_state() == "running" and not once:
                self._look()
                time.sleep(_LOOK_SECONDS)
            self._look()
            if self._view.step > self._last_line_at:
                self._say(self._view.line())
            self._say(self._view.headline)

    def _read_state(self) -> str:
        run = RecordedRun(self._folder.path)
        state, reason = run.state, run.why
        if state == "stopped" and run.status == "running":
            reason = f"{reason}. resume=auto continues from the last checkpoint"
        shown = state if state in ("running", "completed") or not reason else f"{state}: {reason}"
        self._view.headline = name_on_one_line(f"{self._folder.path.name}, {shown}")
        self._view.num_steps = run.num_steps
        self._view.max_forgotten = run.config.early_stopping.max_forgotten if run.config else None
        return state

    def _look(self) -> None:
        is_new, events = self._reader.read()
        if is_new:
            fresh = RunView(self._view.num_steps, self._view.max_forgotten)
            fresh.headline = self._view.headline
            self._view = fresh
            self._last_line_at = 0
            self._say("the run continues from a checkpoint, and discards the steps after it")
        for event in events:
            self._view.take(event)
            self._say_event(event)
        if self._live is not None:
            self._live.refresh()

    def _say_event(self, event: Event) -> None:
        event_type, step = event["event"], shown_step(event)
        if event_type == "step" and step % _LINE_EVERY == 0:
            self._last_line_at = step
            self._say(self._view.line())
        elif event_type == "validation":
            self._say(self._view.validation_line())
        elif event_type == "checkpoint":
            self._say(f"step {step} · saved {event.get('path')}")
        elif event_type == "warning":
            self._say(f"step {step} · warning: {event.get('text')}")

    @contextmanager
    def _live_view(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(get_renderable=lambda: self._view, console=self._console, auto_refresh=False) as live:
            self._live = live
            yield

    def _say(self, text: str) -> None:
        """Print a line, unless the live view shows the same."""
        if self._live is None:
            self._console.print(visible(text), markup=False, highlight=False, soft_wrap=True)
