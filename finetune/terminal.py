"""Write to a terminal: text that cannot steer it, JSON, and tables."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import Literal

_STEERS_READING = frozenset("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder or break the text around them, so that it could look like another text."""
_NOT_ESCAPED_BY_JSON = re.compile("[\u007f-\u009f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, *, also_unseen: bool = False) -> str:
    """Replace every control character but newline and tab by its code point: ``<U+001B>``, ``<U+202E>``.

    Args:
        text: of a model, a file or a run, which may have been written to steer the terminal.
        also_unseen: also replace harmless characters that cannot be seen: joiners, and all spaces but the plain one.
    """
    return "".join(c if _may_stand(c, also_unseen) else f"<U+{ord(c):04X}>" for c in text)


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON in which all control characters are escaped; it reads back as the same value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False, default=str)
    return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Write `json_text` of a value and a newline to stdout."""
    sys.stdout.write(f"{json_text(value, indent=indent)}\n")


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | tuple[str, str]]],
    *,
    right: Collection[str] = (),
    whole: Collection[str] = (),
    title: str | None = None,
) -> None:
    """Write a table to stdout.

    Args:
        head: the names of the columns.
        rows: cells as text, or as text and a style of rich. Text is never read as markup.
        right: columns to align to the right.
        whole: columns whose cells are not wrapped in a narrow terminal.
        title: printed above the table.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=None if title is None else Text(visible(title)))
    for name in head:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(Text(visible(name)), justify=justify, no_wrap=name in whole, overflow="fold")
    for row in rows:
        cells = ((cell, "") if isinstance(cell, str) else cell for cell in row)
        table.add_row(*(Text(visible(text), style=style) for text, style in cells))
    Console().print(table)


def _may_stand(character: str, also_unseen: bool) -> bool:
    if character in "\n\t":
        return True
    if also_unseen:
        return character.isprintable()
    return character not in _STEERS_READING and unicodedata.category(character) not in ("Cc", "Cs")
