"""Describe what is wrong with settings. `checks.py` imports it for those that the schema refuses or does not list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.config.config_files import GROUPS
from finetune.config.key_advice import did_you_mean_key, expected
from finetune.config.keys import fields, section_class, takes
from finetune.config.listing import MADE_FOR, list_model_families, other_models
from finetune.config.schema import Config
from finetune.config.yaml_reader import Setting, Settings, find_setting
from finetune.terminal import without_passwords

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_THERE = f"There is: {', '.join(Config.model_fields)}. All keys: finetune config show."
"""The end of a message about a key that resembles none. Only the first such message of several has it."""


def joined_problems(problems: Sequence[str]) -> str:
    """Join all problems of a configuration to one message."""
    unique = list(dict.fromkeys(map(without_passwords, problems)))
    first, there, others = "\n".join(unique).replace("\n", "\n  ").partition(_THERE)
    lines = first + there + others.replace(f" {_THERE}", "")
    return unique[0] if len(unique) == 1 else f"the configuration has {len(unique)} problems:\n  {lines}"


def unknown_key_problem(setting: Setting) -> str:
    """Say why a key that the schema does not list cannot have a value; empty if it can."""
    dotted = setting.dotted
    for depth in range(len(setting.key) - 1, 0, -1):
        above = ".".join(setting.key[:depth])
        if above in fields():
            return "" if takes(above, dict) else f"{above} has no keys of its own: it takes {expected(above)}."
    if section := section_class(dotted):
        keys = ", ".join(f"{dotted}.{key}" for key in list(section.model_fields)[:3])
        is_empty = setting.value in (None, {})
        return "" if is_empty else f"is a section with keys ({keys}, ...), got {_got(setting)}."
    group = setting.key[0]
    if group in GROUPS and not section_class(group):
        return f"{group} is not a section: the command line or a run file chooses configs/{group}/NAME.yaml with it."
    own = section_class(group) if len(setting.key) > 1 else None
    there = f"{group} has: {', '.join(own.model_fields)}." if own else _THERE
    return f"there is no such key. {did_you_mean_key(dotted) or there}"


def value_problems(error: ValidationError, chosen: Settings) -> list[str]:
    """Describe each key with a wrong value, on one line, though pydantic reports each member of a union."""
    wrong: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        parts = [str(part) for part in detail["loc"]]
        dotted = ".".join(parts[:2] if section_class(parts[0]) else parts[:1])
        wrong.setdefault(dotted, _value_problem(dotted, detail, chosen))
    return list(wrong.values())


def no_such_names(setting: Setting, names: Sequence[str]) -> list[str]:
    """Say that there are no keys or sections of these names, which a setting lists."""
    return [
        problem_line(setting, f"there is no key or section {name}. {did_you_mean_key(name)}".rstrip()) for name in names
    ]


def ask_for_missing(typed: str, *, has_model: bool, has_rows: bool, has_group: bool) -> list[str]:
    """Ask for the model and the rows of a run, and complete the command that has none. `has_group`: one of data."""
    rows = "data.path=chats.jsonl" if has_group else "data=chats.jsonl"  # keep the group that is chosen
    example = [typed, "" if has_model else "model=phi4_mini", "" if has_rows else rows]
    how = f"for example: {' '.join(filter(None, example))}"
    problems = []
    if not has_model:
        names = "".join(f"\n  model={name:<15} {meaning}" for name, meaning in list_model_families()[MADE_FOR])
        names += "".join(f"\n  {line}" for line in other_models())
        own = "a folder or a hub id, such as model=./my-phi and model=microsoft/phi-4"
        problems.append(f"model.path: not set. Choose a model, {how}{names}\n  model={'PATH':<15} {own}")
    if not has_rows:
        problems.append(
            f"data.path: not set. Give a file, a folder or a hub id, or data=orders, which is shipped; {how}"
        )
    return problems


def _value_problem(dotted: str, detail: ErrorDetails, chosen: Settings) -> str:
    setting = find_setting(chosen, dotted)
    assert setting is not None, f"a default of the schema is wrong: {detail}"
    if detail["type"] == "value_error":
        return problem_line(setting, str(detail.get("ctx", {})["error"]), dotted)
    return problem_line(setting, f"expected {expected(dotted)}, got {_got(setting)}", dotted)


def problem_line(setting: Setting, problem: str, dotted: str = "") -> str:
    """Describe a problem with its place and its key."""
    older = f" (written {setting.older_key})" if setting.older_key else ""
    return f"{setting.origin}: {dotted or setting.dotted}{older}: {problem}"


def _got(setting: Setting) -> str:
    """Show the value as it was written, shortened."""
    if isinstance(setting.value, str):
        shown = f"'{setting.value}'"
    elif setting.text:
        shown = setting.text
    else:
        shown = repr(setting.value)
    shown = without_passwords(shown)
    return shown if len(shown) <= 60 else f"{shown[:56]} ..."
