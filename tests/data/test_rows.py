from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from finetune.data import readers, rows
from finetune.data.readers import FileRows
from finetune.data.rows import Examples, RowProblems
from finetune.errors import DataError

USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "yes"}
CHAT = {"messages": [USER, ASSISTANT]}


def read(path: str, wanted: str = "auto", max_rows: int | None = None) -> Examples:
    return Examples(FileRows(Path(path), Path(path).name), wanted, max_rows=max_rows)


def error_of(path: str, wanted: str = "auto") -> str:
    with pytest.raises(DataError) as caught:
        len(read(path, wanted))
    return str(caught.value)


def chat(*turns: object) -> dict[str, Any]:
    return {"messages": list(turns)}


@pytest.mark.parametrize(
    ("row", "row_type", "contents"),
    [
        (CHAT, "messages", ("Hi", "yes")),
        ({"prompt": "a", "completion": "b"}, "prompt_completion", ("a", "b")),
        ({"text": "a"}, "text", ("a",)),
        ({"prompt": "Hi", "text": "b", **CHAT}, "messages", ("Hi", "yes")),
    ],
)
def test_the_row_type_is_seen_by_the_columns_and_reported(write_jsonl, logged, row, row_type, contents):
    examples = read(write_jsonl([{**row, "id": 3}]))
    assert examples[0].row_type == row_type
    assert examples[0].contents == contents
    assert examples[0].source == "train.jsonl:1"
    assert "1 row of " in logged()[0]
    assert "id" in logged()[0].partition("columns not used:")[2]


def test_the_format_chooses_among_several(write_jsonl):
    assert read(write_jsonl([{"text": "b", **CHAT}]), "text")[0].text == "b"
    assert "train.jsonl:1: no column text; it has messages" in error_of(write_jsonl([CHAT]), "text")


def test_what_all_rows_have_in_common_is_found_out_once(write_jsonl, monkeypatch):
    checked, suffixes = [], []
    monkeypatch.setattr(rows, "find_unread", lambda *row: checked.append(row) or iter(()))
    is_compressed = readers.is_compressed
    monkeypatch.setattr(readers, "is_compressed", lambda path: suffixes.append(path) or is_compressed(path))
    examples = read(write_jsonl([CHAT] * 9))
    assert list(examples.read()) == list(examples.read())
    assert len(checked) == 9, "the columns are checked in the first pass"
    assert len(suffixes) < 9, "a row is named without looking at the suffix of its file again"


def test_only_the_first_rows_are_read(write_jsonl):
    assert len(read(write_jsonl([CHAT, CHAT, "not json"]), max_rows=2)) == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"messages": [', "not JSON: the text ends before the value does at column 15; expected one JSON object per"),
        (chat(), "messages is empty; expected a user's turn and the assistant's answer"),
        ({"messages": "Hi"}, "messages is 'Hi'; expected a list of objects with role and content"),
        (chat(USER), "no assistant turn (roles: user), so nothing to learn"),
        (chat(USER, {"role": "bot", "content": "a"}), "messages[1].role is 'bot'; expected system, developer, user"),
        (chat(USER, {"role": "assistant", "content": " \n"}), "messages[1].content (the assistant's) is blank ('"),
        ("[1]", "got [1]; expected an object with messages"),
    ],
)
def test_a_row_that_cannot_be_used_names_its_line_and_says_why(write_jsonl, row, problem):
    message = error_of(write_jsonl([CHAT, "", row]))
    assert message.startswith("train.jsonl: 1 of 2 rows cannot be used:\n  train.jsonl:3: ")
    assert problem in message
    advice = "." if "not JSON" in problem else ", or set data.on_bad_row=drop to leave them out."
    assert message.endswith(f"Correct or remove them, then start again{advice}")


@pytest.mark.parametrize(
    ("first", "row", "problem"),
    [
        ({"prompt": "a", "completion": "b"}, {"prompt": 1.5, "completion": "b"}, "prompt is 1.5 (float); expected"),
        ({"text": "a"}, {"text": None}, "text is None (NoneType); expected text"),
    ],
)
def test_the_other_formats_are_checked_too(write_jsonl, first, row, problem):
    assert f"  train.jsonl:2: {problem}" in error_of(write_jsonl([first, row]))


def test_one_reason_is_one_line_with_its_first_rows_and_all_are_counted(write_jsonl):
    message = error_of(write_jsonl([CHAT, *[chat()] * 50]))
    head, line, advice = message.split("\n")
    assert head == "train.jsonl: 50 of 51 rows cannot be used:"
    assert line.startswith("  train.jsonl:2, train.jsonl:3, train.jsonl:4 and 47 more: ")
    assert advice.startswith("Correct or remove them")


def test_five_reasons_are_shown():
    problems = RowProblems()
    for number in range(14):
        problems.add(f"row {number}", f"reason {number % 7}")
    with pytest.raises(DataError) as caught:
        problems.raise_if_any("a.jsonl", 20)
    lines = [f"  row {number}, row {number + 7}: reason {number}" for number in range(5)]
    assert str(caught.value).split("\n")[1:-1] == [*lines, "  and 4 more for other reasons"]


def test_a_file_of_which_no_row_can_be_read_shows_why(write_jsonl):
    assert "train.jsonl: 2 of 2 rows cannot be used:\n  train.jsonl:1, train.jsonl:2: not JSON" in error_of(
        write_jsonl(["a", "b"])
    )


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_split_without_rows_is_refused(write_jsonl, lines):
    assert error_of(write_jsonl(lines)) == "train.jsonl has no rows. Put at least one in, or leave the split out."
