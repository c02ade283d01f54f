"""`finetune config`: show a configuration, its schema, and the configs to choose from."""

from __future__ import annotations

import sys

from finetune.cli.commands import Overrides
from finetune.cli.run_options import JsonOption
from finetune.terminal import fold, print_json, say


def config_show(overrides: Overrides = None, as_json: JsonOption = False) -> None:
    """Print each key with its value and its origin. The configuration need not be complete."""
    from finetune.cli.overrides import config_from_overrides
    from finetune.config.keys import fields
    from finetune.config.render import render_config

    config = config_from_overrides(overrides or [], complete=False)
    if as_json:
        origins = {key: config.origin(key) for key in fields()}
        print_json({"config": config.model_dump(mode="json"), "origins": origins}, indent=None)
    else:
        for line in render_config(config).splitlines():
            value, _, origin = line.rpartition("  # ")
            if value and fold(line, sys.stdout) != line:  # too wide for the terminal
                say(value.rstrip(), indent="    ")
                line = f"    # {origin}"
            say(line, indent="    # ")


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
