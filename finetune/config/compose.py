"""Compose a run's configuration from files and overrides, or from a dict.

Each of these wins over the ones before it: the schema's defaults; group files that the caller or the run file chooses;
the run file's own keys; group files that overrides choose; overrides of single keys. So a run file may choose a group
and change one of its keys, and `model=phi4` on the command line still wins over the model of the run file. If two group
files set one key, the later of model, data, task, parallel wins. Mappings are merged key by key, and `{}` empties one.
Lists are replaced.

Every file is a fragment of the whole tree. A run file may also choose groups by name (`model: phi_tiny`) and then set
single keys of that section with dots (`model.revision: main`).

In overrides and in run files, `model` and `data` also take a path or a hub id: `data=chats.jsonl` sets `data.path`. A
path has the precedence of a group file in its place, but it wins over all group files beside it.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from finetune.config.checks import build_config, refuse_code_of_files
from finetune.config.config_files import (
    GROUPS,
    RUN_FILES,
    SAVED_CONFIG,
    SHIPPED_PREFIX,
    files_in,
    find_file,
    is_file_of_rows,
    is_path,
    is_run_file,
    local_path,
    override_like,
    shown_path,
)
from finetune.config.keys import fields, section_class, takes, takes_text
from finetune.config.schema import Config, as_list
from finetune.config.yaml_reader import COMMAND_LINE, MAX_FILE_BYTES, SCRIPT, Setting, read_settings, read_value
from finetune.errors import ConfigError
from finetune.limits import read_regular
from finetune.units import name_first

DEFAULT_TASK = "finetune_lora"
"""The task when a command names neither a task nor a run file. A run file names its own task."""

_CURRENT_WITH_OLDER_VALUES = ("data.mixture", "parallel.master_port")
"""Current keys of which some values have an older spelling."""


def load_config(
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    run: str | Path | None = None,
    model: str | Path | None = None,
    data: str | Path | None = None,
    task: str | Path | None = None,
) -> Config:
    """Compose the complete configuration of a run from overrides, and check it.

    Args:
        overrides: `a.b=c`, `model=`, `data=`, `task=`, `parallel=`, `run=`, or a file of rows, as in ``sys.argv[1:]``.
            Flags are read too: `--lora.r 8`. A dict is as for `finetune.train`.
        run: a run file, by name in configs/ or by path; `run=` may give it instead.
        model: the name, path or hub id to use if neither the overrides nor the run file choose a model.
        data: the name, path or hub id of the data, used under the same condition.
        task: the name of the task, used under the same condition.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    named: Any = {key: name for key, name in (("run", run), ("model", model), ("data", data), ("task", task)) if name}
    if not (isinstance(overrides, list) and all(isinstance(each, str) for each in (*overrides, *named.values()))):
        from finetune.config.python_values import names_of, overrides_of

        overrides, named = overrides_of(overrides), names_of(named)
    origin = COMMAND_LINE if set(overrides) <= set(sys.argv) else SCRIPT
    return compose(overrides, run=named.pop("run", None), defaults=named, origin=origin)


def compose(
    overrides: Sequence[str],
    *,
    run: str | None = None,
    defaults: Mapping[str, str] | None = None,
    complete: bool = True,
    needs_data: bool = True,
    typed: str = "",
    uses: Collection[str] = ("model", "training"),
    translated: Sequence[Setting] = (),
    origin: str = COMMAND_LINE,
) -> Config:
    """Merge files and overrides, check the whole, and remember where each value came from.

    Args:
        overrides: as for `load_config`.
        run: a run file, by name in configs/ or by path.
        defaults: what to choose for a group if neither the overrides nor the run file do.
        complete: also require a model and data, without which there is no run, and refuse code that a file allows. If
            false, the configuration is only shown.
        needs_data: False: require only a model, as `finetune plan` does.
        typed: the whole command, for messages that complete it.
        uses: what the command follows of the keys that let code run, see `refuse_code_of_files`.
        translated: the settings of another tool's file, which take the place of a run file's.
        origin: what messages call the overrides, `COMMAND_LINE` or `SCRIPT`.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    problems: list[str] = []
    asked = _read_overrides(overrides, run, problems, origin)
    from_run = _with_groups(_read(RUN_FILES, asked.run, problems) if asked.run else list(translated))
    if asked.run and not from_run.groups:
        _refuse_file_of_other_tool(asked.run.name, from_run.settings)
    chosen = {name: _Choice(value, "chosen by the caller") for name, value in (defaults or {}).items()}
    chosen |= from_run.groups
    replaceable = {group: choice for group, choice in chosen.items() if group not in asked.groups}
    layers = [
        *_read_groups(replaceable, problems),
        from_run.settings,
        *_read_groups(asked.groups, problems),
        _translate_older(asked.settings, problems),
    ]
    config = build_config(chain(*layers), problems, complete=complete, needs_data=needs_data, typed=typed)
    task = (chosen | asked.groups).get("task")
    if complete and task is not None and task.name.endswith("new_tokens") and not config.lora.new_tokens:
        example = "lora.new_tokens=['<order>', '</order>']"
        raise ConfigError(f'task={task.name} ({task.place}): name the tokens, for example "{example}".')
    if config.origin("output_dir") == "default":
        name = Path(asked.run.name).stem if asked.run else _default_name(config, chosen | asked.groups)
        config = config.model_copy(update={"output_dir": f"runs/{name}"})
    return _with_recorded(refuse_code_of_files(config, uses) if complete else config)


def _refuse_file_of_other_tool(name: str, settings: Sequence[Setting]) -> None:
    """Refuse a run file with several names of another tool and no key of ours, and say how to translate it."""
    if any("." in setting.dotted and _chooses_or_sets(setting.dotted) for setting in settings if not setting.older_key):
        return
    unknown = [setting.dotted for setting in settings if not _chooses_or_sets(setting.dotted)]
    if len(theirs := [key for key in unknown if _is_known(key)]) >= 3:
        raise ConfigError(
            f"run={name}: holds settings of another tool ({', '.join(theirs[:3])}, …). Translate the file with: "
            f"finetune init --from {name} --file FILE.yaml"
        )


def _refuse_json_of_other_tool(name: str) -> None:
    """Refuse a file of rows that is one object with settings of another tool."""
    try:
        value = json.loads(read_regular(local_path(name), most=MAX_FILE_BYTES, follows_links=True))
    except (OSError, ValueError, RecursionError):
        return  # a large file, or several rows; reading the rows says what is wrong with it
    from finetune.config.other_tools import settings_among

    if isinstance(value, dict) and (settings := settings_among(value)):
        raise ConfigError(
            f"{name}: holds settings of another tool ({name_first(settings, 3)}), and no rows. Translate the file "
            f"with: finetune init --from {shlex.quote(name)} --file FILE.yaml"
        )


def _default_name(config: Config, groups: Mapping[str, _Choice]) -> str:
    """Name a run after its data and its model, as they were chosen: `chats-phi4_mini`."""
    files = "mixture" if config.data.mixture else next(iter(as_list(config.data.path or config.data.train)), "")
    names = {"data": files, "model": config.model.path or str((config.model.config or {}).get("model_type", ""))}
    for group, choice in groups.items():
        if group in names and not is_path(group, choice.name):
            names[group] = choice.name
    last_parts = (PurePath(name.removeprefix(SHIPPED_PREFIX).split("?")[0]).name for name in names.values())
    parts = (re.sub(r"(\.(jsonl?|csv|tsv|parquet|gz|zst|bz2|xz|ya?ml))+$|[^\w.-]+", "", part) for part in last_parts)
    return "-".join(filter(None, parts)) or "run"


def config_from_dict(values: Mapping[str, object], origin: str) -> Config:
    """Build a configuration from a dict, which may hold all that a run file may: sections, dotted keys and older ones.

    Groups may be chosen by name (`model: phi_tiny`). `origin` names the dict in messages.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    from finetune.config.python_values import read_dict

    problems: list[str] = []
    asked = _with_groups(_translate_older(read_dict(values, origin, problems), problems))
    config = build_config(chain(*_read_groups(asked.groups, problems), asked.settings), problems)
    return _with_recorded(refuse_code_of_files(config, ("model", "training"), trusted=origin))


def _with_recorded(config: Config) -> Config:
    """Give a run that may be resumed what it recorded."""
    if config.resume != "auto":
        return config
    from finetune.config.saved import as_recorded

    return as_recorded(config)


def _translate_older(settings: list[Setting], problems: list[str]) -> list[Setting]:
    """Translate the older spellings in the settings of one file or of the command line, if there are any."""
    current = {*GROUPS, *fields()}.difference(_CURRENT_WITH_OLDER_VALUES)
    if all(".".join(setting.key[:2]) in current for setting in settings):
        return settings
    from finetune.config.older_spelling import translate  # a long table that other keys need

    return translate(settings, problems)


@dataclass(frozen=True)
class _Choice:
    """The name of a chosen file, or the path in its place, and the place of the choice."""

    name: str
    place: str


@dataclass
class _Asked:
    """The files that the command line or a run file chooses, and the keys that it sets."""

    run: _Choice | None = None
    groups: dict[str, _Choice] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)


def as_overrides(arguments: Sequence[str], own_options: Collection[str] = ()) -> list[str]:
    """Write flags as overrides: `--optim.learning-rate 1e-4` becomes `optim.learning_rate=1e-4`.

    A flag takes the next argument as its value unless that argument is an option too, so `-1` is a value. Without a
    value, the flag of a boolean key means true, `--resume` means auto, and any other flag becomes `key=`, which
    `compose` refuses. `--resume` takes no override and no file as its value. `--no-KEY` means false, and
    `--config FILE` names the run file. `own_options`, and what looks like a misspelt one of them, stay as they are.
    """
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, equals, value = argument.partition("=")
        key = RUN_FILES if option == "--config" else option.removeprefix("--").replace("-", "_")
        dashed = f"--{key.replace('_', '-')}"
        if argument == "--":  # what follows is meant literally
            return [*overrides, argument, *rest]
        if not option.startswith("--"):
            overrides.append(argument)
        elif dashed in own_options or _resembles(dashed, key, own_options):
            overrides.append(f"{dashed}{equals}{value}")
        elif equals:
            overrides.append(f"{key}={value}")
        elif key.startswith("no_") and takes(key.removeprefix("no_"), bool):
            overrides.append(f"{key.removeprefix('no_')}=false")
        elif takes(key, bool):
            overrides.append(f"{key}={rest.pop(0) if rest and _BOOLEAN.fullmatch(rest[0]) else 'true'}")
        else:
            has_value = bool(rest) and not rest[0].startswith("--") and rest[0] not in own_options
            has_value = has_value and not (key in _WITHOUT_VALUE and _is_own_argument(rest[0]))
            overrides.append(f"{key}={rest.pop(0) if has_value else _WITHOUT_VALUE.get(key, '')}")
    return overrides


def _resembles(option: str, key: str, own_options: Collection[str]) -> bool:
    """Return whether an option that sets no key may be a misspelt option of a command."""
    if _is_known(key):
        return False
    from finetune.config.key_advice import did_you_mean

    return bool(did_you_mean(option, own_options))


def _is_own_argument(argument: str) -> bool:
    """Return whether an argument is an override, a run file or a file of rows, and so not the value of a flag."""
    key, equals, _ = argument.partition("=")
    return bool(equals and _chooses_or_sets(key)) or is_run_file(argument) or is_file_of_rows(argument)


_WITHOUT_VALUE = {"resume": "auto"}  # what flags mean that have no value
_BOOLEAN = re.compile("(?i)true|false|yes|no|on|off|null|auto|[01]")


def _chooses_or_sets(key: str) -> bool:
    """Return whether a name chooses a file or is a key or a section."""
    return key in (RUN_FILES, *GROUPS) or key in fields() or section_class(key.partition(".")[0]) is not None


def _is_known(key: str) -> bool:
    """Return whether the name of a flag is ours or another tool's: no misspelt option of a command."""
    from finetune.config.other_tools import OUR_NAME  # a long table, which only flags need

    return _chooses_or_sets(key) or key in OUR_NAME


def _read_overrides(overrides: Sequence[str], run: str | None, problems: list[str], origin: str) -> _Asked:
    asked = _Asked(run=_Choice(run, origin) if run else None)
    before = ""
    for override in _with_keys(as_overrides(overrides), problems, origin):
        key, equals, value = override.partition("=") if not is_run_file(override) else (RUN_FILES, "=", override)
        key = key.strip()
        if not equals or not key or key.startswith("-"):
            from finetune.config.key_advice import how_to_write

            problems.append(f"{origin}: {override}: {how_to_write(override, before, override_like(override))}")
        elif not value.strip():
            from finetune.config.key_advice import did_you_mean_key, expected

            hint = f"Write {key}=VALUE.{f' It takes {expected(key)}.' if key in fields() else ''}"
            if not _chooses_or_sets(key):
                hint = f"There is no such key. {did_you_mean_key(key)}"
            problems.append(f"{origin}: {key}: has no value. {hint}".rstrip())
        elif key == "run" and asked.run and asked.run.name != value:
            problems.append(f"{origin}: run={value}: the run file is already {asked.run.name}. Keep one.")
        elif key == "run":
            asked.run = _Choice(value, origin)
        elif key in GROUPS:
            asked.groups[key] = _Choice(value, origin)
        else:
            asked.settings += read_value(key.split("."), value, problems, as_text=takes_text(key), origin=origin)
        before = override if equals else f"{before},{override}"
    return asked


def _with_keys(overrides: Sequence[str], problems: list[str], origin: str) -> list[str]:
    """Write files of rows as `data=FILE` or a list, and refuse a second choice of the data, which would win unseen."""
    files = [override for override in overrides if "=" not in override and is_file_of_rows(override)]
    others = [override for override in overrides if override.startswith("data=")]
    if files and others:
        several = " and ".join(files + others)
        problems.append(f"{origin}: {several}: choose the data once. For several sources write data.mixture=[…].")
    if not files:
        return list(overrides)
    if len(files) == 1 and files[0].endswith(".json"):
        _refuse_json_of_other_tool(files[0])
    data = files_in(files[0]) if len(files) == 1 else json.dumps(files, ensure_ascii=False)  # a shell expands *.jsonl
    return [f"data={data}", *(override for override in overrides if override not in files)]


def _read_groups(choices: Mapping[str, _Choice], problems: list[str]) -> list[list[Setting]]:
    """Read the chosen files in the order of `GROUPS`, then the paths in place of one."""
    in_order = sorted(choices, key=lambda group: (is_path(group, choices[group].name), GROUPS.index(group)))
    return [_read(group, choices[group], problems) for group in in_order]


def _read(group: str, choice: _Choice, problems: list[str]) -> list[Setting]:
    """Read the settings of a chosen file in today's spelling, or set the section's path."""
    if is_path(group, choice.name):
        origin = f"{choice.place}: {group}={choice.name}"
        if group == "data" and (files := files_in(choice.name)).startswith("["):
            return [replace(it, origin=origin) for it in read_value((group, "path"), files, [], as_text=True)]
        return [Setting(key=(group, "path"), value=choice.name, origin=origin)]
    path = find_file(group, choice.name, choice.place, problems)
    if path is None:
        return []
    if path.name == SAVED_CONFIG:
        from finetune.config.saved import find_again, read_saved

        return _translate_older(find_again(read_saved(path, problems), path.parent), problems)
    return _translate_older(read_settings(path, shown_path(path), problems), problems)


def _with_groups(settings: list[Setting]) -> _Asked:
    """Separate the settings of a run file or a dict from those that choose groups by name."""
    asked = _Asked()
    for setting in settings:
        name = setting.value if isinstance(setting.value, str) else setting.text
        if setting.dotted == "data" and isinstance(setting.value, list):
            asked.settings.append(replace(setting, key=("data", "path")))
        elif setting.dotted in GROUPS and setting.value is not None and name:
            asked.groups[setting.dotted] = _Choice(name, setting.origin)
        else:
            asked.settings.append(setting)
    return asked
