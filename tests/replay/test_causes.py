"""The first row that differs between two runs is named."""

from __future__ import annotations

import pytest

from finetune.data.encoded import EncodedExamples
from finetune.replay.causes import TrainingRows, first_differing_row


def rows_of(title: str, *rows: list[int]) -> TrainingRows:
    marked = [(ids, [True] * len(ids)) for ids in rows]
    return TrainingRows(title, [EncodedExamples.from_rows(marked, end_id=2)], None)


@pytest.mark.parametrize(("first", "second"), [("long", "short"), ("short", "long")])
def test_rows_that_one_run_lacks_are_named_from_the_run_that_has_them(first: str, second: str) -> None:
    sides = {"long": rows_of("long", [5], [6], [7]), "short": rows_of("short", [5], [6])}
    text = f"short has only 2 rows, without {sides['long'].sides[0].source(2)} of long"
    assert first_differing_row(sides[first], sides[second]) == (3, text)
