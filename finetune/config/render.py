"""Write a config as YAML, with or without the origin of each value, and its schema for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from types import NoneType
from typing import Any

import yaml

from finetune.config.config_files import GROUPS, PATH_INSTEAD
from finetune.config.keys import fields, section_class
from finetune.config.schema import ALIASES, Config
from finetune.config.yaml_reader import PLAIN_VALUES, DottedName

SCHEMA_FILE = "config.schema.json"
"""The JSON Schema that is written beside each config. Editors find it by `SCHEMA_LINE`."""
SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA_FILE}"
TRAIN_WITH = "# Train it with: finetune train "
"""Begins the first line of a run file. The path of the file follows, and the overrides that a file may not have."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer, which also quotes text that `PLAIN_VALUES` would read as another type."""


for _tag, (_pattern, _first_characters) in PLAIN_VALUES.items():
    _Dumper.add_implicit_resolver(_tag, _pattern, _first_characters)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if len(text.splitlines()) > 1 or text != text.strip() else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(DottedName, lambda dumper, name: dumper.represent_scalar("!pyobject", str(name)))


def resolved_yaml(config: Config) -> str:
    """Write every key with its value, as in a run's config.yaml. As a run file, the text gives an equal config."""
    return "".join(f"{line}\n" for line, _ in yaml_lines(config.model_dump()))


def json_schema() -> dict[str, Any]:
    """Build a JSON Schema of config files: sections, dotted keys at the top, groups by name. Nothing is required."""
    schema = Config.model_json_schema()
    properties = schema["properties"]
    for dotted in fields():
        section, _, key = dotted.rpartition(".")
        model = section_class(section)
        if model is not None:
            properties[dotted] = {"$ref": f"#/$defs/{model.__name__}/properties/{key}"}
    for alias, key in ALIASES.items():
        properties[alias] = properties[key]
    for group in GROUPS:
        or_path = ", or is a path or a hub id" if group in PATH_INSTEAD else ""
        meaning = f"Chooses configs/{group}/NAME.yaml{or_path}; in a run file only."
        by_name = {"type": "string", "description": meaning}
        properties[group] = {"anyOf": [by_name, properties[group]]} if group in properties else by_name
    names = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "urn:finetune:config-schema"}
    return {**names, **schema, "title": "A config file of finetune: a run file, or a file of a group"}


@cache
def schema_text() -> str:
    """Return the text of `SCHEMA_FILE`."""
    return json.dumps(json_schema()) + "\n"


def yaml_lines(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Yield each line of the YAML text with the dotted key of its value (empty if it opens a mapping)."""
    for name, value in values.items():
        key = (*above, name)
        start = f"{'  ' * len(above)}{inline_yaml(name)}:"
        if isinstance(value, Mapping) and value:
            yield start, ""
            yield from yaml_lines(value, key)
        else:
            yield f"{start} {inline_yaml(value)}", ".".join(key)


def inline_yaml(value: object) -> str:
    """Write a value as YAML in one line."""
    return _dump_scalar(value) if isinstance(value, (str, float, int, bool, NoneType)) else _dump(value)


def _dump(value: object) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


_dump_scalar = lru_cache(1024, typed=True)(_dump)
"""A configuration has many equal values, and PyYAML is slow."""
