"""The table of docs/plan.md: tests write its rows when asked, and otherwise see that each of theirs still holds.

FINETUNE_WRITE_TABLES=1 pytest tests/diagnose/test_plan_memory.py
"""

from __future__ import annotations

import os

from finetune.units import format_bytes
from tests.launches import REPOSITORY

PAGE = REPOSITORY / "docs" / "plan.md"
WRITE = "FINETUNE_WRITE_TABLES"
BOUND = 0.02
"""How far the error may be from the one in the table: torch's next version may allocate a little more or less."""
_BEGIN, _END = "<!-- table: written by tests/diagnose/test_plan_memory.py -->", "<!-- end of table -->"


def record_error(case: str, measured: int, error: float) -> None:
    """Write a row into the page if that was asked for; else see that the page has about the same."""
    rows = _rows_of_page()
    if os.environ.get(WRITE):
        _write({**rows, case: (format_bytes(measured), f"{error:+.1%}")})
        return
    advice = f"docs/plan.md is out of date; write it with {WRITE}=1"
    assert case in rows, f"{case} is missing: {advice}"
    size, written = rows[case]
    assert abs(float(written.rstrip("%")) / 100 - error) <= BOUND, f"{case}: {error:+.1%}, not {written}: {advice}"
    assert abs(_bytes_of(size) / measured - 1) <= BOUND, f"{case}: {format_bytes(measured)}, not {size}: {advice}"


def cases_of_page() -> list[str]:
    """The names of the rows."""
    return list(_rows_of_page())


def _rows_of_page() -> dict[str, tuple[str, str]]:
    table = PAGE.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {case: (size, error) for case, size, error in cells}


def _bytes_of(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def _write(rows: dict[str, tuple[str, str]]) -> None:
    table = ["| step | measured | predicted |", "| --- | --- | --- |"]
    table += [f"| {case} | {size} | {error} |" for case, (size, error) in rows.items()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text(f"{before}{_BEGIN}\n{chr(10).join(table)}\n{_END}{after}", encoding="utf-8")
