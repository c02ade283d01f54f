from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset
from pyarrow.parquet import write_table

from finetune.data.hub import DatasetRows
from finetune.data.readers import FileRows
from finetune.errors import DataError

ROWS = [{"text": 'one, "two"\nthree'}, {"text": "007"}, {"text": "null"}]


def file_rows(path: Path) -> FileRows:
    return FileRows(path, path.name)


def values(path: Path) -> list[tuple[int, object]]:
    return [(row.number, row.value) for row in file_rows(path).rows()]


def test_json_lines_keep_their_numbers_over_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert values(path) == [(1, {"text": "a"}), (4, {"text": "b"})]
    assert file_rows(path).place(4) == "a.jsonl:4"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": NaN}', "not JSON: NaN is not a JSON value"),
        (b'{"text": "\xff"}', "the line is not UTF-8 text (byte 11)"),
        (b"[" * 100_000, "not JSON: "),
    ],
)
def test_a_line_that_cannot_be_read_is_a_row_with_a_problem(tmp_path, line, problem):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b"\n")
    good, bad = file_rows(path).rows()
    assert good.problem is None
    assert bad.number == 2
    assert problem in str(bad.problem)


@pytest.mark.parametrize(
    "text",
    [
        '[{"text": "a"}, {"text": "b"}]',
        '[\n{"text": "a"},\n\n{"text":\n "b"}\n]\n',
        '{"data": [\n{"text": "a"},\n\n{"text": "b"}]}',
        '{"text": "a"}\n\n\n{"text": "b"}\n',
    ],
)
def test_a_json_file_is_a_list_a_wrapped_list_or_lines(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    assert values(path) == [(1, {"text": "a"}), (2, {"text": "b"})]
    assert file_rows(path).place(2) == "a.json row 2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}', r"a.json is not JSON \(the text ends before the value does: Expecting ',' delimiter: line"),
        ('[{"text": NaN}]', r"a.json is not JSON \(NaN is not a JSON value\)"),
        ('{"data": [{"text": "a"}], "version": 1}', r"has the keys data, version\. Expected a list of rows"),
    ],
)
def test_a_json_file_that_is_malformed_says_where(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        values(path)


def test_cells_of_a_csv_file_stay_the_text_they_are(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text\n"one, ""two""\nthree"\n007\nnull\n')
    assert values(path) == list(enumerate(ROWS, start=1))
    assert file_rows(path).place(2) == "a.csv row 2"


def test_parquet_is_read_and_neither_kind_of_table_leaves_anything_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    path = tmp_path / "a.parquet"
    Dataset.from_list(ROWS).to_parquet(path)
    assert values(path) == list(enumerate(ROWS, start=1))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize("is_category", [True, False])
def test_a_parquet_file_that_repeats_a_value_is_refused_where_it_has_unpacked_too_much(tmp_path, is_category):
    path, rows = tmp_path / "a.parquet", pyarrow.array(["x" * 100_000] * 3000).dictionary_encode()
    write_table(pyarrow.table({"text": rows if is_category else rows.dictionary_decode()}), path)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(DataError, match=r"a.parquet cannot be read as parquet: .* more than 268 MB, over 200 times"):
        values(path)
    write_table(pyarrow.table({"text": rows[:2] if is_category else rows[:2].dictionary_decode()}), path)
    assert [len(row["text"]) for _, row in values(path)] == [100_000] * 2


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path):
    column = pyarrow.array(["a"])
    write_table(pyarrow.Table.from_arrays([column, column], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="it has the column text twice"):
        values(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_table_that_cannot_be_read_is_a_data_error(tmp_path, name):
    path = tmp_path / name
    path.write_text('text\n"a\nb,c\n' if name == "a.csv" else "PAR1 no")
    with pytest.raises(DataError, match=rf"{name} cannot be read as {path.suffix[1:]}.*: "):
        values(path)


def test_the_digest_of_a_data_set_is_of_its_content(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "a", num_shards=2)
    on_disk = DatasetRows(Dataset.load_from_disk(str(tmp_path / "a")), "a")
    in_memory = DatasetRows(Dataset.from_list([*ROWS, {"text": "x"}]).select(range(3)), "b")
    other = DatasetRows(Dataset.from_list(json.loads(json.dumps(ROWS).replace("007", "008"))), "c")
    assert on_disk.digest() == DatasetRows(Dataset.load_from_disk(str(tmp_path / "a")), "x").digest()
    assert in_memory.digest() != other.digest()
    assert [row.value for row in on_disk.rows()] == ROWS
    assert on_disk.place(2) == "a row 2"


@pytest.mark.parametrize("form", ["torch", "numpy", "arrow"])
def test_the_saved_format_of_a_data_set_changes_no_row(tmp_path, form):
    rows = [{"text": "a", "label": number == 1, "ids": [1, 2]} for number in range(3)]
    Dataset.from_list(rows).with_format(form, columns=["label", "ids"]).save_to_disk(tmp_path / "a")
    on_disk = DatasetRows(Dataset.load_from_disk(str(tmp_path / "a")), "a")
    assert [row.value for row in on_disk.rows()] == rows


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_is_gone_is_a_data_error(tmp_path, name):
    for read in (FileRows.digest, lambda rows: list(rows.rows())):
        with pytest.raises(DataError, match=rf"{name} cannot be read: No such file or directory \(ENOENT\)"):
            read(file_rows(tmp_path / name))
