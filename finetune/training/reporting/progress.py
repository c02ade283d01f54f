"""Show the progress of a run: a live view on a terminal, log lines elsewhere, and the next commands at its end."""

from __future__ import annotations

import logging
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from finetune.logs import is_notebook, report_progress, waiting
from finetune.runs.metrics import Event
from finetune.runs.progress_line import ProgressLine
from finetune.terminal import as_written, fold, say, screen_width, shown_folder, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from finetune.config.schema import Config
    from finetune.fallbacks import Fallback
    from finetune.runs.view import RunView
    from finetune.training.reporting.live_view import CellView

TRACE_VIEWER = "https://ui.perfetto.dev"
_log = logging.getLogger(__name__)


class TrainingProgress:
    """Show the progress of training: a live view on a terminal or in a notebook, elsewhere a log line now and then."""

    def __init__(self, config: Config, total_steps: int, first_step: int = 0, console: Console | None = None) -> None:
        self._total = total_steps
        self._first = first_step
        self._log_every = config.training.log_every
        self._is_in_cell = console is None and is_notebook()
        self._console = None if self._is_in_cell else _on_terminal(console)
        self._view: RunView | None = None
        if self._is_in_cell or self._console is not None:
            from finetune.runs.view import RunView

            self._view = RunView(total_steps, config.early_stopping.max_forgotten)
        self._line = self._view or ProgressLine(total_steps)
        self._line.step = first_step
        self._shown = ExitStack()
        self._cell: CellView | None = None
        self._started = time.monotonic()

    def recall(self, event: Event) -> None:
        """Add an event of an earlier start to the view of a resumed run."""
        self._line.take(event)

    def write(self, event: Event) -> None:
        """Show an event of metrics.jsonl."""
        self._line.take(event)
        if self._cell is not None:
            self._cell.show()
        if event["event"] == "step":
            step = self._line.step
            num_steps = max(step - self._first, 1)
            # The mean time of a step since the start, times the steps that are left.
            self._line.seconds_left = (time.monotonic() - self._started) / num_steps * (self._total - step)
            report_progress(self._line.line() if self._console is None else "")
            if step % self._log_every == 0 or step == self._total:
                _log.info("%s", self._line.line(), extra={"is_on_view": True})

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._view is not None and self._console is not None:
            from finetune.training.reporting.live_view import on_terminal

            self._shown.enter_context(on_terminal(self._view, self._console))
            return self
        if self._view is not None:
            from finetune.training.reporting.live_view import CellView

            self._cell = CellView(self._view)
        self._shown.enter_context(waiting("training"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is not None:
            self._cell.show(is_last=True)
            self._cell = None
        self._shown.close()


def _on_terminal(console: Console | None) -> Console | None:
    """Return the given console, or one for stderr. None if it is not a terminal."""
    if console is None:
        if not getattr(sys.stderr, "isatty", bool)():
            return None
        from rich.console import Console

        console = Console(stderr=True)
    return console if console.is_terminal else None


def show_what_next(
    folder: Path,
    prompt: str | None,
    *,
    step: int | None,
    profile: str | None = None,
    fallbacks: Sequence[Fallback] = (),
) -> None:
    """Print the files of a finished run, the fallbacks and the next command to try. What is None is left out."""
    shown = shown_folder(folder)
    # A row may hold characters that steer the terminal, which quotes for the shell do not stop, or that it cannot show.
    is_exact = prompt and as_written(visible(prompt), sys.stdout) == prompt
    question = shlex.quote(prompt) if prompt and is_exact else '"…"'
    command = f"finetune generate {shlex.quote(str(shown))} {question}"
    width = screen_width(sys.stdout)
    if width is not None and len(command) + len("Next: ") > width:  # a shell reads it as one line
        command = command.replace(f" {question}", f" \\\n  {question}")
    weights = "the weights" if step is None else f"the weights of step {step}"
    traces = ""
    if profile:
        traces = f"  profile/       a trace of these steps, for {TRACE_VIEWER}\n"
        say(f"\n{profile[0].upper()}{profile[1:]}.")
    if fallbacks:
        say("\nNot as asked:")
        for fallback in fallbacks:
            say(f"  {fallback}", indent="    ")
    sys.stdout.write(
        f"\nWritten to {visible(str(shown))}:\n"
        f"{fold(f'  adapter/       {weights}, for finetune, peft and transformers', sys.stdout, indent=' ' * 17)}\n"
        "  checkpoints/   where resume=auto goes on from\n"
        f"{traces}"
        "  metrics.jsonl, run.json, config.yaml, log.txt\n"
        f"\nNext: {visible(command)}\n"
    )
    sys.stdout.flush()
