"""Show the progress of a run: a live view on a terminal, log lines elsewhere, and the next commands at its end."""

from __future__ import annotations

import io
import logging
import math
import shlex
import sys
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from finetune.logs import is_notebook, log_above, report_progress, task_on_view, waiting
from finetune.runs.metrics import Event
from finetune.runs.view import RunView
from finetune.signals import ctrl_c_is_shown, ctrl_c_to_show
from finetune.terminal import as_written, say, screen_width, shown_folder, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from finetune.fallbacks import Fallback

TRACE_VIEWER = "https://ui.perfetto.dev"
_SECONDS_BETWEEN_VIEWS = 0.25
_CELL_WIDTH = 90
_log = logging.getLogger(__name__)


class _CellView:
    """Shows a view below the cell of a notebook, and replaces it."""

    def __init__(self) -> None:
        notebook: Any = import_module("IPython.display")  # there only in a notebook
        self._html = notebook.HTML
        self._handle = notebook.display(self._html(""), display_id=True)
        self._shown_at = -math.inf

    def show(self, view: RenderableType, *, is_last: bool = False) -> None:
        """Show the view, unless the last one was shown a moment ago."""
        if not is_last and time.monotonic() - self._shown_at < _SECONDS_BETWEEN_VIEWS:
            return
        from rich.console import Console

        screen = Console(file=io.StringIO(), record=True, width=_CELL_WIDTH, force_terminal=True, force_jupyter=False)
        screen.print(view)
        self._handle.update(self._html(screen.export_html(inline_styles=True, code_format="<pre>{code}</pre>")))
        self._shown_at = time.monotonic()


class TrainingProgress:
    """Show the progress of training: a live view on a terminal or in a notebook, elsewhere a log line now and then."""

    def __init__(
        self, total_steps: int, *, first_step: int = 0, log_every: int = 10, console: Console | None = None
    ) -> None:
        self._total = total_steps
        self._first = first_step
        self._log_every = log_every
        self._console = console
        self._view = RunView(total_steps)
        self._view.step = first_step
        self._shown = ExitStack()
        self._cell: _CellView | None = None
        self._started = time.monotonic()
        self._is_live = False

    def recall(self, event: Event) -> None:
        """Add an event of an earlier start to the view of a resumed run."""
        self._view.take(event)

    def write(self, event: Event) -> None:
        """Show an event of metrics.jsonl."""
        self._view.take(event)
        if self._cell is not None:
            self._cell.show(self._view)
        if event["event"] == "step":
            step = self._view.step
            num_steps = max(step - self._first, 1)
            # The mean time of a step since the start, times the steps that are left.
            self._view.seconds_left = (time.monotonic() - self._started) / num_steps * (self._total - step)
            report_progress("" if self._is_live else self._view.line())
            if step % self._log_every == 0 or step == self._total:
                _log.info("%s", self._view.line(), extra={"is_on_view": True})

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._console is None and is_notebook():
            self._cell = _CellView()
        elif self._console is not None or sys.stderr.isatty():
            from rich.console import Console

            console = self._console or Console(stderr=True)
            if console.is_terminal:
                self._show_view(console)
                return self
        self._shown.enter_context(waiting("training"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is not None:
            self._cell.show(self._view, is_last=True)
            self._cell = None
        self._shown.close()

    def _show_view(self, console: Console) -> None:
        from rich.live import Live

        self._is_live = True
        self._shown.enter_context(waiting("training", is_on_view=True))
        self._shown.enter_context(log_above(console))
        self._shown.enter_context(Live(get_renderable=self._screen, console=console, refresh_per_second=4))
        self._shown.enter_context(ctrl_c_is_shown())

    def _screen(self) -> RenderableType:
        """Return the view and, after Ctrl-C was pressed, a line that explains its effect."""
        from rich.console import Group
        from rich.text import Text

        self._view.task = task_on_view()
        return Group(self._view, *(Text(line, style="bold") for line in ctrl_c_to_show()))


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
        f"  adapter/       {weights}, for finetune, peft and transformers\n"
        "  checkpoints/   where resume=auto goes on from\n"
        f"{traces}"
        "  metrics.jsonl, run.json, config.yaml, log.txt\n"
        f"\nNext: {visible(command)}\n"
    )
    sys.stdout.flush()
