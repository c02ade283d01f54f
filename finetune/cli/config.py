"""`finetune config`: show a configuration, its schema, and the configs to choose from."""

from __future__ import annotations

import sys

from finetune.cli.commands import Overrides
from finetune.cli.run_options import JsonOption
from finetune.terminal import fold, print_json, say

_MAX_ALIGNED = 60
"""The comments of lines up to this length are aligned; a longer line is followed by its comment at once."""


def config_show(overrides: Overrides = None, as_json: JsonOption = False) -> None:
    """Print each key with its value and its origin. The configuration need not be complete."""
    from finetune.cli.overrides import config_from_overrides
    from finetune.config.keys import fields
    from finetune.config.render import yaml_lines

    config = config_from_overrides(overrides or [], complete=False)
    if as_json:
        origins = {key: config.origin(key) for key in fields()}
        print_json({"config": config.model_dump(mode="json"), "origins": origins}, indent=None)
    else:
        lines = list(yaml_lines(config.model_dump()))
        column = max(len(line) for line, _ in lines if len(line) <= _MAX_ALIGNED)
        for line, key in lines:
            comment = f"  # {config.origin(key)}" if key else ""
            text = line.ljust(column) + comment if key else line
            if key and fold(text, sys.stdout) != text:  # too wide for the terminal
                say(line, indent="    ")
                text = f"  {comment}"
            say(text, indent="    # ")


def config_schema() -> None:
    """Print the JSON Schema of a config file."""
    from finetune.config.render import json_schema

    print_json(json_schema())


def config_list(as_json: JsonOption = False) -> None:
    """List the shipped configs and those in ./configs by group, and the models by family."""
    from finetune.config.listing import list_configs, list_model_families

    if as_json:
        print_json({group: dict(entries) for group, entries in list_configs().items()}, indent=None)
        return
    families = list_model_families()
    for group, entries in list_configs().items():
        for family, listed in families.items() if group == "model" else [("", entries)]:
            say(f"{group}: {family}".rstrip())
            for name, description in listed:
                say(f"  {name:<20} {description}", indent=" " * 23)
