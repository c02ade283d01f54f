"""Keep a live view or the line of a slow task in place on an interactive terminal, with the log above it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.file_proxy import FileProxy
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.theme import Theme

_MOMENT_SECONDS = 0.3


@contextmanager
def log_above(console: Console) -> Iterator[None]:
    """Print lines of the log above a live view on the same screen, without those that repeat the view."""
    handlers = (
        handler for handler in logging.getLogger("finetune").handlers if isinstance(handler, logging.StreamHandler)
    )
    moved = [(handler, handler.stream) for handler in handlers if handler.stream is sys.stderr]
    for handler, stream in moved:
        handler.setStream(FileProxy(console, stream))
        handler.addFilter(_is_not_on_view)
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.removeFilter(_is_not_on_view)
            handler.setStream(stream)


def _is_not_on_view(record: logging.LogRecord) -> bool:
    return not getattr(record, "is_on_view", False)


@contextmanager
def waiting_line(text: object) -> Iterator[None]:
    """Show the current text and the elapsed time in one line, which is removed at the end of the block."""
    console = Console(stderr=True, theme=Theme({"progress.elapsed": "", "progress.spinner": "green"}))
    shown = TextColumn("{task.fields[innermost]}", markup=False, table_column=Column(overflow="fold"))
    columns = SpinnerColumn(), shown, TimeElapsedColumn()
    line = Progress(*columns, console=console, transient=True, redirect_stdout=False)
    line.add_task("", total=None, innermost=text)
    start = threading.Timer(_MOMENT_SECONDS, line.start)
    start.start()
    try:
        with log_above(console):
            yield
    finally:
        start.cancel()
        start.join()
        line.stop()
