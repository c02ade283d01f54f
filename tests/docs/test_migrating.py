"""docs/migrating.md lists exactly the former and foreign names that the code knows, with their meaning."""

from __future__ import annotations

import re

import pytest

from finetune.config.older_spelling import ALIASES, REMOVED, RENAMED, TABLE, Dropped, Renamed, Rule
from finetune.config.other_tools import KEYS, SENTENCES
from tests.docs.pages import DOCS, marked_blocks
from tests.in_process import run_finetune


def describe_rule(rule: Rule) -> str:
    if isinstance(rule, Renamed):
        return f"`{rule.key}`"
    return f"{'left out' if isinstance(rule, Dropped) else 'refused'}: {rule.reason}"


def names_in(text: str) -> str:
    return ", ".join(f"`{name.partition('=')[0]}`" for name in text.split())


TABLES = {
    "Keys that were renamed": {older: f"`{key}`" for older, key in RENAMED.items()},
    "Keys that were removed": REMOVED,
    "Keys of earlier systems": {
        key: "; otherwise ".join(map(describe_rule, rules))
        for key, rules in TABLE.items()
        if key not in (*RENAMED, *REMOVED, *ALIASES)
    },
    "Names that are keys here": {key: names_in(names) for key, names in KEYS.items()},
    "Names that are not keys here": {sentence: names_in(names) for sentence, names in SENTENCES.items()},
}


def rows_of_the_page() -> dict[str, dict[str, str]]:
    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    parts = re.split(r"^###? (.+)\n", text, flags=re.MULTILINE)[1:]
    tables = {}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        rows = re.findall(r"^\| (.+?) \| (.+) \|$", body, flags=re.MULTILINE)[1:]
        if rows:
            tables[title] = {first.strip("`"): second for first, second in rows}
    return tables


def test_the_lines_of_the_translated_file_are_those_that_init_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "tasks/coming-from.md").read_text(encoding="utf-8")
    files = {block.more: block.text for block in marked_blocks(DOCS / "tasks/coming-from.md")}
    (excerpt,) = re.findall(r"^```yaml\n(# DECIDE.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (printed,) = re.findall(r"^```text\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    for name in ("lora.yml", "chats.jsonl"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    assert run_finetune("init", "--from", "lora.yml", "--file", "chats.yaml").answer == printed
    written = (tmp_path / "chats.yaml").read_text(encoding="utf-8").splitlines()
    assert set(excerpt.splitlines()) <= set(written)


@pytest.mark.parametrize("title", TABLES)
def test_the_page_has_the_rows_of_the_code(title: str) -> None:
    assert rows_of_the_page()[title] == TABLES[title]


def test_the_page_has_no_other_table() -> None:
    assert rows_of_the_page().keys() == TABLES.keys()
