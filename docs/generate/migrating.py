"""Make the tables of docs/migrating.md: former names of keys, and names in other libraries, with their meaning here."""

from __future__ import annotations

import re

from finetune.config.older_spelling import REMOVED, RENAMED, TABLE, Dropped, Renamed, Rule
from finetune.config.other_tools import KEYS, SENTENCES
from finetune.config.schema import ALIASES

_MARKER = re.compile(r"^<!-- table: (\w+) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """Put each table of names in the place of its marker."""
    return _MARKER.sub(lambda marker: _table(*TABLES[marker[1]]), markdown)


def _rule(rule: Rule) -> str:
    if isinstance(rule, Renamed):
        return f"`{rule.key}`"
    return f"{'left out' if isinstance(rule, Dropped) else 'refused'}: {rule.reason}"


def _names(text: str) -> str:
    return ", ".join(f"`{name.partition('=')[0]}`" for name in text.split())


def _table(heads: tuple[str, str], rows: dict[str, str]) -> str:
    return "\n".join(
        [f"| {heads[0]} | {heads[1]} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows.items())]
    )


TABLES: dict[str, tuple[tuple[str, str], dict[str, str]]] = {
    "renamed": (("former key", "key"), {f"`{older}`": f"`{key}`" for older, key in RENAMED.items()}),
    "removed": (("former key", "why"), {f"`{older}`": why for older, why in REMOVED.items()}),
    "earlier": (
        ("former key", "read as"),
        {
            f"`{key}`": "; otherwise ".join(map(_rule, rules))
            for key, rules in TABLE.items()
            if key not in (*RENAMED, *REMOVED, *ALIASES)
        },
    ),
    "keys": (("here", "there"), {f"`{key}`": _names(names) for key, names in KEYS.items()}),
    "others": (("here", "there"), {sentence: _names(names) for sentence, names in SENTENCES.items()}),
}
"""By the name in a marker: the heads of the two columns, and the rows."""
