"""The parts of a split that are measured on their own: their names, and the column that divides the rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from finetune import load_config
from finetune.data.encoded import EncodedExamples
from finetune.data.mixture import names_of_sources
from finetune.data.subsets import MOST_VALUES, by_column
from finetune.errors import DataError
from finetune.training.validation import answered_rows, measured_in_subsets
from tests.data.conftest import encode


def rows_of(examples: EncodedExamples | None) -> dict[str, str]:
    """The name of the subset of each row, by the row's place."""
    names = examples.subset_names
    return {
        Path(examples.source(row)).name: names[int(examples.subset[row])] if names else ""
        for row in range(len(examples))
    }


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/chats.jsonl.gz", "b/faq.csv"], ["chats", "faq"]),
        (["support/train.jsonl", "sales/train.jsonl"], ["support-train", "sales-train"]),
        (["shipped:orders", "someone/large-set", "s3://bucket/rows/de.jsonl"], ["orders", "large-set", "de"]),
        (["/data/my rows/", "./set.v2", "../x/Größen.json"], ["my_rows", "set.v2", "Größen"]),
        (["a.jsonl", "a.jsonl", "x/a.jsonl", "y.jsonl"], ["a", "a-2", "x-a", "y"]),
    ],
)
def test_a_source_is_named_by_as_much_of_its_path_as_tells_it_apart(paths, names):
    assert names_of_sources([{"path": path} for path in paths]) == names


def test_each_source_of_a_mixture_is_a_subset(make_section, write_jsonl):
    ours = [{"prompt": f"Hi {number}", "completion": "yes"} for number in range(10)]
    theirs = [{"text": f"the answer {number}"} for number in range(4)]
    mixture = [{"path": write_jsonl(ours, "chats.jsonl")}, {"path": write_jsonl(theirs, "texts.jsonl")}]
    splits = encode(make_section(mixture=mixture, validation="25%"))
    for split in (splits.train, splits.validation):
        assert split.subset_names == ("chats", "texts")
        assert all(place.startswith(name) for place, name in rows_of(split).items())
    assert Counter(rows_of(splits.validation).values()) == {"chats": 3, "texts": 1}
    alone = encode(make_section(path=mixture[0]["path"], validation="25%")).validation
    named_once = encode(
        make_section(mixture=mixture, validation=write_jsonl(theirs[:2], "dev.jsonl"), on_overlap="warn")
    )
    for split in (alone, named_once.validation):
        assert split.subset_names == ()


def test_a_column_divides_validation_and_test_rows(make_section, write_jsonl):
    values: list[object] = ["de", " en ", True, 3, 2.5, "a b", "a_b", "de"]
    rows = [{"prompt": f"Hi {n}", "completion": "yes", "kind": value} for n, value in enumerate(values)]
    section = make_section(
        train=write_jsonl([{"prompt": "Hi", "completion": "no"}]),
        validation=write_jsonl(rows, "dev.jsonl"),
        test=write_jsonl(rows[:2], "test.jsonl"),
        on_overlap="warn",
    )
    splits = encode(section)
    found = by_column(section, "kind", {"validation": splits.validation, "test": splits.test})
    assert found["validation"].subset_names == ("2.5", "3", "a_b", "a_b-2", "de", "en", "true")
    of_rows = rows_of(found["validation"])
    assert [of_rows[f"dev.jsonl:{line}"] for line in (1, 2, 3, 4, 5, 8)] == ["de", "en", "true", "3", "2.5", "de"]
    assert rows_of(found["test"]) == {"test.jsonl:1": "de", "test.jsonl:2": "en"}
    assert found["validation"].fingerprint == splits.validation.fingerprint
    chosen = found["validation"].select([7, 1])
    assert rows_of(chosen) == {"dev.jsonl:8": "de", "dev.jsonl:2": "en"}


def test_metrics_of_a_script_are_measured_in_each_subset(make_section, write_jsonl):
    rows = [{"prompt": f"Hi {n}", "completion": "yes", "kind": "de" if n % 2 else "en"} for n in range(4)]
    section = make_section(path=write_jsonl(rows), validation="50%")
    found = by_column(section, "kind", {"validation": encode(section).validation})["validation"]
    config = load_config(["model=phi_tiny", "data=orders", "validation.by=kind"])
    names = sorted(set(rows_of(found).values()))
    measured = measured_in_subsets(config, found, {"mine": len})
    assert measured == [f"{metric}/{name}" for name in names for metric in ("loss", "mine")]
    assert measured_in_subsets(config, found, {}) == [f"loss/{name}" for name in names]


def test_metrics_are_measured_in_the_subsets_of_the_rows_that_are_answered(make_section, write_jsonl):
    rows = [{"prompt": f"Hi {n}", "completion": "yes", "kind": "de" if n % 2 else "en"} for n in range(8)]
    section = make_section(path=write_jsonl(rows), validation="50%")
    found = by_column(section, "kind", {"validation": encode(section).validation})["validation"]

    def answered(*words):
        return load_config(["model=phi_tiny", "data=orders", "validation.by=kind", "validation.num_samples=1", *words])

    config = answered()
    sample = answered_rows(config, found)
    (subset,) = (found.subset_names[index] for index in sample.subset.tolist())
    assert len({*rows_of(found).values()}) == 2
    assert [name for name in measured_in_subsets(config, found, {"mine": len}) if "mine" in name] == [f"mine/{subset}"]

    def sources(config):
        return [[rows.source(row) for row in range(len(rows))] for rows in [answered_rows(config, found)]]

    others = [sources(answered(f"data.split_seed={seed}")) for seed in range(9)]
    assert sources(answered("seed=7")) == sources(config) in others
    assert any(other != others[0] for other in others)


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([None, "", "a"], "2 of 3 validation rows have no value in such a column; the first is .*dev.jsonl:1. Name a"),
        (["a", ["b"], "c"], r"dev.jsonl:2 has \['b'\] there; expected text, a number, or true or false"),
        (
            list(range(MOST_VALUES + 1)),
            f"kind, which has {MOST_VALUES + 1} different values in the validation rows .*At most {MOST_VALUES}",
        ),
    ],
)
def test_a_column_that_does_not_divide_the_rows_is_refused(make_section, write_jsonl, kinds, said):
    rows = [{"prompt": f"Hi {n}", "completion": "yes", "kind": kind} for n, kind in enumerate(kinds)]
    section = make_section(
        train=write_jsonl([{"prompt": "Hi", "completion": "no"}]), validation=write_jsonl(rows, "dev.jsonl")
    )
    validation = encode(section).validation
    with pytest.raises(DataError, match=said):
        by_column(section, "kind", {"validation": validation})
