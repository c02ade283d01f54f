"""Refuse what a configuration that others may have written asks for: code of theirs, and addresses to read."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Collection
from pathlib import Path

from finetune.config.config_files import is_address, path_exists
from finetune.config.keys import code_keys, values
from finetune.config.run_paths import named_paths
from finetune.config.schema import Config, DataSection
from finetune.config.yaml_reader import COMMAND_LINE
from finetune.errors import ConfigError
from finetune.logs import warn_once

_log = logging.getLogger(__name__)


def refuse_code_of_files(config: Config, needed_by: Collection[str], *, trusted: str = COMMAND_LINE) -> Config:
    """Refuse the keys marked with `RunsCode` that a file sets. Return the configuration with unneeded keys reset.

    Args:
        config: a configuration with the origin of each value.
        needed_by: the `needed_by` of the keys that this command follows. It ignores the others.
        trusted: the origin of keys that count beside the command line: a recipe's own code.

    Raises:
        ConfigError: names the key, its place and the argument to add.
    """
    given = values(config)
    ignored: dict[str, tuple[object, str]] = {}
    for key, mark in code_keys().items():
        value, origin = given[key], config.origin(key)
        text = ",".join(value) if isinstance(value, list) else json.dumps(value)
        if value and mark.needed_by in needed_by and origin in (COMMAND_LINE, trusted):
            warn_once(_log, f"{key}={text} ({origin}): {mark.code} will run here")
        elif value and mark.needed_by in needed_by:
            raise ConfigError(
                f"{key} is {text} ({origin}): {mark.code} would run here, so only the command line may allow it. If "
                f"you trust it, add {'' if 'training' in needed_by else '--set '}{shlex.quote(f'{key}={text}')} to the "
                "command."
            )
        elif value:
            ignored[key] = (type(value)(), "default")
    return config.with_values(ignored)


def bound_to_folder(config: Config, folder: Path) -> Config:
    """Return the configuration of a run for a command that is given the run's folder, which others may have made.

    The command writes only into the folder and into its own cache. It reads local files that the configuration names,
    and logs their names. An address in the configuration is refused when the command would read it.
    """
    typed = {key for key in values(config) if config.origin(key).startswith(COMMAND_LINE)}
    local = []
    for name, path in named_paths(config):
        key = name.partition("[")[0]
        if key in typed or key == "output_dir":
            continue
        if is_address(path):
            value = values(config)[key]
            argument = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            config.data.mark_untrusted(
                path,
                f"{name} is {path} ({config.origin(key)}): an address that only the folder of a run names is not read, "
                f"because others may have written it. If you trust it, add --set {shlex.quote(argument)} to the "
                "command.",
            )
        elif path_exists(path):
            local.append(f"{name}={path}")
    if local:
        _log.info("files that the configuration in %s names: %s", folder, ", ".join(local))
    if "data.cache_dir" not in typed:  # it holds compiled kernels, which are code
        config = config.with_values({"data.cache_dir": (DataSection().cache_dir, "default")})
    return config.model_copy(update={"output_dir": str(folder)})
