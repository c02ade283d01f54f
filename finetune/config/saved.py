"""Read the configuration that a run saved, in today's spelling, and find its relative paths again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from finetune.config.config_files import SAVED_CONFIG, absolute, path_exists, shown_path
from finetune.config.keys import values
from finetune.config.run_paths import ITEM, PATH_KEYS, change_paths, recorded_paths
from finetune.config.schema import Config
from finetune.config.yaml_reader import Setting, read_settings
from finetune.logs import warn_once

_KEPT_ON_RESUME = ("data.split_rule", "data.validation")
"""Keys whose default has changed. A resumed run uses the value that it recorded, unless the user sets another."""
_log = logging.getLogger(__name__)


def read_saved(path: Path, problems: list[str]) -> list[Setting]:
    """Read the settings that a run saved, with today's keys."""
    settings = read_settings(path, shown_path(path), problems)
    # Each line is a key. A line that was cut must not be read as a shorter value, nor a lost one as the default.
    is_run = path_exists(str(path.with_name("run.json")), is_file=True)
    if is_run and not (settings and path.read_bytes().endswith(b"\n")):
        problems.append(f"{shown_path(path)}: the file of this run is empty or cut short. Restore it from a copy.")
    if not settings:  # a new run
        return []
    from finetune.config.older_spelling import with_current_keys

    return with_current_keys(settings)


def as_recorded(config: Config) -> Config:
    """Give a run that may be resumed the values of `_KEPT_ON_RESUME` that it recorded, and the paths that it found."""
    folder = Path(absolute(config.output_dir))
    saved = read_saved(folder / SAVED_CONFIG, [])  # empty if there is no run yet
    given = values(config)
    kept = {
        setting.dotted: (located.value, setting.origin)
        for setting, located in zip(saved, find_again(saved, folder), strict=True)
        if (setting.dotted in _KEPT_ON_RESUME and config.origin(setting.dotted) == "default")
        or (located.value != setting.value == given.get(setting.dotted))
    }
    for key, (value, _) in kept.items():
        asked = given.get(key)
        if isinstance(asked, str) and value != asked and config.origin(key) != "default" and path_exists(asked):
            warn_once(
                _log,
                f"{key}: the run goes on with {value}, from which it was started, and not with {asked} in "
                f"{Path.cwd()}. An absolute path names the other.",
            )
    return config.with_values(kept)


def find_again(settings: Iterable[Setting], folder: Path) -> list[Setting]:
    """Replace the relative paths that a run saved in its folder by the recorded ones, where they are not the same."""
    recorded = recorded_paths(folder)
    if recorded.get("output_dir") != absolute(folder):
        recorded.pop("output_dir", None)  # the folder was moved or copied

    def find(key: str, path: str) -> str:
        return _find(key, path, recorded[key]) if key in recorded else path

    return [replace(setting, value=change_paths(setting.dotted, setting.value, find)) for setting in settings]


def is_same_path(key: str, both: Sequence[object], recorded: Mapping[str, str]) -> bool:
    """Return whether two values of a key name the same place, given the recorded paths of the first one's run."""
    before, now = both
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(is_same_path(f"{key}[{k}]", pair, recorded) for k, pair in enumerate(zip(before, now, strict=True)))
    if ITEM.sub("", key) not in PATH_KEYS or not isinstance(before, str) or not isinstance(now, str):
        return False
    return recorded.get(key, before) == absolute(now)


def _find(key: str, path: str, recorded: str) -> str:
    if path_exists(recorded):
        return path if absolute(path) == recorded else recorded
    if absolute(path) != recorded and path_exists(path):
        warn_once(_log, f"{key}: {recorded}, which the run used, is gone; {path} in {Path.cwd()} is used")
        return path
    return recorded  # not the relative path, which might be taken for the id of a repository at the hub
