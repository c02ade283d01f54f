"""Combine settings, and check them against the schema. `problems.py` describes what is wrong.

`refuse_code_of_files` refuses what a configuration that others may have written asks for.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from finetune.config.keys import code_keys, fields, section_class, takes_text, values
from finetune.config.schema import AUTO_VALIDATION, Config, RunsCode, is_allowed_object, refused_object
from finetune.config.yaml_reader import OVERRIDES, DottedName, Setting, Settings, find_setting
from finetune.errors import ConfigError
from finetune.logs import warn_once
from finetune.terminal import without_passwords

_TEXTS_WITH_ADDRESSES = ("model.chat_template", "reward.pattern", "rollout.tool_schemas")
"""Keys that take a text in which an address is not used to log in anywhere."""
_log = logging.getLogger(__name__)


def build_config(
    settings: Iterable[Setting], problems: list[str], *, complete: bool = True, needs_data: bool = True, typed: str = ""
) -> Config:
    """Set keys one after the other, check the result against the schema, and freeze it.

    The later of two settings for one key counts. `problems` were found while the settings were read. For the other
    arguments see `compose`.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    chosen: Settings = {}
    for setting in settings:
        _put(chosen, setting, problems)
    if complete and not problems:  # otherwise a missing key may be misspelt, or in a part that was not read
        problems += _missing(chosen, typed, needs_data=needs_data) + _contradicting(chosen)
    config = _validated(chosen, problems)
    if config is None or problems:
        from finetune.config.problems import joined_problems

        raise ConfigError(joined_problems(problems))
    is_default = config.data.validation == AUTO_VALIDATION and config.origin("data.validation") == "default"
    if is_default and config.objective.generates_answers:  # each validation generates answers
        config = config.with_values({"data.validation": (None, "default")})
    return config


def _put(chosen: Settings, setting: Setting, problems: list[str]) -> None:
    """Set one key in place of those above and below it, or append to ``problems`` why it cannot be set."""
    of_address = password_problem(setting.value) if setting.dotted not in _TEXTS_WITH_ADDRESSES else ""
    if problem := _key_problem(setting) or _name_problem(setting.value) or of_address:
        from finetune.config.problems import problem_line

        problems.append(problem_line(setting, problem))
        return
    if setting.dotted not in fields() and section_class(setting.dotted):
        return  # a section with nothing beneath it
    if takes_text(setting.dotted) and setting.text is not None and setting.value is not None:
        setting = replace(setting, value=setting.value if isinstance(setting.value, str) else setting.text)
    key = setting.key
    for depth in range(1, len(key)):
        chosen.pop(key[:depth], None)
    for below in [other for other in chosen if len(other) > len(key) and other[: len(key)] == key]:
        del chosen[below]
    chosen[key] = setting


def _validated(chosen: Settings, problems: list[str]) -> Config | None:
    """Return the frozen config, or None after adding a line to ``problems`` for each key with a wrong value."""
    values: dict[str, Any] = {}
    for (*above, last), setting in chosen.items():
        holder = values
        for part in above:
            holder = holder.setdefault(part, {})
        holder[last] = setting.value
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        from finetune.config.problems import value_problems

        problems += value_problems(error, chosen)
        return None
    config._origins.update({setting.dotted: setting.origin for setting in chosen.values()})
    unknown = [name for name in config.resume_allow if name not in fields() and not section_class(name)]
    if unknown:
        from finetune.config.problems import no_such_names

        problems += no_such_names(chosen["resume_allow",], unknown)
    return config


def _missing(chosen: Settings, typed: str, *, needs_data: bool) -> list[str]:
    """Ask for the model and the rows that a run cannot do without."""
    has_model = _value(chosen, "model.path") or _value(chosen, "model.config")
    has_rows = not needs_data or any(_value(chosen, f"data.{key}") for key in ("path", "mixture", "train"))
    if has_model and has_rows:
        return []
    from finetune.config.problems import ask_for_missing

    has_group = find_setting(chosen, "data") is not None
    return ask_for_missing(typed, has_model=bool(has_model), has_rows=bool(has_rows), has_group=has_group)


def _contradicting(chosen: Settings) -> list[str]:
    """Check the keys of model and data that contradict each other."""
    problems = []
    config, mixture = find_setting(chosen, "model.config"), find_setting(chosen, "data.mixture")
    if config and config.value and _value(chosen, "model.init") != "random":
        problems.append(f"{config.origin}: model.config: has no pretrained weights. Add model.init=random.")
    if config and config.value and not _value(chosen, "model.path") and not _value(chosen, "model.tokenizer"):
        problems.append("model.tokenizer: not set, and there is no model.path to take it from. Give one of them.")
    if mixture and mixture.value and _value(chosen, "data.path"):
        problems.append(f"{mixture.origin}: data.mixture: data.path is set too. Keep one of them.")
    return problems


def _key_problem(setting: Setting) -> str:
    """Say why this key cannot have a value; empty if it can."""
    if setting.dotted in fields():
        return ""
    from finetune.config.problems import unknown_key_problem

    return unknown_key_problem(setting)


def password_problem(value: object) -> str:
    """Refuse secrets in addresses: config.yaml, run.json and log.txt hold every value, and messages repeat it."""
    address = without_passwords(str(value))
    if address == str(value):
        return ""
    return (
        f"{address} contains a user name, a password or a parameter that may grant access (…), which config.yaml, "
        "run.json and log.txt would repeat. Give the address without it, or copy the file here; for the hub, set "
        "HF_TOKEN in the environment."
    )


def _name_problem(value: object) -> str:
    """Refuse names outside the allow-list before anything can import them."""
    if isinstance(value, DottedName):
        return "" if is_allowed_object(value) else f"{refused_object(value)}. Nothing was imported."
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next(filter(None, map(_name_problem, items)), "")


def _value(chosen: Settings, dotted: str) -> object:
    setting = find_setting(chosen, dotted)
    return setting.value if setting else None


def refuse_code_of_files(config: Config, needed_by: Collection[str], *, trusted: str = "") -> Config:
    """Refuse the keys marked with `RunsCode` that a file sets. Return the configuration with unneeded keys reset.

    Where overrides name functions as `FILE.py:function`, the key that allows their modules gets the file.
    `needed_by` says which of these keys this command follows. `trusted` is the origin of keys that count beside
    overrides: a recipe's own code.

    Raises:
        ConfigError: names the key, its place and the argument to add; or see `split_functions_in_files`.
    """
    config = _allow_files_of_functions(config, needed_by, trusted)
    given = values(config)
    ignored: dict[str, tuple[object, str]] = {}
    for key, mark in code_keys().items():
        value, origin = given[key], config.origin(key)
        text = ",".join(value) if isinstance(value, list) else json.dumps(value)
        if value and mark.needed_by in needed_by and origin in (*OVERRIDES, trusted):
            warn_once(_log, f"{key}={text} ({origin}): {mark.code} will run here")
        elif value and mark.needed_by in needed_by:
            raise _code_in_file(key, text, origin, mark, needed_by)
        elif value:
            ignored[key] = (type(value)(), "default")
    return config.with_values(ignored)


def _allow_files_of_functions(config: Config, needed_by: Collection[str], trusted: str) -> Config:
    """Replace each `FILE.py:function` of the command line by the function's name, and allow the file. Refuse others."""
    given = values(config)
    changes: dict[str, tuple[object, str]] = {}
    for key, mark in code_keys().items():
        naming = key.removesuffix("_from")
        names = [] if naming == key else [name for name in given[naming] if ":" in name or name.endswith(".py")]
        origin = config.origin(naming)
        if names and origin in (*OVERRIDES, trusted):
            from finetune.config.own_functions import split_functions_in_files

            functions, files = split_functions_in_files(given[naming], naming)
            allowed = given[key] if config.origin(key) in (*OVERRIDES, trusted) else []
            changes |= {naming: (functions, origin), key: ([*allowed, *files], origin)}
        elif names and mark.needed_by in needed_by:
            raise _code_in_file(naming, ",".join(given[naming]), origin, mark, needed_by)
    return config.with_values(changes)


def _code_in_file(key: str, text: str, origin: str, mark: RunsCode, needed_by: Collection[str]) -> ConfigError:
    return ConfigError(
        f"{key} is {text} ({origin}): {mark.code} would run here, so only the command line may allow it. If you trust "
        f"it, add {'' if 'training' in needed_by else '--set '}{shlex.quote(f'{key}={text}')} to the command."
    )
