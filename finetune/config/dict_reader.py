"""Read a configuration that a script writes as a dict, with Python's own values at its leaves, into settings."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from finetune.config.schema import ALLOWED_OBJECT_MODULES
from finetune.config.yaml_reader import DottedName, Setting


def read_dict(values: Mapping[str, object], origin: str, problems: list[str]) -> list[Setting]:
    """One setting per leaf, as from a file.

    Args:
        values: sections as mappings, or dotted keys.
        origin: of every setting.
        problems: receives keys that are no text, and those given twice: as a section's key and as a dotted one.
    """
    settings = list(_settings(values, (), origin, problems))
    counts = Counter(setting.dotted for setting in settings)
    problems += [f"{origin}: {key}: given twice. Keep one of the two." for key, n in counts.items() if n > 1]
    return settings


def _settings(
    values: Mapping[str, object], above: tuple[str, ...], origin: str, problems: list[str]
) -> Iterator[Setting]:
    """One setting per leaf. As in a file, dots part the keys of the top level only."""
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            problems.append(f"{origin}: {'.'.join((*above, repr(name)))}: a key must be a word")
            continue
        key = (*above, name) if above else tuple(name.split("."))
        if isinstance(value, Mapping) and value:
            yield from _settings(value, key, origin, problems)
        else:
            yield Setting(key=key, value=_plain(value), origin=origin)


def _plain(value: object) -> object:
    """What YAML would have read: lists, text, and the dotted name of a class."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return _dotted_name(value) if isinstance(value, type) else value


def _dotted_name(kind: type) -> DottedName:
    """``torch.optim.AdamW`` for that class, though it is defined in a module below."""
    for module in ALLOWED_OBJECT_MODULES:
        if getattr(sys.modules.get(module), kind.__name__, None) is kind:  # nothing is imported for this
            return DottedName(f"{module}.{kind.__name__}")
    return DottedName(f"{kind.__module__}.{kind.__qualname__}")
