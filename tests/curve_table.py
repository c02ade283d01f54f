"""The table of docs/one-curve.md: tests write its rows when asked, and otherwise see that each of theirs is there.

FINETUNE_WRITE_TABLES=1 pytest tests/test_one_curve.py tests/test_launch_forms.py tests/slurm
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from typing import NamedTuple

from tests.launches import REPOSITORY

PAGE = REPOSITORY / "docs" / "one-curve.md"
WRITE = "FINETUNE_WRITE_TABLES"
COLUMNS = (
    "started by",
    "processes",
    "micro-batches",
    "dropout",
    "besides",
    "largest loss difference",
    "adapter difference",
)
_NUM_KEYS = 5
_NUM_STEPS = 6
"""Of each run, as the page says."""
_BEGIN, _END = "<!-- table: written by the tests -->", "<!-- end of table -->"
_MADE = "<!-- made: written by the tests -->"


class Row(NamedTuple):
    """What a row of the table is about."""

    form: str
    world_size: int
    split: str
    dropout: str
    note: str = ""

    @property
    def cells(self) -> list[str]:
        """As the table shows them."""
        return [str(value) for value in self]


def rows_of_page() -> dict[tuple[str, ...], list[str]]:
    """All cells of each row, by those that say what it is about."""
    table = PAGE.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(cells[0]) == COLUMNS
    return {tuple(row[:_NUM_KEYS]): row for row in cells[2:]}


def record_row(row: Row, *, num_steps: int, of_losses: float, of_adapter: float) -> None:
    """Write a row into the page if that was asked for; else see that it has one."""
    assert num_steps == _NUM_STEPS
    key = tuple(row.cells)
    if not os.environ.get(WRITE):
        assert key in rows_of_page(), f"docs/one-curve.md has no row {key}; write it with {WRITE}=1"
        return
    _write(rows_of_page() | {key: [*key, f"{of_losses:.1e}", f"{of_adapter:.1e}"]})


def keep_rows(rows: list[Row]) -> None:
    """The page has these rows and no other; if asked to, sort them so and drop the others.

    Rows that were never measured here are missing from the page: those of a launcher that is not installed.
    """
    keys = [tuple(row.cells) for row in rows]
    there = rows_of_page()
    if os.environ.get(WRITE):
        _write({key: there[key] for key in keys if key in there})
    else:
        assert set(there) == set(keys)


def _write(rows: dict[tuple[str, ...], list[str]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    head = [list(COLUMNS), ["---"] * len(COLUMNS)]
    table = "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in [*head, *rows.values()])
    start, _, _ = before.partition(_MADE)
    PAGE.write_text(f"{start}{_MADE}\n{_made_with()}\n\n{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")


def _made_with() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers", "peft"))
    return (
        f"Device: CPU ({platform.machine()}), one thread a process. Python {platform.python_version()}, {packages}; "
        "backend gloo."
    )
