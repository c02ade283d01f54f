"""The first rows of a stream, through `datasets` itself on local folders: read once, kept, and read from there."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest
from datasets import Dataset

from finetune.config.compose import compose
from finetune.config.schema import DataSection
from finetune.data.encode import encode_examples
from finetune.data.examples import load_examples
from finetune.errors import ConfigError, DataError
from tests.tiny import tiny_tokenizer

Make = Callable[..., DataSection]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A data set as it lies on the hub: a split in several Parquet files, with columns that JSON has no word for."""
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for split, count in (("train", 3), ("test", 1)):
        for shard in range(count):
            rows = [
                {
                    "prompt": f"{split} {shard * 5 + row}",
                    "completion": "yes",
                    "when": datetime.datetime(2024, 1, 1),
                    "score": float("nan"),
                }
                for row in range(5)
            ]
            Dataset.from_list(rows).to_parquet(folder / f"{split}-{shard:05d}-of-{count:05d}.parquet")
    return folder.parent


def test_the_first_rows_of_a_stream_are_read_and_kept(
    make_section: Make, shards: Path, logged: Callable[[], list[str]]
) -> None:
    section = make_section(path=str(shards), stream=True, max_rows=7)
    examples = load_examples(section)
    assert [example.prompt for example in examples.train] == [f"train {row}" for row in range(7)]
    assert examples.test is not None
    assert len(examples.test) == 5
    assert examples.train[6].source == f"{shards} train row 7"
    assert f"{shards} train: 7 rows read as a stream" in logged()
    kept = sorted(Path(section.cache_dir).glob("streamed-*.jsonl"))
    assert sorted(len(path.read_text().splitlines()) for path in kept) == [5, 7]
    splits = encode_examples(examples, tiny_tokenizer(), section)
    assert (len(splits.train), splits.train.source(0)) == (7, f"{shards} train row 1")


def test_kept_rows_are_read_again_without_the_stream(
    make_section: Make, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = make_section(path=str(shards), stream=True, max_rows=7)
    first = [example.prompt for example in load_examples(section).train]
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the stream was read again"))
        assert [example.prompt for example in load_examples(section).train] == first
    more = load_examples(section.model_copy(update={"max_rows": 8})).train
    assert len(more) == 8


def test_files_that_have_changed_are_read_anew(make_section: Make, shards: Path) -> None:
    section = make_section(path=str(shards), stream=True, max_rows=2)
    assert load_examples(section).train[0].prompt == "train 0"
    for path in shards.rglob("*.parquet"):
        Dataset.from_list([{"prompt": "new", "completion": "yes"}] * 2).to_parquet(path)
    assert load_examples(section).train[0].prompt == "new"


def test_a_folder_that_cannot_be_streamed_is_a_data_error(make_section: Make, shards: Path) -> None:
    for path in shards.rglob("*.parquet"):
        path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"set, which cannot be read as a stream: "):
        load_examples(make_section(path=str(shards), stream=True, max_rows=2))


def test_a_share_is_put_aside_of_a_stream_too(make_section: Make, shards: Path) -> None:
    section = make_section(path=str(shards), stream=True, max_rows=10, validation="0.2")
    splits = encode_examples(load_examples(section), tiny_tokenizer(), section)
    assert splits.validation is not None
    assert (len(splits.train), len(splits.validation)) == (8, 2)


def test_a_stream_has_an_end() -> None:
    with pytest.raises(ConfigError, match=r"data.stream: true needs data.max_rows: how many rows"):
        compose(["model=phi_tiny", "data.path=someone/chats", "data.stream=true"])


def test_a_stream_that_cannot_be_kept_is_refused(make_section: Make, shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    section = make_section(path=str(shards), stream=True, max_rows=2, cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"where the rows of a stream are kept, .* Not a directory \(ENOTDIR\)"):
        load_examples(section)


def test_a_file_needs_no_stream_and_the_log_says_so(
    make_section: Make, tmp_path: Path, logged: Callable[[], list[str]]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 3)
    assert len(load_examples(make_section(path=str(tmp_path / "rows.jsonl"), stream=True, max_rows=2)).train) == 2
    assert any("data.stream has no effect on " in line for line in logged())
