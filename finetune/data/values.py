"""Check the values of a row: text that can be encoded, JSON in a cell, and nulls that stand for absent keys."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

CONVERT = "If the file is in Windows-1252, convert it: `iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW`."
_LONGEST_QUOTE = 60
_PYTHON_TURNS = re.compile(r"\s*(?:array\(|list\()?[\[(\s]*\{\s*'(?:role|from|content|value)'\s*:")
"""The text of Python objects with turns. NumPy writes them without commas."""
_PYTHON_OBJECT = re.compile(r"\s*(?:array\()?[\[({\s]*[\[({]\s*'")


class BadRowError(ValueError):
    """One row cannot be used. `RowProblems` collects these errors into one DataError."""


def quote(value: object) -> str:
    """Format a value for an error: on one line, and shortened."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 1] + "…"


def parse_text(value: object, where: str) -> str:
    """Return a value that is text which can be encoded. Raise a BadRowError for any other."""
    if not isinstance(value, str):
        raise BadRowError(f"{where} is {quote(value)} ({type(value).__name__}); expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRowError(
                f"{where} has half a surrogate pair, or a byte that is no text, at character {error.start + 1}; "
                "expected Unicode"
            ) from None
    return value


def refuse_blank(value: str, where: str) -> str:
    """Return a text. Raise a BadRowError if it is empty or white space."""
    if not value.strip():
        raise BadRowError(f"{where} is blank ({quote(value)}); expected text to learn")
    return value


def refuse_python(value: object, where: str, *, is_text: bool = True) -> None:
    """Raise a BadRowError for the text of a Python object, as `str` writes it into a table.

    Where a text is meant, only the text of turns is refused: it may be written by mistake, and would be learnt.
    """
    if isinstance(value, str) and (_PYTHON_TURNS if is_text else _PYTHON_OBJECT).match(value):
        raise BadRowError(
            f"{where} is {quote(value)}, the text of a Python object; expected JSON, as json.dumps writes it, or a "
            "JSONL file"
        )


def list_in_cell(value: object) -> object:
    """Parse JSON text of a list in a column that never holds text. Return any other value unchanged."""
    return json_in_cell(value) if isinstance(value, str) and value.lstrip().startswith("[") else value


def turns_in_cell(text: str) -> object:
    """Parse a cell of a table without types if it is a JSON list of turns. Return any other text unchanged."""
    value = list_in_cell(text)
    is_turns = isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value)
    return value if is_turns and all(turn.keys() & {"role", "from"} for turn in value) else text  # type: ignore[attr-defined]


def json_in_cell(value: object) -> object:
    """Parse JSON text. Return any other value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def without_nulls(value: object) -> object:
    """Remove the nulls that a table has for absent keys."""
    if isinstance(value, Mapping):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def dump_json(value: object, where: str) -> str:
    """Write a value as JSON text, without the nulls of absent keys.

    Raises:
        BadRowError: JSON cannot represent it, or it holds text that cannot be encoded.
    """
    try:
        return parse_text(json.dumps(without_nulls(value), ensure_ascii=False), where)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, BadRowError):
            raise
        raise BadRowError(f"{where} is {quote(value)}, which JSON cannot represent: {error}") from None


class DuplicateKeyError(ValueError):
    """An object has a key twice. Python's reader would keep the last value in silence."""


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of a JSON document, or raise a DuplicateKeyError."""
    values = dict(pairs)
    if len(values) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise DuplicateKeyError(f"the key {name} is given twice in one object; keep one of the two")
    return values


def refuse_constant(word: str) -> NoReturn:
    """Raise a ValueError for NaN and Infinity, which Python's reader takes."""
    raise ValueError(f"{word} is not a JSON value")
