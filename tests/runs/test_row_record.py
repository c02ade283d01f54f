"""The record of a run's rows: small, exact, and never in the way of a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.data.splits import digest_row
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_rows import RowChanges, read_row_record, rows_of_earlier_starts
from finetune.runs.row_comparison import compare_renderings
from finetune.runs.row_record import write_row_record

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
        earlier = rows_of_earlier_starts(folder)
        write_row_record(folder, {"train": DIGESTS[start:end]}, DIGESTS[100 + start : 100 + end], earlier=earlier)
    record = read_row_record(folder)
    assert record.splits == {"train": set(DIGESTS[6:9])}
    assert record.trained == {*DIGESTS[:9], *DIGESTS[100:109]}


def test_a_run_that_starts_from_the_beginning_forgets_other_rows(folder):
    for rows in (DIGESTS[:5], DIGESTS[5:9]):
        write_row_record(folder, {"train": rows}, [], earlier=rows_of_earlier_starts(folder))
    assert read_row_record(folder).trained == set(DIGESTS[5:9])


@pytest.mark.parametrize("content", [b"", b"damaged", b"\0" * 100])
def test_a_damaged_record_is_told_and_blocks_nothing(folder, content, caplog):
    assert read_row_record(folder) is None
    assert caplog.text == ""
    folder.checkpoint(1).mkdir(parents=True)
    folder.row_file.write_bytes(content)
    assert read_row_record(folder) is None
    assert "rows.safetensors cannot be read, so rows are not compared with it" in caplog.text
    write_row_record(folder, {"train": DIGESTS[:5]}, [], earlier=rows_of_earlier_starts(folder))
    assert read_row_record(folder).trained == set(DIGESTS[:5])


def test_the_first_row_that_two_runs_rendered_differently_is_named_by_file_and_line(tmp_path):
    """Rows are known by their file and line, so rows that one run lacks, or has elsewhere, are no difference."""
    folders = [RunFolder(tmp_path / name) for name in ("a", "b")]
    file, line, tokens, targets, raw = [0, 0, 1, 1], [3, 9, 1, 1], [5, 6, 7, 8], [1, 2, 3, 4], [10, 11, 12, 13]

    def write(folder, rendered, files, order=(0, 1, 2, 3)):
        columns = [[column[row] for row in order] for column in (file, line, tokens, targets, rendered, raw)]
        folder.path.mkdir(exist_ok=True)
        write_row_record(folder, {"train": DIGESTS[:4]}, [], columns, files)

    write(folders[0], [1, 2, 3, 4], ["x.jsonl", "y.jsonl"])
    write(folders[1], [1 + (1 << 32), 2, 3, 4], ["x.jsonl", "y.jsonl"], order=(2, 3, 1))
    assert read_row_record(folders[0]).trained == set(DIGESTS[:4])
    assert compare_renderings(*folders) is None
    tokens, targets = [5, 6, 7, 1], [1, 2, 3, 0]
    write(folders[1], [7, 2, 3, 9], ["z.jsonl", "y.jsonl"])
    found = compare_renderings(*folders)
    assert str(found) == (
        "y.jsonl line 1: the same row was rendered differently: 8 tokens, 4 with loss, and 1 token, 0 with loss; "
        "1 of 2 rows differ"
    )
    tokens[3], targets[3], raw[3] = 8, 4, 99  # as many tokens as before
    write(folders[1], [1, 2, 3, 9], ["x.jsonl", "y.jsonl"])
    assert "y.jsonl line 1: the row itself differs: " in str(compare_renderings(*folders))
    for damaged in (b"", b"damaged"):
        folders[1].row_file.write_bytes(damaged)
        assert compare_renderings(*folders) is None
