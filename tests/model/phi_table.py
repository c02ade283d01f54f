"""The table of docs/phi.md: tests write its cells when asked, and otherwise see that each of theirs is there.

FINETUNE_WRITE_TABLES=1 pytest tests/model/test_variants.py
"""

from __future__ import annotations

import os
from enum import StrEnum

from tests.launches import REPOSITORY
from tests.model.variants import VARIANTS

PAGE = REPOSITORY / "docs" / "phi.md"
WRITE = "FINETUNE_WRITE_TABLES"
_BEGIN, _END = "<!-- table: written by the tests -->", "<!-- end of table -->"


class Fact(StrEnum):
    """The columns, in their order."""

    PRESET = "preset"
    TEMPLATE = "template ids"
    MASK = "carry loss"
    END = "end token trained"
    STOPS = "stop ids"
    PAD = "padding"
    TARGETS = "target modules"
    TIED = "tied embeddings"
    GUARD = "LongRoPE guard"
    MERGE = "merge equality"


COLUMNS = tuple(str(fact) for fact in Fact)
"""As the page names them."""


def rows_of_page() -> dict[str, dict[str, str]]:
    """All cells, by variant and column."""
    table = PAGE.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").replace("\\|", "¦").split("|")] for line in lines]
    if not cells:
        return {}
    return {
        row[0]: dict(zip(cells[0][1:], [cell.replace("¦", "|") for cell in row[1:]], strict=True)) for row in cells[2:]
    }


def record_row(variant: str, facts: dict[Fact, str]) -> None:
    """Write cells of a variant into the page if that was asked for; else see that it has them."""
    there = rows_of_page()
    mine = {str(fact): value for fact, value in facts.items()}
    if os.environ.get(WRITE):
        _write(there | {variant: there.get(variant, {}) | mine})
        return
    page = {column: there.get(variant, {}).get(column) for column in mine}
    assert page == mine, f"docs/phi.md is out of date for {variant}; write it with {WRITE}=1"


def _write(rows: dict[str, dict[str, str]]) -> None:
    columns = ["variant", *Fact]
    table = [columns, ["---"] * len(columns)]
    table += [[name, *(rows[name].get(fact, "") for fact in Fact)] for name in VARIANTS if name in rows]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |" for cells in table]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}\n{chr(10).join(lines)}\n{_END}{after}", encoding="utf-8")
