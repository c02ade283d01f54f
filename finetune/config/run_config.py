"""Compose the configuration of a run that exists, from its folder or from its record, for a command on it."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.config.checks import build_config
from finetune.config.compose import compose
from finetune.config.config_files import SAVED_CONFIG, is_address, path_exists
from finetune.config.keys import values
from finetune.config.older_spelling import with_current_keys
from finetune.config.python_values import read_dict
from finetune.config.run_paths import named_paths
from finetune.config.schema import Config, DataSection
from finetune.config.yaml_reader import COMMAND_LINE

_log = logging.getLogger(__name__)


def load_run_config(folder: Path, overrides: Sequence[str] = (), *, loads_model: bool = True) -> Config:
    """Compose the configuration in the folder of a run, which others may have made, for a command on that folder.

    `overrides` change it. If the command does not load the run's model, the keys that let code run are ignored.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    uses = ("model",) if loads_model else ()
    return bound_to_folder(compose(overrides, run=str(folder / SAVED_CONFIG), uses=uses), folder)


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


def config_from_record(values: Mapping[str, object]) -> Config:
    """Build the configuration that a run recorded in run.json, perhaps with the keys of an earlier version.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    problems: list[str] = []
    return build_config(with_current_keys(read_dict(values, "run.json", problems)), problems, complete=False)
