"""Shares of the training rows: exact, the same every time, chosen by the rows' content, and read once."""

from __future__ import annotations

import json
import random
from collections import Counter
from hashlib import blake2b
from itertools import chain

import pytest
from datasets import Dataset

from finetune.cli.sweep import has_validation
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import holds_out_by_default, load_examples
from finetune.data.held_out import SplitSize, parse_split_size, rows_of_split
from finetune.data.preferences import encode_preferences
from finetune.data.splits import digest_row, shuffled
from finetune.errors import DataError
from tests.data.conftest import encode
from tests.tiny import tiny_tokenizer

ROWS = [{"prompt": f"Hi {number}", "completion": "yes"} for number in range(40)]


def lines(examples: EncodedExamples | None) -> list[int]:
    return [int(examples.source(row).rpartition(":")[2]) for row in range(len(examples))]


@pytest.mark.parametrize(
    ("validation", "test", "counts"),
    [("0.1", None, (36, 4, 0)), ("5%", "10", (28, 2, 10)), ("0.01", "0.5", (19, 1, 20)), (None, "39", (1, 0, 39))],
)
@pytest.mark.parametrize("rule", ["content", "position"])
def test_shares_are_exact_apart_and_leave_no_row_out(make_section, write_jsonl, validation, test, counts, rule):
    splits = encode(make_section(path=write_jsonl(ROWS), validation=validation, test=test, split_rule=rule))
    found = [lines(split) if split else [] for split in (splits.train, splits.validation, splits.test)]
    assert tuple(map(len, found)) == counts
    assert sorted(number for split in found for number in split) == list(range(1, 41))
    assert all(split == sorted(split) for split in found)


@pytest.mark.parametrize(
    ("num_rows", "size"), [(39, 0), (40, 8), (169, 8), (170, 9), (1000, 50), (4000, 200), (100_000, 200)]
)
def test_auto_is_5_percent_between_8_and_200_rows(num_rows, size):
    assert SplitSize("auto").of(num_rows) == size


@pytest.mark.parametrize(
    ("num_different", "copies", "size"), [(30, 2, 8), (90, 2, 10), (30, 5, 10), (30, 30, 60), (30, 400, 200)]
)
def test_auto_keeps_equal_rows_together_up_to_200_rows(num_different, copies, size):
    digests = [digest_row(number) for number in range(num_different)] * copies
    sizes = {"validation": SplitSize("auto")}
    held_out = rows_of_split(digests, split="validation", sizes=sizes, rule="content", seed=0, label="rows")
    assert len(held_out) == size


@pytest.mark.parametrize("num_rows", [40, 50, 200, 300])
def test_auto_parts_equal_rows_where_there_are_no_others(num_rows):
    sizes = {"validation": SplitSize("auto")}
    digests = [digest_row(1)] * num_rows
    held_out = rows_of_split(digests, split="validation", sizes=sizes, rule="content", seed=0, label="rows")
    assert len(held_out) == (sizes["validation"].of(num_rows) if num_rows <= 200 else 200)


def test_auto_beside_a_large_test_split_leaves_none_to_train_on():
    sizes = {"validation": SplitSize("auto"), "test": SplitSize("32", rows=32)}
    digests = list(map(digest_row, range(40)))
    with pytest.raises(DataError, match=r"data\.test=32 and data\.validation=auto leave none to train on"):
        rows_of_split(digests, split="train", sizes=sizes, rule="content", seed=0, label="rows")


def test_auto_holds_nothing_out_of_the_small_source_of_a_mixture(make_section, write_jsonl):
    paths = [write_jsonl(ROWS), write_jsonl([{**row, "prompt": row["prompt"] + "!"} for row in ROWS[:39]], "b.jsonl")]
    section = make_section(mixture=[{"path": path, "validation": "auto"} for path in paths])
    assert [len(encode(section).validation), len(encode(section).train)] == [8, 71]
    few = make_section(mixture=[{"path": path, "validation": "auto", "max_rows": 39} for path in paths])
    assert encode(few).validation is None


def test_auto_holds_rows_out_of_one_file_and_keeps_the_test_rows(make_section, write_jsonl, logged):
    path = write_jsonl(ROWS)
    section = make_section(path=path, validation="auto")
    for one_file in (section, make_section(train=path, validation="auto")):
        splits = encode(one_file)
        assert [len(splits.train), len(splits.validation), splits.test] == [32, 8, None]
        assert holds_out_by_default(one_file)
        assert has_validation(one_file)
    tested = make_section(path=path, test="10")
    both = encode(tested.model_copy(update={"validation": "auto"}))
    assert lines(both.test) == lines(encode(tested).test)
    assert [len(both.train), len(both.validation)] == [22, 8]  # of all 40 rows, not of the 30 that are no test rows
    few = section.model_copy(update={"max_rows": 39})
    assert not has_validation(few)
    splits = encode(few)
    assert [len(splits.train), splits.validation] == [39, None]
    assert "validation is off: data.validation=auto holds nothing out of fewer than 40 rows" in logged()


def test_auto_holds_rows_out_of_several_files_of_training_rows_as_of_one(make_section, write_jsonl):
    files = [write_jsonl(ROWS[:30], "rows/a.jsonl"), write_jsonl(ROWS[30:], "rows/b.jsonl")]
    for path in (files, files[0].rpartition("/")[0]):
        section = make_section(path=path, validation="auto")
        splits = encode(section)
        assert [len(splits.train), len(splits.validation)] == [32, 8]
        assert has_validation(section)


def test_auto_is_the_split_of_that_name_where_there_is_more_than_one_file(make_section, write_jsonl):
    path = write_jsonl(ROWS)
    others = [{**row, "prompt": f"Yo {number}"} for number, row in enumerate(ROWS)]
    folder = write_jsonl(others, "rows/train.jsonl").rpartition("/")[0]
    for keys in ({"path": folder}, {"mixture": [{"path": path}, {"path": folder}]}):
        section = make_section(validation="auto", **keys)
        assert encode(section).validation is None
        assert not holds_out_by_default(section)
        assert not has_validation(section)
    of_one_source = make_section(mixture=[{"path": path, "validation": "auto"}, {"path": folder}])
    assert len(encode(of_one_source).validation) == 8
    write_jsonl([{"prompt": "Hi", "completion": "no"}], "rows/dev.jsonl")
    named = make_section(path=folder, validation="auto")
    assert len(encode(named).validation) == 1
    assert has_validation(named)


def test_a_row_that_stands_twice_does_not_end_a_run_that_named_no_validation(make_section, write_jsonl, logged):
    path = write_jsonl([{**row, "copy": copy} for copy in range(2) for row in ROWS])
    splits = encode(make_section(path=path, validation="auto"))
    assert [len(splits.train), len(splits.validation)] == [72, 8]
    assert any("of 8 rows are training rows too" in line for line in logged())
    with pytest.raises(DataError, match="of 8 rows are training rows too"):
        encode(make_section(path=path, validation="8"))


@pytest.mark.parametrize("rule", ["content", "position"])
def test_which_rows_are_put_aside_depends_on_split_seed_alone(make_section, write_jsonl, rule):
    section = make_section(path=write_jsonl(ROWS), test=0.25, split_rule=rule)
    first = lines(encode(section).test)
    assert lines(encode(section).test) == first
    assert lines(encode(section.model_copy(update={"validation": "0.2"})).test) == first
    assert lines(encode(section.model_copy(update={"split_seed": 1})).test) != first


def test_the_order_is_the_same_on_every_machine():
    assert shuffled(8, 0) == [1, 5, 6, 0, 7, 4, 2, 3]
    assert sorted(shuffled(1000, 5)) == list(range(1000))
    assert digest_row({"b": [1, None], "a": "é\ud800"}) == digest_row({"a": "é\ud800", "b": [1, None]})
    assert digest_row({"prompt": "Hi 0", "completion": "yes"}) == "5a5c3db2b8774dbd6b46fb582f2cf8de"
    assert held_out(ROWS, "test", test=4) == [4, 19, 28, 34]


def held_out(rows: list, split: str, seed: int = 0, **sizes: int) -> list[int]:
    """The rows of a split by their content, with these sizes of the others."""
    of_splits = {name: SplitSize(str(size), rows=size) for name, size in sizes.items()}
    digests = list(map(digest_row, rows))
    return rows_of_split(digests, split=split, sizes=of_splits, rule="content", seed=seed, label="rows")


def test_an_edit_of_the_rows_moves_at_most_one_other_row_in_or_out_of_a_split():
    chance = random.Random(0)
    for _ in range(300):
        sizes = {"test": chance.randint(1, 6), "validation": chance.randint(1, 6)}
        seed = chance.randrange(5)
        # Some rows are equal, as in the files that people have.
        rows = [{"text": str(chance.randrange(30))} for _ in range(chance.randint(14, 40))]
        before = {split: held_out(rows, split, seed, **sizes) for split in ("train", *sizes)}
        assert {split: len(before[split]) for split in sizes} == sizes
        assert sorted(chain(*before.values())) == list(range(len(rows)))
        assert held_out(rows, "test", seed, test=sizes["test"]) == before["test"]

        content = {split: Counter(rows[row]["text"] for row in chosen) for split, chosen in before.items()}
        parted = [text for text in {row["text"] for row in rows} if sum(text in of for of in content.values()) > 1]
        assert len(parted) <= len(sizes)  # one at the end of each split

        edited, gone, new = list(rows), None, None
        edit = chance.choice(["remove", "add", "move"])
        if edit != "add":
            gone = edited.pop(chance.randrange(len(edited)))
        if edit != "remove":
            new = gone or {"text": str(chance.randrange(60))}
            edited.insert(chance.randrange(len(edited) + 1), new)
        for split, counts in content.items():
            after = Counter(edited[row]["text"] for row in held_out(edited, split, seed, **sizes))
            left, came = counts - after, after - counts
            if edit == "move":
                assert after == counts
            # The edited row itself and one other.
            assert (left - Counter(gone and [gone["text"]])).total() <= 1
            assert (came - Counter(new and [new["text"]])).total() <= 1


def test_the_rows_seen_before_encoding_are_those_encoded(make_section, write_jsonl):
    section = make_section(path=write_jsonl(ROWS), validation="0.2")
    examples, encoded = load_examples(section), encode(section)
    assert [example.number for example in examples.train] == lines(encoded.train)
    assert [example.number for example in examples.validation] == lines(encoded.validation)


def test_a_row_keeps_its_split_in_every_kind_of_file(make_section, write_jsonl, tmp_path):
    rows = Dataset.from_list(ROWS)
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    rows.to_csv(str(tmp_path / "rows.csv"))
    rows.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    paths = [write_jsonl(ROWS), *(str(tmp_path / name) for name in ("rows.parquet", "rows.csv", "saved", "rows.json"))]
    chosen = [[row.prompt for row in load_examples(make_section(path=path, test="8")).test] for path in paths]
    assert len(chosen[0]) == 8
    assert all(prompts == chosen[0] for prompts in chosen)


def test_answers_of_one_conversation_and_sides_of_a_pair_stay_together(make_section, write_jsonl):
    turns = [{"role": role, "content": f"{role} 1"} for role in ("user", "assistant")] * 2
    talks = [{"messages": [{"role": "system", "content": str(number)}, *turns]} for number in range(10)]
    section = make_section(path=write_jsonl(talks), test="3", train_on="each_turn")
    encoded = encode(section).test
    assert (encoded.num_examples, len(encoded)) == (3, 6)
    assert sorted(set(lines(encoded))) == [example.number for example in load_examples(section).test]

    pairs = [{"prompt": f"Hi {number}", "chosen": "yes", "rejected": "no"} for number in range(20)]
    path = write_jsonl(pairs, "pairs.jsonl")
    splits = encode_preferences(make_section(path=path, validation="5"), tiny_tokenizer("phi4_mini"))
    assert lines(splits.validation.chosen) == lines(splits.validation.rejected)
    assert len(splits.validation) == 5


def test_a_source_is_encoded_once_for_all_of_its_splits(make_section, write_jsonl, logged):
    encode(make_section(path=write_jsonl(ROWS), validation="0.2", test="0.2"))
    assert sum(": 40 rows of " in line for line in logged()) == 1
    assert not any("encoded before" in line for line in logged())


def test_the_rows_of_a_source_are_ranked_once_for_all_of_its_splits(make_section, write_jsonl, monkeypatch):
    hashed = []
    module = "finetune.data.held_out"
    monkeypatch.setattr(f"{module}.blake2b", lambda *data, **keys: hashed.append(data) or blake2b(*data, **keys))
    monkeypatch.setattr(f"{module}._ranked", {})
    encode(make_section(path=write_jsonl(ROWS), validation="0.1", test="0.2"))
    assert len(ROWS) <= len(hashed) < 2 * len(ROWS), "a hash of each row, and one of all rows for each split"


def test_a_split_or_a_file_of_that_name_comes_first(make_section, write_jsonl):
    write_jsonl(ROWS[:3], "rows/train.jsonl")
    path = write_jsonl(ROWS[3:5], "rows/5.jsonl").rpartition("/")[0]
    assert lines(encode(make_section(path=path, validation="5")).validation) == [1, 2]


@pytest.mark.parametrize("text", ["0", "1.0", "1.5", "100%", "-0.1", "0%"])
def test_what_is_no_share_is_refused(text):
    message = rf"data.test is {text}: expected a fraction .* above 0 .*, the name of a split, .* or none"
    with pytest.raises(DataError, match=message):
        parse_split_size(text, "test")


def test_shares_that_leave_nothing_to_train_on_are_refused():
    sizes = {"validation": SplitSize("0.5", fraction=0.5), "test": SplitSize("2", rows=2)}
    digests = [digest_row(row) for row in range(4)]
    for split in ("train", "validation", "test"):
        with pytest.raises(
            DataError, match=r"rows has 4 rows, and data.test=2 and data.validation=0.5 leave none to train on"
        ):
            rows_of_split(digests, split=split, sizes=sizes, rule="content", seed=0, label="rows")
