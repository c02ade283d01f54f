"""Rows whose answers are marked as good or bad: no objective may learn the bad ones in silence."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from finetune.data.preferences import encode_labelled, encode_preferences
from finetune.errors import DataError
from tests.data.conftest import encode_train, write_lines
from tests.in_process import run_finetune
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny_phi3_config
from tests.tiny_runs import MODEL_VOCABULARY

ADVICE = (
    "Supervised training and preference pairs do not use labels: answers marked false would be learned like the "
    "others. Set training.objective=kto to learn from both, remove these rows and the column label, or "
    "set data.columns.label=none to use every row whatever its "
    "label."
)
NOTE = "label (label is 0 or 1, which is not read as bad or good: every row is used)"


def rows(*labels: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p{number}", "completion": "yes", "label": label} for number, label in enumerate(labels)]


def write_as_csv(path: Path, content: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, content[0])
        writer.writeheader()
        writer.writerows(content)
    return str(path)


def write_as_parquet(path: Path, content: list[dict[str, Any]]) -> str:
    datasets.Dataset.from_list(content).to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize("command", ["train", "preview"])
def test_rows_with_a_boolean_label_are_refused(tmp_path, command):
    tiny_phi3_config(vocab_size=MODEL_VOCABULARY).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    path = write_lines(tmp_path / "thumbs.jsonl", rows(True, False, True, False))
    words = [f"model.path={tmp_path / 'base'}", "model.init=random", f"data.cache_dir={tmp_path / 'cache'}"]
    words += [f"data.path={path}", *([f"output_dir={tmp_path / 'run'}"] if command == "train" else [])]
    for _ in ("first", "second"):  # nothing was cached that a second try would accept
        ended = run_finetune(command, "task=finetune_lora", *words)
        assert ended.returncode == 2
        said = " ".join(ended.stdout.split())
        assert f"{path}: the column label is true in 2 of 4 rows and false in 2; the first false is {path}:2. " in said
        assert ADVICE in said
        assert "Traceback" not in said


@pytest.mark.parametrize(("name", "write"), [("a.csv", write_as_csv), ("a.parquet", write_as_parquet)])
def test_tables_with_a_boolean_label_are_refused(make_section, tmp_path, name, write):
    path = write(tmp_path / name, rows(True, False))
    with pytest.raises(DataError, match=r"true in 1 of 2 rows and false in 1; the first false is .* row 2"):
        encode_train(make_section(path=path))


@pytest.mark.parametrize(
    ("labels", "counts"),
    [
        ((True, True), "true in 2 of 2 rows and false in 0; the first true is .*:1"),
        ((None, False, "neutral"), "true in 0 of 3 rows and false in 1; the first false is .*:2"),
    ],
)
def test_one_boolean_is_enough(make_section, write_jsonl, labels, counts):
    with pytest.raises(DataError, match=rf"is {counts}"):
        encode_train(make_section(path=write_jsonl(rows(*labels))))


@pytest.mark.parametrize("labels", [("positive", "negative"), (0, 3)])
def test_classes_stay_a_column_that_is_not_used(make_section, logged, write_jsonl, labels):
    assert len(encode_train(make_section(path=write_jsonl(rows(*labels))))) == 2
    assert any(line.endswith("; columns not used: label") for line in logged())


def test_of_0_and_1_the_log_says_that_they_are_not_read(make_section, logged, tmp_path):
    section = make_section(path=write_as_csv(tmp_path / "a.csv", rows(0, 1, 1)))
    assert len(encode_train(section)) == 3
    assert any(line.endswith(f"; columns not used: {NOTE}") for line in logged())
    assert len(encode_train(section)) == 3
    assert any(NOTE in line and "encoded before" in line for line in logged())


def test_pairs_with_labels_are_refused_unless_the_user_leaves_them_unread(make_section, write_jsonl):
    pair = {"prompt": "p", "chosen": "yes", "rejected": "no", "label": False}
    path = write_jsonl([pair, json.dumps(pair | {"prompt": "q"})])
    with pytest.raises(DataError, match="the column label is true in 0 of 2 rows and false in 2"):
        encode_preferences(make_section(path=path), tiny_tokenizer())
    pairs = encode_preferences(make_section(path=path, columns={"label": "none"}), tiny_tokenizer())
    assert len(pairs.train) == 2


def test_labelled_rows_keep_their_labels_encoded_and_from_the_cache(make_section, write_jsonl):
    section = make_section(path=write_jsonl(rows(True, False, "bad", 1)))
    for _ in range(2):
        labelled = encode_labelled(section, tiny_tokenizer()).train
        assert labelled.is_good.tolist() == [True, False, False, True]
        assert [row.is_good for row in labelled] == [True, False, False, True]


def test_a_check_leaves_out_both_sides_of_a_pair_or_keeps_them(make_section, write_jsonl):
    pairs = [
        {"prompt": f"p{k}", "chosen": "yes" * k, "rejected": "no" * n} for k, n in enumerate((1, 1, 40, 1), start=1)
    ]
    pairs[0]["chosen"] = "yes" * 40
    section = make_section(path=write_jsonl(pairs), max_length=20)
    with pytest.raises(DataError, match=r"2 of 4 pairs have an answer that .*:1 \(\d+ tokens\), .*:3 \("):
        encode_preferences(section, tiny_tokenizer())
    dropped = encode_preferences(section.model_copy(update={"on_truncated_answer": "drop"}), tiny_tokenizer()).train
    assert dropped.chosen.numbers.tolist() == dropped.rejected.numbers.tolist() == [2, 4]
    kept = encode_preferences(section.model_copy(update={"on_truncated_answer": "warn"}), tiny_tokenizer()).train
    assert len(kept) == 4


def test_an_answer_with_both_labels_is_named(make_section, write_jsonl, logged):
    pairs = [("p1", True), ("p2", False), ("p1", False), ("p3", True), ("p2", False)]
    content = [{"prompt": prompt, "completion": "yes", "label": label} for prompt, label in pairs]
    section = make_section(path=write_jsonl(content))
    encode_labelled(section, tiny_tokenizer())
    (said,) = (line for line in logged() if "other label" in line)
    assert re.search(
        r"train: 1 of 5 rows have the prompt and the answer of a row with the other label: .*:3 is .*:1\. Remove one",
        said,
    )
    encode_labelled(section, tiny_tokenizer(), is_checked=False)
    assert sum("other label" in line for line in logged()) == 1
