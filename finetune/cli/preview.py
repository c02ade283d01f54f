"""`finetune preview`: rows on a terminal, as plain text, or as JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Literal

from finetune.config.compose import load_config
from finetune.distributed.environment import is_first_process
from finetune.logs import configure_logs

if TYPE_CHECKING:
    from rich.console import Console


def preview_from_words(
    words: Sequence[str],
    *,
    run: str | None,
    split: Literal["train", "validation", "test"] = "train",
    num_rows: int = 3,
    rows: Sequence[int] = (),
    form: Literal["text", "table", "json"] = "text",
) -> int:
    """Show the rows of a run as its model will see them. Under a launcher the first process does it for all.

    Args:
        words: as for `finetune train`.
        run: a run file.
        split: whose rows are shown.
        num_rows: show so many from the first on.
        rows: show these instead, whole, counted from 1.
        form: running text, a line for each token, or JSON.

    Returns:
        The exit code: 0 without a problem (strict: and without a warning), else 2.
    """
    config = load_config(words, run=run)
    if not is_first_process(os.environ):
        return 0
    configure_logs(0, level=logging.WARNING)

    from finetune.diagnose.preview import preview_data
    from finetune.findings import exit_code

    preview = preview_data(config, split=split, num_rows=num_rows, rows=rows)
    try:
        if form == "json":
            _write_json(preview.as_record(strict=config.strict))
        else:
            from finetune.diagnose.preview_text import show_preview

            show_preview(preview, _console(), whole_rows=bool(rows), as_table=form == "table")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(preview.findings, strict=config.strict)


def _write_json(record: dict[str, object]) -> None:
    # ASCII alone, and DEL is the one control character among it that JSON leaves as it is.
    sys.stdout.write(json.dumps(record).replace("\x7f", "\\u007f") + "\n")


def _console() -> Console:
    """In colours on a terminal that has them, unless NO_COLOR is set; without any style elsewhere."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would leave with exit code 1

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a screen in another encoding lacks some signs
    console = Screen(markup=False, highlight=False, emoji=False)
    if console.no_color or not console.is_terminal or console.color_system is None:
        return Screen(markup=False, highlight=False, emoji=False, color_system=None)
    return console
