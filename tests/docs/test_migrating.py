"""docs/migrating.md lists exactly the former and foreign names that the code knows, with their meaning."""

from __future__ import annotations

import re

import pytest

from finetune.config.keys import fields
from finetune.config.older_spelling import ALIASES, REMOVED, RENAMED, TABLE, Dropped, Renamed, Rule
from finetune.config.other_libraries import EARLIER, LORA_CONFIG, TRAINING_ARGUMENTS, TRL
from tests.docs.pages import DOCS


def describe_rule(rule: Rule) -> str:
    if isinstance(rule, Renamed):
        return f"`{rule.key}`"
    return f"{'left out' if isinstance(rule, Dropped) else 'refused'}: {rule.reason}"


def describe_name(ours: str) -> str:
    return f"`{ours}`" if ours in fields() else ours


TABLES = {
    "Keys that were renamed": {older: f"`{key}`" for older, key in RENAMED.items()},
    "Keys that were removed": REMOVED,
    "Keys of earlier systems": {
        key: "; otherwise ".join(map(describe_rule, rules))
        for key, rules in TABLE.items()
        if key not in (*RENAMED, *REMOVED, *ALIASES)
    },
    "From TrainingArguments": {name: describe_name(ours) for name, ours in TRAINING_ARGUMENTS.items()},
    "From LoraConfig": {name: describe_name(ours) for name, ours in LORA_CONFIG.items()},
    "From TRL": {name: describe_name(ours) for name, ours in TRL.items()},
    "From earlier versions of these libraries": {name: describe_name(ours) for name, ours in EARLIER.items()},
}


def rows_of_the_page() -> dict[str, dict[str, str]]:
    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    return {
        title: dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", body, flags=re.MULTILINE))
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_the_rows_of_the_code(title: str) -> None:
    assert rows_of_the_page()[title] == TABLES[title]


def test_the_page_has_no_other_table() -> None:
    assert rows_of_the_page().keys() == TABLES.keys()
