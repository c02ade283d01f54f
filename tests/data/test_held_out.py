"""Shares of the training rows: exact, the same every time, and read once."""

from __future__ import annotations

import pytest

from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.held_out import SplitSize, parse_split_size, rows_of_split, shuffled
from finetune.errors import DataError
from tests.data.conftest import encode

ROWS = [{"prompt": f"Hi {number}", "completion": "yes"} for number in range(40)]


def lines(examples: EncodedExamples | None) -> list[int]:
    return [int(examples.source(row).rpartition(":")[2]) for row in range(len(examples))]


@pytest.mark.parametrize(
    ("validation", "test", "counts"),
    [("0.1", None, (36, 4, 0)), ("5%", "10", (28, 2, 10)), ("0.01", "0.5", (19, 1, 20)), (None, "39", (1, 0, 39))],
)
def test_shares_are_exact_apart_and_leave_no_row_out(make_section, write_jsonl, validation, test, counts):
    splits = encode(make_section(path=write_jsonl(ROWS), validation=validation, test=test))
    found = [lines(split) if split else [] for split in (splits.train, splits.validation, splits.test)]
    assert tuple(map(len, found)) == counts
    assert sorted(number for split in found for number in split) == list(range(1, 41))
    assert all(split == sorted(split) for split in found)


def test_which_rows_are_put_aside_depends_on_split_seed_alone(make_section, write_jsonl):
    section = make_section(path=write_jsonl(ROWS), test=0.25)
    first = lines(encode(section).test)
    assert lines(encode(section).test) == first
    assert lines(encode(section.model_copy(update={"validation": "0.2"})).test) == first
    assert lines(encode(section.model_copy(update={"split_seed": 1})).test) != first


def test_the_order_is_the_same_on_every_machine():
    assert shuffled(8, 0) == [1, 5, 6, 0, 7, 4, 2, 3]
    assert sorted(shuffled(1000, 5)) == list(range(1000))


def test_the_rows_seen_before_encoding_are_those_encoded(make_section, write_jsonl):
    section = make_section(path=write_jsonl(ROWS), validation="0.2")
    examples, encoded = load_examples(section), encode(section)
    assert [example.number for example in examples.train] == lines(encoded.train)
    assert [example.number for example in examples.validation] == lines(encoded.validation)


def test_a_source_is_encoded_once_for_all_of_its_splits(make_section, write_jsonl, logged):
    encode(make_section(path=write_jsonl(ROWS), validation="0.2", test="0.2"))
    assert sum(": 40 rows of " in line for line in logged()) == 1
    assert not any("encoded before" in line for line in logged())


def test_a_split_or_a_file_of_that_name_comes_first(make_section, write_jsonl):
    write_jsonl(ROWS[:3], "rows/train.jsonl")
    path = write_jsonl(ROWS[3:5], "rows/5.jsonl").rpartition("/")[0]
    assert lines(encode(make_section(path=path, validation="5")).validation) == [1, 2]


@pytest.mark.parametrize("text", ["0", "1.0", "1.5", "100%", "-0.1", "0%"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(DataError, match=rf"data.test is {text}: expected a fraction of the training rows above 0"):
        parse_split_size(text, "test")


def test_names_are_no_shares():
    assert parse_split_size("dev", "test") is None
    assert parse_split_size("12e7b", "test") is None
    assert parse_split_size("0.29", "test") == SplitSize("0.29", fraction=0.29)
    assert SplitSize("0.29", fraction=0.29).of(100) == 29


def test_shares_that_leave_nothing_to_train_on_are_refused():
    sizes = {"validation": SplitSize("0.5", fraction=0.5), "test": SplitSize("2", rows=2)}
    for split in ("train", "validation", "test"):
        with pytest.raises(
            DataError, match=r"rows has 4 rows, and data.test=2 and data.validation=0.5 leave none to train on"
        ):
            rows_of_split(4, split=split, sizes=sizes, seed=0, label="rows")
