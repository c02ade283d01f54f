"""Find the first training row that two runs rendered differently, by the record of their rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.limits import read_regular
from finetune.runs.row_record import FILES, MOST_BYTES, ROW_FIELDS, ROWS
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class OtherRendering:
    """The first row that two runs have and rendered differently."""

    file: str
    line: int
    is_same_row: bool
    """Whether the row itself is the same in both, as it was read from its file."""
    tokens: tuple[int, int]
    target_tokens: tuple[int, int]
    num_differing: int
    """Rows that differ, of those that both runs have."""
    num_common: int

    def __str__(self) -> str:
        """Return a clause for a message."""
        a, b = (
            f"{counted(tokens, 'token')}, {targets:,} with loss"
            for tokens, targets in zip(self.tokens, self.target_tokens, strict=True)
        )
        what = "the same row was rendered differently" if self.is_same_row else "the row itself differs"
        of = f"{self.num_differing:,} of {self.num_common:,} rows differ"
        return f"{self.file} line {self.line:,}: {what}: {a}, and {b}; {of}"


def compare_renderings(first: RunFolder, second: RunFolder) -> OtherRendering | None:
    """Compare the recorded training rows of two runs by file and line, in the order of the first run.

    None if all rows that both have are equal, or if a run has no such record: it is damaged or of an earlier version.
    """
    (files, a), (other_files, b) = (_read(folder) for folder in (first, second))
    if len(files) == len(other_files) and not {*files} & {*other_files}:
        other_files = files  # the second run read them in another folder
    sides = [
        {(names[file], line, number): row for (file, line, number), row in rows.items()}
        for names, rows in ((files, a), (other_files, b))
    ]
    common = [place for place in sides[0] if place in sides[1]]
    differing = [place for place in common if sides[0][place]["rendered"] != sides[1][place]["rendered"]]
    if not differing:
        return None
    row, other = (side[differing[0]] for side in sides)
    return OtherRendering(
        file=differing[0][0],
        line=row["line"],
        is_same_row=row["raw"] == other["raw"],
        tokens=(row["tokens"], other["tokens"]),
        target_tokens=(row["target_tokens"], other["target_tokens"]),
        num_differing=len(differing),
        num_common=len(common),
    )


def _read(folder: RunFolder) -> tuple[list[str], dict[tuple[int, int, int], dict[str, int]]]:
    """Read the names of the files, and the rows by file, line, and how many rows of this line came before.

    Both are empty if there is no record.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    rows: dict[tuple[int, int, int], dict[str, int]] = {}
    earlier: Counter[tuple[int, int]] = Counter()
    try:
        arrays = load(read_regular(folder.row_file, most=MOST_BYTES))
        files = [str(name) for name in json.loads(arrays[FILES].tobytes())]
        for values in arrays[ROWS].tolist():
            row = dict(zip(ROW_FIELDS, values, strict=True))
            place = row["file"] % len(files), row["line"]
            rows[*place, earlier[place]] = row
            earlier[place] += 1
    except (OSError, SafetensorError, ValueError, TypeError, LookupError, ArithmeticError):
        return [], {}
    return files, rows
