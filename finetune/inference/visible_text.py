"""Text of a model or a file as a screen may show it: what would steer a terminal is spelled out."""

from __future__ import annotations

import json
import re
import unicodedata

_KEPT = "\n\t"
_STEERS_READING = frozenset("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that reorder or break what is shown: text could look like another text."""
_NOT_ESCAPED_BY_JSON = re.compile("[\u007f-\u009f\u2028-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""The text with every control character but newline and tab spelled out: ``\x1b``, ``\r``, ``\u202e``."""
    return "".join(_spelled(character) if _is_control(character) else character for character in text)


def json_line(value: object) -> str:
    """A value as JSON on one line, in which no control character stands as itself. What it says is exact."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", line)


def _is_control(character: str) -> bool:
    if character in _KEPT:
        return False
    return character in _STEERS_READING or unicodedata.category(character) in ("Cc", "Cs")


def _spelled(character: str) -> str:
    return repr(character)[1:-1] if ord(character) < 256 else f"\\u{ord(character):04x}"
