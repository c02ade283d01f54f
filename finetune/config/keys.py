"""List the dotted keys of the schema, their values in a configuration, and the types that each takes."""

from __future__ import annotations

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


def _is_text(annotation: object) -> bool:
    members = get_args(annotation) if NoneType in get_args(annotation) else (annotation,)
    kinds = [kind for kind in members if kind is not NoneType]
    return kinds != [list[str]] and all(
        kind in (str, list[str])
        or (get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind)))
        for kind in kinds
    )
