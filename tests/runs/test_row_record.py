"""The record of a run's rows: small, exact, and never in the way of a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.data.splits import digest_row
from finetune.runs.folder import RunFolder
from finetune.runs.row_record import RowChanges, read_row_record, write_row_record

DIGESTS = [digest_row(number) for number in range(1000)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_rows_are_read_as_they_were_recorded_in_few_bytes(folder):
    write_row_record(folder, {"train": DIGESTS[:600], "test": [*DIGESTS[600:610], DIGESTS[600]]}, DIGESTS[700:])
    record = read_row_record(folder)
    assert record.splits == {"train": set(DIGESTS[:600]), "test": set(DIGESTS[600:610])}
    assert record.trained == {*DIGESTS[:600], *DIGESTS[700:]}
    assert folder.row_file.stat().st_size < 16 * (600 + 10 + 300) + 500
    assert record.compare(DIGESTS[:610]) == (0, 0)
    assert record.compare([*DIGESTS[1:611], DIGESTS[1]]) == RowChanges(missing=1, new=1)


def test_training_rows_of_earlier_starts_stay_recorded(folder):
    folder.checkpoint(1).mkdir(parents=True)
    for start, end in ((0, 5), (3, 8), (6, 9)):
        write_row_record(folder, {"train": DIGESTS[start:end]}, DIGESTS[100 + start : 100 + end])
    record = read_row_record(folder)
    assert record.splits == {"train": set(DIGESTS[6:9])}
    assert record.trained == {*DIGESTS[:9], *DIGESTS[100:109]}


def test_a_run_that_starts_from_the_beginning_forgets_other_rows(folder):
    for rows in (DIGESTS[:5], DIGESTS[5:9]):
        write_row_record(folder, {"train": rows}, [])
    assert read_row_record(folder).trained == set(DIGESTS[5:9])


@pytest.mark.parametrize("content", [b"", b"damaged", b"\0" * 100])
def test_a_damaged_record_is_told_and_blocks_nothing(folder, content, caplog):
    assert read_row_record(folder) is None
    assert caplog.text == ""
    folder.checkpoint(1).mkdir(parents=True)
    folder.row_file.write_bytes(content)
    assert read_row_record(folder) is None
    assert "rows.safetensors cannot be read, so rows are not compared with it" in caplog.text
    write_row_record(folder, {"train": DIGESTS[:5]}, [])
    assert read_row_record(folder).trained == set(DIGESTS[:5])
