"""A configuration that a script writes as a dict: the tree of a run file, with Python's own values at its leaves."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from finetune.config.checks import Tree, build_config, missing_or_contradicting, put
from finetune.config.compose import as_message
from finetune.config.config_files import GROUPS, find_group_file, shown_path
from finetune.config.older_spelling import translate
from finetune.config.schema import ALLOWED_OBJECT_MODULES, Config
from finetune.config.yaml_reader import DottedName, Setting, read_file
from finetune.errors import ConfigError


def config_from_dict(values: Mapping[str, object], origin: str) -> Config:
    """Check a dict like a run file: older keys are read, groups may be chosen by name (`model: phi_tiny`).

    Args:
        values: sections as mappings, or dotted keys (`"optim.learning_rate": 1e-4`).
        origin: where messages say that a value came from.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    problems: list[str] = []
    settings = list(_settings(values, (), origin, problems))
    _report_given_twice(settings, problems)
    written = translate(settings, problems)
    chosen = {setting.dotted: setting for setting in written if _chooses_group(setting)}
    layers = [_read_group(chosen[group], problems) for group in GROUPS if group in chosen]
    layers.append([setting for setting in written if setting.dotted not in chosen])
    is_all_read = not problems
    tree: Tree = {}
    for layer in layers:
        for setting in layer:
            put(tree, setting, problems)
    if is_all_read:  # else what seems to be missing may stand where nothing could be read
        problems += missing_or_contradicting(tree)
    config = build_config(tree, "run", problems)
    if config is None or problems:
        raise ConfigError(as_message(problems))
    return config


def has_section(config: Mapping[str, object] | Config, name: str) -> bool:
    """Whether a section was written at all; a section that is left out has its defaults."""
    if isinstance(config, Config):
        return name in config.model_fields_set
    return any(str(key).partition(".")[0] == name and not isinstance(config[key], str) for key in config)


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


def _report_given_twice(settings: list[Setting], problems: list[str]) -> None:
    """`{"data": {"max_length": 8}, "data.max_length": 9}`: neither of the two is the later one."""
    counts = Counter(setting.dotted for setting in settings)
    origin = settings[0].origin if settings else ""
    problems += [f"{origin}: {key}: given twice. Keep one of the two." for key, n in counts.items() if n > 1]


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


def _chooses_group(setting: Setting) -> bool:
    return setting.dotted in GROUPS and isinstance(setting.value, str) and bool(setting.value)


def _read_group(choice: Setting, problems: list[str]) -> list[Setting]:
    path = find_group_file(choice.dotted, str(choice.value), choice.origin, problems)
    return translate(read_file(path, shown_path(path), problems), problems) if path else []
