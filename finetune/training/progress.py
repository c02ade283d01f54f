"""What the user sees of a run: a live view on a terminal, log lines elsewhere, and a table at the end."""

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
from finetune.runs.state import Comparison, ModelScores
from finetune.runs.view import RunView
from finetune.signals import give_up_dead_screens

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_MAX_ANSWERS = 3
_log = logging.getLogger(__name__)


class TrainingProgress:
    """Shows how far training is: one view on a terminal, elsewhere a log line every `log_every` steps.

    Args:
        total_steps: optimizer steps of the whole run.
        first_step: steps that were done before this start.
        log_every: steps between two lines of the log; the last step always has one.
        console: where the view goes; default: stderr. There is none if that is no terminal.
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
        """Events of earlier starts, so that the view of a resumed run does not begin anew."""
        for event in events:
            self._view.take(event)

    def take(self, event: Event) -> None:
        """Show an event as it stands in metrics.jsonl."""
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
        # What the package logs to the same screen must pass above the view, and must not repeat it.
        for handler in logging.getLogger(PACKAGE).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                self._moved.append((handler, handler.stream))
                handler.setStream(FileProxy(console, handler.stream))
                handler.addFilter(_is_no_progress)
        self._live.start()

    def _seconds_left(self, step: int) -> float:
        done = max(step - self._first, 1)
        return (time.monotonic() - self._started) / done * (self._total - step)


def show_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the result of the test phase: base against tuned, then prompts with the answers of both.

    Args:
        comparison: figures and answers; what was not measured is left out or shown as a dash.
        console: where to; default: stdout.
    """
    from rich.console import Console

    give_up_dead_screens()
    console = console or Console()
    title = f"Test split, {comparison.num_rows:,} rows"
    console.print(_score_table(title, comparison.base, comparison.tuned))
    for answer in comparison.answers[:_MAX_ANSWERS]:
        rows = [("prompt", answer.prompt), ("expected", answer.expected)]
        if answer.base is not None:
            rows.append(("base", answer.base))
        console.print(_answer_table([*rows, ("tuned", answer.tuned)]))


def _score_table(title: str, base: ModelScores | None, tuned: ModelScores) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("")
    models = {"base": base, "tuned": tuned} if base is not None else {"tuned": tuned}
    for name in models:
        table.add_column(name, justify="right")
    scores = [model for model in models.values() if model is not None]
    measures = {
        "exact match": [_percent(score.exact_match) for score in scores],
        "valid JSON": [_percent(score.json_valid) for score in scores],
        "loss (nats per target token)": ["–" if s.loss is None else f"{s.loss:.4f}" for s in scores],
    }
    for name, cells in measures.items():
        if set(cells) != {"–"}:
            table.add_row(name, *cells)
    return table


def _answer_table(rows: list[tuple[str, str]]) -> Table:
    """A borderless table; texts stand as they are, since rich could take a part of a prompt for markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1))
    for name, text in rows:
        table.add_row(Text(name, style="bold"), Text(text))
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _is_no_progress(record: logging.LogRecord) -> bool:
    return not getattr(record, "is_progress", False)


def show_what_next(folder: Path, prompt: str | None) -> None:
    """Name what a finished run wrote and the next command to try.

    Args:
        folder: the run's folder.
        prompt: something to ask the tuned model, where a row of the data gives it.
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
    """A folder as the user would name it: from where they are, if it lies below."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
