"""The site lists exactly the former and foreign names that the code knows, with their meaning."""

from __future__ import annotations

import re
import sys

from finetune.config.older_spelling import REMOVED, RENAMED, TABLE
from finetune.config.other_tools import KEYS, SENTENCES
from finetune.config.schema import ALIASES
from tests.docs.pages import DOCS, marked_blocks
from tests.in_process import run_finetune

sys.path.insert(0, str(DOCS / "generate"))
from migrating import TABLES, with_tables


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


def test_the_site_has_a_row_for_each_name() -> None:
    page = with_tables((DOCS / "migrating.md").read_text(encoding="utf-8"))
    assert "<!-- table" not in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    heads = [f"| {left} | {right} |" for (left, right), _ in TABLES.values()]
    assert [row for row in rows if row in heads] == heads
    former = TABLE.keys() - set(ALIASES)
    assert {row.split("`")[1] for row in rows if row.startswith("| `")} == {*RENAMED, *REMOVED, *former, *KEYS}
    assert {row.split(" | ")[0].removeprefix("| ") for row in rows if row not in heads} >= SENTENCES.keys()
    assert "| `training.seed` | `seed` |" in rows
    assert "| `criterion` | refused: the loss is always next-token cross-entropy" in page
    assert "| `lora.r` | `r`, `lora_r`, `lora_rank` |" in rows
