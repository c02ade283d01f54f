"""Warn of a chat template that writes today's date into rows, and say which date cached rows have."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from finetune.data.row_file import METADATA_KEY
from finetune.limits import open_regular

_log = logging.getLogger(__name__)


def warn_of_date(template: str, files: Iterable[Path]) -> None:
    """Warn that a chat template writes today's date into rows, or that cached rows have the date of an earlier day.

    Args:
        template: the name of the template, for the message.
        files: the files of the cache that hold the rows. A file that does not exist was not written: its rows are new.
    """
    today = date.today().isoformat()
    earlier = sorted({written for file in files if (written := _date_of(file)) not in (None, today)})
    if earlier:
        _log.warning(
            "the chat template of %s writes today's date into rows. The rows were encoded before and are read from the "
            "cache, with the date %s. A run that resumes needs them as they are. For a new run, set "
            "data.template_date=%s for today's date, or %s to keep this one on every day.",
            *(template, " or ".join(earlier), today, earlier[0]),
        )
        return
    _log.warning(
        "the chat template of %s writes today's date into rows. On another day, the same rows have other tokens, and "
        "the run refuses to resume. Set data.template_date=%s.",
        *(template, today),
    )


def _date_of(file: Path) -> str | None:
    """Return the day on which a file of the cache was written; None if there is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(file).close()  # the library opens the path itself
        with safe_open(file, framework="pt") as opened:
            written = json.loads(opened.metadata()[METADATA_KEY]).get("date")
        return written or date.fromtimestamp(file.stat().st_mtime).isoformat()  # version 0.2.0 wrote no date
    except (OSError, ValueError, LookupError, SafetensorError):
        return None
