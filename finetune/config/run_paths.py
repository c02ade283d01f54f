"""Find the paths that a configuration names, and record them absolutely in run.json. `saved.py` finds them again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from finetune.config.config_files import absolute, path_exists
from finetune.config.keys import values
from finetune.config.schema import Config
from finetune.limits import read_regular

PATH_KEYS = (
    *("output_dir", "model.path", "model.tokenizer", "model.chat_template", "lora.start_from"),
    *("data.path", "data.train", "data.validation", "data.test", "data.chat_template"),
    *("data.keep_prompts", "testing.general_prompts"),
)
_MAY_BE_FOLDER = ("path", "tokenizer", "start_from")
"""Of these keys and of those in a mixture. The others take a file, or a name that is no path and has no suffix."""
_SOURCE = re.compile(r"data\.mixture\[\d+\]")
ITEM = re.compile(r"\[\d+\]$")


def resolved_paths(config: Config) -> dict[str, str]:
    """Return the absolute path, by key, of each file and folder that the configuration names by a relative path.

    Paths that do not exist on this machine are left out, except `output_dir`.
    """
    paths = {"output_dir": absolute(config.output_dir)}
    for key, path in named_paths(config):
        name = ITEM.sub("", key).rpartition(".")[2]
        if absolute(path) != path and path_exists(path, is_file=name not in _MAY_BE_FOLDER):
            paths[key] = absolute(path)
    return paths


def named_paths(config: Config) -> list[tuple[str, str]]:
    """Return the key and the text of everything that the configuration names by a path, an address or a hub id."""
    paths: list[tuple[str, str]] = []

    def record(key: str, path: str) -> str:
        paths.append((key, path))
        return path

    for key, value in values(config).items():
        change_paths(key, value, record)
    return paths


def recorded_paths(folder: Path) -> dict[str, str]:
    """Return the result of `resolved_paths` in a run's folder; empty if it has none that can be read."""
    try:
        record = json.loads(read_regular(folder / "run.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    paths = record.get("resolved_paths") if isinstance(record, dict) else None
    return {key: path for key, path in paths.items() if isinstance(path, str)} if isinstance(paths, dict) else {}


def change_paths(key: str, value: object, change: Callable[[str, str], str]) -> object:
    """Call a function with each path in the value of a key, and return the value with its results."""
    if isinstance(value, list) and (key == "data.mixture" or _SOURCE.sub("data", key) in PATH_KEYS):
        return [change_paths(f"{key}[{number}]", source, change) for number, source in enumerate(value)]
    if isinstance(value, Mapping) and _SOURCE.fullmatch(key):
        return {name: change_paths(f"{key}.{name}", inner, change) for name, inner in value.items()}
    is_path = ITEM.sub("", _SOURCE.sub("data", key)) in PATH_KEYS
    return change(key, value) if isinstance(value, str) and is_path else value
