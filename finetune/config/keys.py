"""List the dotted keys of the schema, and describe the values that each takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from finetune.config.schema import Config, OnResume, RunsCode, Section


@cache
def fields() -> dict[str, FieldInfo]:
    """Map every dotted key that takes a value to its field: `seed`, `training.max_steps`, ..."""
    by_key: dict[str, FieldInfo] = {}
    for name, field in Config.model_fields.items():
        section = section_class(name)
        if section is None:
            by_key[name] = field
        else:
            by_key |= {f"{name}.{key}": inner for key, inner in section.model_fields.items()}
    return by_key


def values(config: Config, *, only_set: bool = False) -> dict[str, Any]:
    """Map every dotted key to its value, in the order of the schema; with `only_set`, only keys that were given one."""
    by_key = {}
    for key in fields():
        section, _, name = key.rpartition(".")
        holder = getattr(config, section) if section else config
        if not only_set or name in holder.model_fields_set:
            by_key[key] = getattr(holder, name)
    return by_key


def on_resume(dotted: str) -> OnResume:
    """Return the mark that says what changing a key does to a resumed run."""
    return next(mark for mark in fields()[dotted].metadata if isinstance(mark, OnResume))


def code_keys() -> dict[str, RunsCode]:
    """Return the marks of all keys that let code of others run, by key."""
    return {key: mark for key, field in fields().items() for mark in field.metadata if isinstance(mark, RunsCode)}


def section_class(name: str) -> type[Section] | None:
    """Return the model of a section, or None if ``name`` is not a section."""
    field = Config.model_fields.get(name)
    annotation = field.annotation if field else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def takes_text(dotted: str) -> bool:
    """Return whether a key takes only text, or text, a list of texts and null."""
    field = fields().get(dotted)
    return field is not None and _is_text(field.annotation)


def takes(dotted: str, kind: type) -> bool:
    """Return whether a key takes values of a type, perhaps among others: bool, list, or dict for free keys."""
    field = fields().get(dotted)
    alternatives = get_args(field.annotation) if field and get_origin(field.annotation) in (Union, UnionType) else ()
    return field is not None and any(kind in (each, get_origin(each)) for each in alternatives or (field.annotation,))


def expected(dotted: str) -> str:
    """Describe the values that a key takes: ``a whole number above 0``."""
    section, _, key = dotted.rpartition(".")
    return _describe((section_class(section) or Config).model_json_schema()["properties"][key])


def did_you_mean(name: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``Did you mean a?`` with the closest choice, or nothing if none is close. `cutoff`: 1 is equal."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    return f"Did you mean {close[0]}?" if close else ""


def did_you_mean_key(dotted: str) -> str:
    """Suggest a key in place of an unknown one, or say what to do instead.

    A renamed key comes first, then a key with the same last part in another section, then the name's meaning in
    the other tools.
    """
    # Long tables that only this message needs.
    from finetune.config.older_spelling import RENAMED
    from finetune.config.other_tools import OUR_NAME

    if dotted in RENAMED:
        return f"Did you mean {RENAMED[dotted]}?"
    section, _, last = dotted.rpartition(".")
    same = [key for key in fields() if key.rpartition(".")[2] == last]
    known = OUR_NAME.get(last) or OUR_NAME.get(f"{section}_{last}")
    if known and (not same or section == known.partition(".")[0]):
        return f"Did you mean {known}?" if known in fields() else known
    return f"Did you mean {' or '.join(same)}?" if same else did_you_mean(dotted, fields())


def _is_text(annotation: object) -> bool:
    members = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    kinds = [kind for kind in members if kind is not NoneType]
    return kinds != [list[str]] and all(
        kind in (str, list[str])
        or (get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)))
        for kind in kinds
    )


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
