"""Show a run while it goes, as a live view on a terminal and as log lines elsewhere, and what to do after it."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from finetune.logs import PACKAGE
from finetune.runs.metrics import Event
from finetune.runs.view import RunView
from finetune.signals import give_up_dead_screens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

_log = logging.getLogger(__name__)


class TrainingProgress:
    """Show the progress of training: a live view on a terminal, elsewhere a log line every `log_every` steps.

    Args:
        total_steps: optimizer steps of the whole run.
        first_step: steps done before this start.
        log_every: steps between two log lines; the last step always has one.
        console: of the view; default: stderr. There is no view if this is not a terminal.
    """

    def __init__(
        self, total_steps: int, *, first_step: int = 0, log_every: int = 10, console: Console | None = None
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._log_every = log_every
        self._console = console
        self._view = RunView(total_steps)
        self._view.step = first_step
        self._live: Live | None = None
        self._moved: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        self._started = time.monotonic()

    def recall(self, events: Iterable[Event]) -> None:
        """Add the events of earlier starts to the view of a resumed run."""
        for event in events:
            self._view.take(event)

    def take(self, event: Event) -> None:
        """Show an event of metrics.jsonl."""
        give_up_dead_screens()
        self._view.take(event)
        if event["event"] == "step":
            step = self._view.step
            self._view.seconds_left = self._seconds_left(step)
            if step % self._log_every == 0 or step == self._total:
                _log.info("%s", self._view.line(), extra={"is_progress": True})

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console is not None or sys.stderr.isatty():
            from rich.console import Console

            console = self._console or Console(stderr=True)
            if console.is_terminal:
                self._show_view(console)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        while self._moved:
            handler, stream = self._moved.pop()
            handler.removeFilter(_is_no_progress)
            handler.setStream(stream)

    def _show_view(self, console: Console) -> None:
        from rich.file_proxy import FileProxy
        from rich.live import Live

        self._live = Live(self._view, console=console, refresh_per_second=4)
        # Log lines to the same screen must appear above the view, without the progress lines that repeat it.
        for handler in logging.getLogger(PACKAGE).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self._moved.append((handler, handler.stream))
                handler.setStream(FileProxy(console, handler.stream))
                handler.addFilter(_is_no_progress)
        self._live.start()

    def _seconds_left(self, step: int) -> float:
        done = max(step - self._first, 1)
        return (time.monotonic() - self._started) / done * (self._total - step)


def _is_no_progress(record: logging.LogRecord) -> bool:
    return not getattr(record, "is_progress", False)


def show_what_next(folder: Path, prompt: str | None) -> None:
    """Print the files of a finished run and the next command to try.

    Args:
        folder: the run's folder.
        prompt: a prompt from the data to ask the tuned model; None where there is none.
    """
    give_up_dead_screens()
    shown = shown_folder(folder)
    question = shlex.quote(prompt) if prompt else '"…"'
    sys.stdout.write(
        f"\nWritten to {shown}:\n"
        "  adapter/       the best weights, for finetune, peft and transformers\n"
        "  checkpoints/   where resume=auto goes on from\n"
        "  metrics.jsonl, run.json, config.yaml, log.txt\n"
        f"\nNext: finetune generate {shlex.quote(str(shown))} {question}\n"
    )
    sys.stdout.flush()


def shown_folder(folder: Path) -> Path:
    """Return a folder relative to the current one if it is below it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
