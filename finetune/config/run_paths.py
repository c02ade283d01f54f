"""Record the paths of a run absolutely in its run.json, and find them again from any folder."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from finetune.config.config_files import absolute, path_exists
from finetune.config.keys import values
from finetune.config.schema import Config
from finetune.config.yaml_reader import Setting
from finetune.limits import read_regular
from finetune.logs import warn_once

_KEYS = (
    *("output_dir", "model.path", "model.tokenizer", "model.chat_template", "lora.start_from"),
    *("data.path", "data.train", "data.validation", "data.test", "data.chat_template"),
    *("data.keep_prompts", "testing.general_prompts"),
)
_MAY_BE_FOLDER = ("path", "tokenizer", "start_from")
"""Of these keys and of those in a mixture. The others take a file, or a name that is no path and has no suffix."""
_SOURCE = re.compile(r"data\.mixture\[\d+\]")
_ITEM = re.compile(r"\[\d+\]$")
_log = logging.getLogger(__name__)


def resolved_paths(config: Config) -> dict[str, str]:
    """Return the absolute path, by key, of each file and folder that the configuration names by a relative path.

    Paths that do not exist on this machine are left out, except `output_dir`.
    """
    paths = {"output_dir": absolute(config.output_dir)}
    for key, path in named_paths(config):
        name = _ITEM.sub("", key).rpartition(".")[2]
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
        _change(key, value, record)
    return paths


def recorded_paths(folder: Path) -> dict[str, str]:
    """Return the result of `resolved_paths` in a run's folder; empty if it has none that can be read."""
    try:
        record = json.loads(read_regular(folder / "run.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    paths = record.get("resolved_paths") if isinstance(record, dict) else None
    return {key: path for key, path in paths.items() if isinstance(path, str)} if isinstance(paths, dict) else {}


def find_again(settings: Iterable[Setting], folder: Path) -> list[Setting]:
    """Replace the relative paths that a run saved in its folder by the recorded ones, where they are not the same."""
    recorded = recorded_paths(folder)
    if recorded.get("output_dir") != absolute(folder):
        recorded.pop("output_dir", None)  # the folder was moved or copied

    def find(key: str, path: str) -> str:
        return _find(key, path, recorded[key]) if key in recorded else path

    return [replace(setting, value=_change(setting.dotted, setting.value, find)) for setting in settings]


def is_same_path(key: str, both: Sequence[object], recorded: Mapping[str, str]) -> bool:
    """Return whether two values of a key name the same place, given the recorded paths of the first one's run."""
    before, now = both
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(is_same_path(f"{key}[{k}]", pair, recorded) for k, pair in enumerate(zip(before, now, strict=True)))
    if _ITEM.sub("", key) not in _KEYS or not isinstance(before, str) or not isinstance(now, str):
        return False
    return recorded.get(key, before) == absolute(now)


def _find(key: str, path: str, recorded: str) -> str:
    if path_exists(recorded):
        return path if absolute(path) == recorded else recorded
    if absolute(path) != recorded and path_exists(path):
        warn_once(_log, f"{key}: {recorded}, which the run used, is gone; {path} in {Path.cwd()} is used")
        return path
    return recorded  # not the relative path, which might be taken for the id of a repository at the hub


def _change(key: str, value: object, change: Callable[[str, str], str]) -> object:
    """Call a function with each path in the value of a key, and return the value with its results."""
    if isinstance(value, list) and (key == "data.mixture" or _SOURCE.sub("data", key) in _KEYS):
        return [_change(f"{key}[{number}]", source, change) for number, source in enumerate(value)]
    if isinstance(value, Mapping) and _SOURCE.fullmatch(key):
        return {name: _change(f"{key}.{name}", inner, change) for name, inner in value.items()}
    is_path = _ITEM.sub("", _SOURCE.sub("data", key)) in _KEYS
    return change(key, value) if isinstance(value, str) and is_path else value
