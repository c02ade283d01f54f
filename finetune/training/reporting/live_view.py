"""Show the live view of a run in training: on a terminal, or below the cell of a notebook."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from finetune.live_log import log_above
from finetune.logs import task_on_view, waiting
from finetune.runs.view import RunView
from finetune.signals import ctrl_c_is_shown, ctrl_c_to_show

_SECONDS_BETWEEN_VIEWS = 0.25
_CELL_WIDTH = 90


class CellView:
    """Shows a view below the cell of a notebook, and replaces it."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        notebook: Any = import_module("IPython.display")  # there only in a notebook
        self._html = notebook.HTML
        self._handle = notebook.display(self._html(""), display_id=True)
        self._shown_at = -math.inf

    def show(self, *, is_last: bool = False) -> None:
        """Show the view, unless the last one was shown a moment ago."""
        if not is_last and time.monotonic() - self._shown_at < _SECONDS_BETWEEN_VIEWS:
            return
        screen = Console(file=io.StringIO(), record=True, width=_CELL_WIDTH, force_terminal=True, force_jupyter=False)
        screen.print(self._view)
        self._handle.update(self._html(screen.export_html(inline_styles=True, code_format="<pre>{code}</pre>")))
        self._shown_at = time.monotonic()


@contextmanager
def on_terminal(view: RunView, console: Console) -> Iterator[None]:
    """Show the view within the block, with the lines of the log above it."""
    with (
        waiting("training", is_on_view=True),
        log_above(console),
        Live(get_renderable=lambda: view_and_keys(view), console=console, refresh_per_second=4),
        ctrl_c_is_shown(),
    ):
        yield


def view_and_keys(view: RunView) -> Group:
    """Return the view and, after Ctrl-C was pressed, a line that explains its effect."""
    view.task = task_on_view()
    return Group(view, *(Text(line, style="bold") for line in ctrl_c_to_show()))
