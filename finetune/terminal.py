"""What a command writes: text that cannot steer a terminal, JSON, and tables."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import Literal

_STEERS_READING = frozenset("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that reorder or break what is shown: text could look like another text."""
_NOT_ESCAPED_BY_JSON = re.compile("[\u007f-\u009f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str, *, also_unseen: bool = False) -> str:
    """Text with every control character but newline and tab written as its number: ``<U+001B>``, ``<U+202E>``.

    Args:
        text: of a model, a file or a run; whoever wrote it may want to steer the terminal.
        also_unseen: write out too what is harmless but cannot be seen: joiners, and all spaces but the plain one.
    """
    return "".join(c if _may_stand(c, also_unseen) else f"<U+{ord(c):04X}>" for c in text)


def json_text(value: object, *, indent: int | None = None) -> str:
    """A value as JSON in which no control character stands as itself; it reads back as exactly the same value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False, default=str)
    return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Write a value to stdout as `json_text`, with a newline behind it."""
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
        rows: cells as text, or as text with a style of rich; none is taken for markup.
        right: columns of numbers.
        whole: columns whose cells are not broken where the terminal is narrow.
        title: stands above the table.
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
