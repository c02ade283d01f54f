"""Read a configuration that a script gives as a dict of Python values into settings."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from finetune.config.schema import ALLOWED_OBJECT_MODULES
from finetune.config.yaml_reader import DottedName, Setting


def read_dict(values: Mapping[str, object], origin: str, problems: list[str]) -> list[Setting]:
    """Return one setting per leaf, as from a file. `origin` names the dict in messages.

    `problems` receives keys that are not text, and keys that are given both in a section and with dots.
    """
    settings = list(_settings(values, (), origin, problems))
    counts = Counter(setting.dotted for setting in settings)
    problems += [f"{origin}: {key}: given twice. Keep one of the two." for key, n in counts.items() if n > 1]
    return settings


def _settings(
    values: Mapping[str, object], above: tuple[str, ...], origin: str, problems: list[str]
) -> Iterator[Setting]:
    """Yield one setting per leaf. As in a file, dots separate the parts of top-level keys only."""
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            problems.append(f"{origin}: {'.'.join((*above, repr(name)))}: a key must be text")
            continue
        key = (*above, name) if above else tuple(name.split("."))
        if isinstance(value, Mapping) and value:
            yield from _settings(value, key, origin, problems)
        else:
            yield Setting(key=key, value=_plain(value), origin=origin)


def _plain(value: object) -> object:
    """Convert a value to the types that YAML gives: lists, text, and the dotted name of a class."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return _dotted_name(value) if isinstance(value, type) else value


def _dotted_name(kind: type) -> DottedName:
    """Name a class by the allowed module that exports it: ``torch.optim.AdamW``."""
    for module in ALLOWED_OBJECT_MODULES:
        if getattr(sys.modules.get(module), kind.__name__, None) is kind:  # nothing is imported for this
            return DottedName(f"{module}.{kind.__name__}")
    return DottedName(f"{kind.__module__}.{kind.__qualname__}")
