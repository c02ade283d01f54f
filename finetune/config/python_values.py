"""Read values that a script gives: a dict as settings, and as overrides."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath

from finetune.config.keys import takes_text
from finetune.config.schema import ALLOWED_OBJECT_MODULES
from finetune.config.yaml_reader import SCRIPT, DottedName, Setting
from finetune.errors import ConfigError


def read_dict(values: Mapping[str, object], origin: str, problems: list[str]) -> list[Setting]:
    """Return one setting per leaf, as from a file. `origin` names the dict in messages.

    `problems` receives keys that are not text, and keys that are given both in a section and with dots.
    """

    def unfold(values: Mapping[str, object], above: tuple[str, ...]) -> Iterator[Setting]:
        for name, value in values.items():
            if not isinstance(name, str) or not name:
                problems.append(f"{origin}: {'.'.join((*above, repr(name)))}: a key must be text")
                continue
            key = (*above, name) if above else tuple(name.split("."))  # as in a file, dots split only keys at the top
            if isinstance(value, Mapping) and value:
                yield from unfold(value, key)
            else:
                yield Setting(key=key, value=_plain(value), origin=origin)

    settings = list(unfold(values, ()))
    counts = Counter(setting.dotted for setting in settings)
    problems += [f"{origin}: {key}: given twice. Keep one of the two." for key, n in counts.items() if n > 1]
    return settings


def names_of(arguments: Mapping[str, object]) -> dict[str, str]:
    """Return the names and paths that arguments give, as text.

    Raises:
        ConfigError: one is neither a name nor a path.
    """
    for argument, name in arguments.items():
        if not isinstance(name, (str, os.PathLike)):
            raise ConfigError(f"{argument} is {name!r}; expected a name or a path.")
    return {argument: str(name) for argument, name in arguments.items()}


def overrides_of(values: Mapping[str, object] | Sequence[str]) -> list[str]:
    """Write a dict of dotted keys as overrides: `{"lora.r": 8}` becomes `lora.r=8`. A list of overrides is copied.

    Raises:
        ConfigError: the values are of another type.
    """
    if isinstance(values, str):
        return [values]
    if not isinstance(values, Mapping):
        overrides = list(values) if isinstance(values, Iterable) else [values]
        if others := [each for each in overrides if not isinstance(each, str)]:
            raise ConfigError(f"{SCRIPT} has {others[0]!r}; expected texts such as lora.r=8, or a dict.")
        return overrides
    overrides = []
    for key, value in values.items():
        try:
            plain = _plain(value)
            # Without quotes of its own, text would lose white space and quotes at its ends.
            is_as_read = isinstance(plain, str) and (plain == plain.strip("\"' \t\n") or not takes_text(key))
            if not is_as_read:
                text = json.dumps(plain, ensure_ascii=False)
                plain = text if text.isprintable() else json.dumps(plain)  # YAML refuses some signs that JSON allows
            overrides.append(f"{key}={plain}")
        except TypeError:
            advice = " Give value.tolist()." if hasattr(value, "tolist") else ""  # of numpy or torch
            if any(map(callable, value if isinstance(value, (list, tuple)) else [value])):
                advice = " Name a function by its file: ./rewards.py:NAME."
            expected_types = f"expected text, a number, a list or a dict.{advice}"
            raise ConfigError(f"{SCRIPT}: {key}: is {value!r}; {expected_types}") from None
    return overrides


def _plain(value: object) -> object:
    """Convert a value to the types that YAML gives: lists, text, and the dotted name of a class."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if not isinstance(value, type):
        return value
    kind: type = value
    for module in ALLOWED_OBJECT_MODULES:  # the one that exports the class: torch.optim.AdamW. Nothing is imported.
        if getattr(sys.modules.get(module), kind.__name__, None) is kind:
            return DottedName(f"{module}.{kind.__name__}")
    return DottedName(f"{kind.__module__}.{kind.__qualname__}")
