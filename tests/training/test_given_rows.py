"""Rows from memory become files whose names say what is in them."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pandas
import pytest

from finetune.errors import DataError
from finetune.training.given import write_given_rows
from tests.data.conftest import give_away

ROWS = [{"prompt": f"naïve {n}", "completion": str(n)} for n in range(3)]


def test_equal_rows_are_one_file_however_they_are_given(tmp_path):
    keys = write_given_rows(ROWS, str(tmp_path))
    file = Path(keys["data.path"])
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == ROWS
    frame = pandas.DataFrame(ROWS, index=["a", "b", "b"])
    for same in (tuple(ROWS), (row for row in ROWS), datasets.Dataset.from_list(ROWS), frame):
        assert write_given_rows(same, str(tmp_path)) == keys
    assert write_given_rows(ROWS[:2], str(tmp_path)) != keys
    assert write_given_rows(ROWS, str(tmp_path)) == keys


def test_a_missing_cell_of_a_frame_is_null_and_numbers_keep_their_digits(tmp_path):
    frame = pandas.DataFrame({"a": [0.1234567890123456, None], "b": ["x", float("nan")], "c": [1, 2]})
    frame["d"] = pandas.array([1, None], dtype="Int64")
    lines = Path(write_given_rows(frame, str(tmp_path))["data.path"]).read_text().splitlines()
    assert lines == [
        '{"a": 0.1234567890123456, "b": "x", "c": 1, "d": 1}',
        '{"a": null, "b": null, "c": 2, "d": null}',
    ]


def test_lists_that_pandas_reads_from_parquet_as_arrays_are_lists(tmp_path):
    turns = [{"role": "user", "content": "a", "parts": ["x", "y"]}, {"role": "assistant", "content": "b", "parts": []}]
    chats = [{"messages": turns, "score": 0.5}]
    pandas.DataFrame(chats).to_parquet(tmp_path / "chats.parquet")
    frame = pandas.read_parquet(tmp_path / "chats.parquet")
    assert write_given_rows(frame, str(tmp_path)) == write_given_rows(chats, str(tmp_path))


def test_splits_are_named_as_usual(tmp_path):
    given = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "dev": datasets.Dataset.from_list(ROWS[:1])}
    )
    keys = write_given_rows(given, str(tmp_path))
    assert keys.keys() == {"data.train", "data.validation"}
    assert len(Path(keys["data.validation"]).read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"prompt": {1}}], "row 0 of data holds a value that JSON does not have, in the column 'prompt'"),
        ([{"prompt": "\ud800"}], "in the column 'prompt'"),
        ([], "data has no rows"),
        (5, "data is int; expected"),
        ({"prompt": ["a"], "completion": ["b"]}, "expected the names of splits"),
        ({"train": ROWS, "test": []}, r'data\["test"\] has no rows'),
        ({"dev": ROWS, "test": ROWS}, r'data has the splits dev, test, but no train\. Give data=\{"train": rows'),
        (
            pandas.DataFrame({"day": [pandas.Timestamp(0)]}),
            "row 0 of data holds a value that JSON .*in the column 'day'",
        ),
        (pandas.DataFrame(), "data has no rows"),
        (pandas.DataFrame([["a", "b"]], columns=["prompt"] * 2), "data has several columns called 'prompt'"),
        (["text"], "row 0 of data is str; expected a dict"),
        (pandas.DataFrame([["a"]], columns=[("a", "prompt")]), "row 0 of data has a column named .*'prompt'"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        write_given_rows(data, str(tmp_path))


class ReadOnce:
    """Has a length, as tqdm over a generator has, and no rows when it is read again."""

    def __init__(self, rows):
        self._rows = iter(rows)

    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        yield from self._rows


def test_rows_that_change_when_they_are_read_again_are_refused_and_leave_no_file(tmp_path):
    with pytest.raises(DataError, match=r"data gave other rows when it was read a second time.*list\(rows\)"):
        write_given_rows(ReadOnce(ROWS), str(tmp_path))
    assert list(tmp_path.rglob("*.jsonl")) == []
    assert Path(write_given_rows(list(ReadOnce(ROWS)), str(tmp_path))["data.path"]).stat().st_size


def test_a_full_cache_is_named(tmp_path):
    (tmp_path / "given").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written to .* Set data\.cache_dir to another folder"):
        write_given_rows(ROWS, str(tmp_path))


def test_rows_in_a_file_of_another_user_are_written_again(tmp_path, monkeypatch):
    file = Path(write_given_rows(ROWS, str(tmp_path))["data.path"])
    file.write_text('{"prompt": "theirs", "completion": "theirs"}\n')
    give_away(file, monkeypatch)
    assert write_given_rows(ROWS, str(tmp_path)) == {"data.path": str(file)}
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == ROWS
