"""Say which key may be meant, and which values a key takes, for messages about keys and values that are wrong."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from finetune.config.keys import fields, section_class, takes
from finetune.config.older_spelling import RENAMED
from finetune.config.other_tools import OUR_NAME
from finetune.config.schema import Config


def expected(dotted: str) -> str:
    """Describe the values that a key takes: ``a whole number above 0``."""
    section, _, key = dotted.rpartition(".")
    return _describe((section_class(section) or Config).model_json_schema()["properties"][key])


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``Did you mean a?`` with the closest choice, or nothing if none is close. `cutoff`: 1 is equal."""
    close = closest(name, choices, cutoff)
    return f"Did you mean {close}?" if close else ""


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the choice that is most like a name, or nothing if none is close. `cutoff`: 1 is equal."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)), "")


def did_you_mean_key(dotted: str) -> str:
    """Suggest a key in place of an unknown one, or say what to do instead.

    A renamed key comes first, then a key with the same last part in another section, then the name's meaning in
    the other tools.
    """
    if dotted in RENAMED:
        return f"Did you mean {RENAMED[dotted]}?"
    section, _, last = dotted.rpartition(".")
    same = [key for key in fields() if key.rpartition(".")[2] == last]
    known = OUR_NAME.get(last) or OUR_NAME.get(f"{section}_{last}")
    if known and (not same or section == known.partition(".")[0]):
        return f"Did you mean {known}?" if known in fields() else known
    return f"Did you mean {' or '.join(same)}?" if same else did_you_mean(dotted, fields())


def how_to_write(override: str, before: str, choice: str) -> str:
    """Complete a message about an override without a key.

    `before` is the override before it, and `choice` the override that chooses a file of its name, if there is one.
    """
    if override.startswith("-"):
        name = override.lstrip("-").partition("=")[0]
        return f"there is no such option. A key is set by {name}=VALUE or --{name} VALUE."
    key, _, value = before.partition("=")
    if takes(key, list):
        items = f"{value},{override}".replace(",,", ",").strip("[],")
        return f"expected key=value. Write a list in brackets: '{key}=[{items}]'."
    if choice:
        return f"expected key=value. Did you mean {choice}?"
    return "expected key=value, such as model=phi_tiny or optim.learning_rate=1e-4."


def _describe(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        kinds = [_describe(kind) for kind in schema["anyOf"]]
        wider = [kind.replace("a whole number", "a number") for kind in kinds]  # a number above 0 may be a whole one
        return " or ".join(kind for kind, wide in zip(kinds, wider, strict=True) if kind == wide or wide not in kinds)
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if choices:
        return f"one of {', '.join(choices)}" if len(choices) > 1 else f"'{choices[0]}'"
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _limits(schema)
    if kind == "array":
        return f"a list ([a, b]), each {_describe(schema['items'])}"
    words = {"string": "text", "boolean": "true or false", "null": "null", "object": "keys with values ({a: 1})"}
    return words[str(kind)]


def _limits(schema: Mapping[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']} to {schema['maximum']}"
    words = {
        "minimum": "of at least",
        "exclusiveMinimum": "above",
        "maximum": "of at most",
        "exclusiveMaximum": "and below",
    }
    return "".join(f" {word} {schema[name]}" for name, word in words.items() if name in schema)
