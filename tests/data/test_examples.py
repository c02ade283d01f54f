from __future__ import annotations

import subprocess
import sys

import pytest
from datasets import Dataset, DatasetDict

from finetune.data.examples import load_examples, missing_here
from finetune.errors import ConfigError, DataError

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]}


def test_one_file_is_all_training_data_and_the_log_says_so(make_section, write_jsonl, logged):
    splits = load_examples(make_section(path=write_jsonl([CHAT, CHAT])))
    assert len(splits.train) == 2
    assert splits.validation is splits.test is None
    assert logged()[0].startswith(
        "validation is off: the data is one file without validation rows; data.validation can name "
    )
    assert logged()[1].startswith("test is off: ")


@pytest.mark.parametrize("name", ["validation", "valid", "dev"])
def test_a_folder_of_split_files(make_section, write_jsonl, tmp_path, name):
    write_jsonl([CHAT], "rows/train.jsonl")
    write_jsonl([CHAT] * 2, f"rows/{name}.jsonl")
    Dataset.from_list([CHAT] * 3).to_parquet(tmp_path / "rows/test.parquet")
    splits = load_examples(make_section(path=str(tmp_path / "rows")))
    assert [len(splits.train), len(splits.validation), len(splits.test)] == [1, 2, 3]
    assert splits.train[0].source == f"{tmp_path}/rows/train.jsonl:1"
    assert splits.test[2].source == f"{tmp_path}/rows/test.parquet row 3"
    assert splits.test[2].messages == splits.train[0].messages


def test_splits_can_be_named_or_be_files_elsewhere(make_section, write_jsonl, tmp_path, logged):
    write_jsonl([CHAT], "rows/small.jsonl")
    write_jsonl([CHAT] * 2, "rows/large.jsonl")
    other = write_jsonl([CHAT] * 3, "other.jsonl")
    splits = load_examples(make_section(path=str(tmp_path / "rows"), train="large", validation=other))
    assert [len(splits.train), len(splits.validation)] == [2, 3]
    assert "rows has no split named test or testing; data.test can name one" in logged()[0]


def test_a_split_that_is_there_can_be_left_out(make_section, write_jsonl, tmp_path, logged):
    for name in ("train", "validation", "test"):
        write_jsonl([CHAT], f"rows/{name}.jsonl")
    folder = str(tmp_path / "rows")
    alone = load_examples(make_section(path=folder, validation="none", test="none"))
    assert (len(alone.train), alone.validation, alone.test) == (1, None, None)
    assert logged()[:2] == ["validation is off: data.validation is none", "test is off: data.test is none"]
    mixed = load_examples(make_section(mixture=[{"path": folder}, {"path": folder, "test": "none"}], validation="none"))
    assert (len(mixed.train), mixed.validation, len(mixed.test)) == (2, None, 1)
    with pytest.raises(DataError, match=r"data\.train is none, which is neither"):
        load_examples(make_section(path=folder, train="none"))


def test_a_datasets_directory_with_and_without_splits(make_section, tmp_path):
    rows = Dataset.from_list([CHAT] * 2)
    DatasetDict({"train": rows, "dev": rows}).save_to_disk(tmp_path / "several")
    rows.save_to_disk(tmp_path / "one")
    several = load_examples(make_section(path=str(tmp_path / "several")))
    assert several.validation[1].source == f"{tmp_path}/several/dev row 2"
    one = load_examples(make_section(path=str(tmp_path / "one")))
    assert one.train[0].contents == ("Hi", "yes")
    assert one.validation is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "nowhere.jsonl"}, "data.path is nowhere.jsonl, but there is no such file or folder"),
        ({"path": "~no-such-user/a.jsonl"}, "data.path is ~no-such-user/a.jsonl, but there is no such file or folder"),
        ({"path": "{here}/a.txt"}, "a.txt ends in .txt; expected one of .jsonl, .ndjson, .json, .csv, .tsv, .parquet"),
        ({"path": "{here}/empty"}, "a folder without data files. Expected train.jsonl or train.ndjson or"),
        ({"path": "{here}/texts"}, "a folder of texts: b.txt ends in .txt; expected one of .jsonl"),
        (
            {"path": "{here}/run"},
            "the folder of a run. Name the rows: those of this run are data.* in {here}/run/config",
        ),
        ({"path": "{here}/model"}, "the folder of a model. Name the rows here, and the model in model.path"),
        ({"path": "{here}/tests"}, "a folder with a, test, but no train. Name the split to train on"),
        ({"path": "{here}/twice"}, "has both train.csv and train.jsonl. Remove one of them."),
        ({"path": "{here}/broken"}, "cannot be read as a datasets directory"),
        ({"path": "{here}/other", "train": "big"}, "neither a file nor a split of {here}/other (a folder of parts"),
        ({"path": "{here}/" + "a" * 300}, "which cannot be read: File name too long (ENAMETOOLONG)"),
        ({"path": "{here}/loop"}, "which cannot be read: Too many levels of symbolic links (ELOOP)"),
        ({"path": "/dev/null"}, "data.path is /dev/null, which cannot be read: Not a directory (ENOTDIR)"),
    ],
)
def test_what_is_not_there_is_named(make_section, tmp_path, keys, message):
    (tmp_path / "a.txt").touch()
    for name in (
        "texts/b.txt",
        "run/config.yaml",
        "run/run.json",
        "run/log.txt",
        "model/config.json",
        "model/model.safetensors",
        "other/small.jsonl",
        "other/large.jsonl",
        "twice/train.jsonl",
        "twice/train.csv",
        "tests/a.csv",
        "tests/test.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/state.json").write_text("{")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError) as caught:
        load_examples(make_section(**{key: value.format(here=tmp_path) for key, value in keys.items()}))
    assert message.format(here=tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["json", "text"])
def test_a_reader_of_datasets_is_no_data_set(make_section, write_jsonl, tmp_path, monkeypatch, name):
    write_jsonl([CHAT], "train.jsonl")
    monkeypatch.chdir(tmp_path)
    section = make_section(path=name)
    assert missing_here(section) == [f"data.path is {name}, but there is no such file or folder. Correct the path."]
    with pytest.raises(DataError, match=f"data.path is {name}, but there is no such file or folder"):
        load_examples(section)
    Dataset.from_list([CHAT] * 3).to_parquet(tmp_path / name / "train-00000-of-00001.parquet")
    assert len(load_examples(section).train) == 3


def test_the_split_of_one_file_can_be_named(make_section, write_jsonl):
    path = write_jsonl([CHAT])
    assert len(load_examples(make_section(path=path, train="train")).train) == 1
    assert len(load_examples(make_section(path=[path, path], train="train")).train) == 2
    with pytest.raises(ConfigError, match="both name the training data"):
        load_examples(make_section(path=path, train="dev"))


def test_no_path_and_two_training_files_are_config_errors(make_section, write_jsonl):
    with pytest.raises(ConfigError, match=r"data\.path is not set"):
        load_examples(make_section())
    path = write_jsonl([CHAT])
    with pytest.raises(ConfigError, match="both name the training data"):
        load_examples(make_section(path=path, train=path))


@pytest.mark.process
def test_finding_json_lines_imports_nothing_heavy():
    script = (
        "import sys; from finetune.config.schema import DataSection; from finetune.data.examples import load_examples;"
        "print(len(load_examples(DataSection(path='shipped:orders')).train));"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pandas', 'accelerate') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["2000", "[]"]


def test_a_path_that_cannot_be_looked_at_is_not_called_missing(make_section):
    section = make_section(path="a" * 300 + ".jsonl", validation="b" * 300)
    assert missing_here(section) == []
    with pytest.raises(DataError):
        load_examples(section)
    with pytest.raises(DataError, match="neither a file nor a split"):
        load_examples(make_section(path="shipped:orders", validation="b" * 300))
