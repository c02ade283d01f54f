"""Reading from a hub that answers, refuses, is silent or is not there: in real requests of the real clients."""

from __future__ import annotations

import datetime
import logging
import re
import time
from importlib.metadata import version
from pathlib import Path

import datasets
import pytest
from datasets import Dataset
from huggingface_hub import constants
from packaging.version import Version

from finetune.config import hub
from finetune.config.config_files import resolve_shipped
from finetune.config.hub import Repository, find_fault
from finetune.config.schema import DataSection, ModelSection
from finetune.data.encode import encode_examples
from finetune.data.examples import load_examples
from finetune.errors import DataError, ModelError
from finetune.logs import warn_once
from finetune.model.base import build_base_model, read_model_config
from finetune.model.tokens import build_tokenizer
from tests import readable_hub
from tests.data.conftest import give_away
from tests.in_process import run_finetune
from tests.launches import free_port
from tests.readable_hub import COMMIT, TOKEN, ReadableHub, black_hole, running_hub
from tests.tiny import tiny_tokenizer

TINY = Path(resolve_shipped("shipped:phi_tiny"))
MODEL = ModelSection(path="someone/tiny")
ROWS = '{"prompt": "a", "completion": "b"}\n'

pytestmark = pytest.mark.warm


@pytest.fixture
def logged(caplog, monkeypatch):
    """The messages that finetune has logged."""
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    caplog.set_level("INFO", logger="finetune")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("finetune.")]


@pytest.fixture
def point_to(tmp_path, monkeypatch):
    """Use the hub at an address, with an empty cache, as if nothing had been asked before."""
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "answers_heard", {})
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")

    def point(address):
        hub.answers_heard.clear()
        warn_once.cache_clear()
        readable_hub.point_to(monkeypatch, address)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)

    return point


@pytest.fixture
def served(point_to):
    with running_hub() as state:
        state.folders["someone/tiny"] = TINY
        point_to(state.address)
        yield state


def no_hub() -> str:
    return f"http://127.0.0.1:{free_port()}"


def asked_for_config(state: ReadableHub) -> int:
    return sum(request.endswith("/resolve/main/config.json") for request in state.requests)


@pytest.mark.skipif(Version(version("transformers")) < Version("5.20"), reason="older ones ask several times")
def test_a_model_is_read_from_the_hub_and_asked_for_once(served):
    _, tokenizer = build_base_model(MODEL), build_tokenizer(MODEL)
    assert len(tokenizer) > 0
    assert asked_for_config(served) == 1


def test_a_hub_that_refuses_connections_ends_with_what_to_do(point_to, tmp_path):
    address = no_hub()
    point_to(address)
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        build_tokenizer(MODEL)
    assert time.monotonic() - started < 5
    assert str(caught.value) == (
        f"model.path is someone/tiny, which is neither a folder here nor in the hub's cache ({tmp_path / 'cache'}), "
        f"and {address} cannot be reached ([Errno 111] Connection refused). Run `hf download someone/tiny --local-dir "
        "tiny` on a machine that reaches the hub, copy the folder here and give model.path=tiny; or set HF_HOME to a "
        "cache that has the model; or name a mirror in HF_ENDPOINT."
    )


def test_a_hub_that_is_named_by_hand_is_to_be_checked_first(point_to, monkeypatch):
    point_to("http://me:secret@127.0.0.1:1")
    monkeypatch.setenv("HF_ENDPOINT", "http://me:secret@127.0.0.1:1")
    with pytest.raises(ModelError, match=r"\)\. Check HF_ENDPOINT; or run `hf download") as caught:
        read_model_config(MODEL)
    assert "secret" not in str(caught.value)


def test_a_hub_that_never_answers_is_left_after_the_limit(point_to, monkeypatch):
    monkeypatch.setattr(hub, "LIMIT_SECONDS", 1.0)
    with black_hole() as address:
        point_to(address)
        started = time.monotonic()
        for _ in range(3):  # the second and third time from memory
            with pytest.raises(ModelError, match=r"does not answer within 1 s"):
                build_tokenizer(MODEL)
        assert find_fault(Repository("someone/else", None, "dataset")) is not None
        assert time.monotonic() - started < 3.5


def test_a_question_that_may_wait_longer_is_asked_again(point_to, monkeypatch):
    monkeypatch.setattr(hub, "LIMIT_BESIDE_CACHE_SECONDS", 0.2)
    monkeypatch.setattr(hub, "LIMIT_SECONDS", 0.4)
    one, other = Repository("someone/tiny", None, "model"), Repository("someone/rows", None, "dataset")
    with black_hole() as address:
        point_to(address)
        texts = [str(find_fault(it, is_cached=cached)) for it in (one, other) for cached in (True, False)]
    assert ["within 0.2 s" in texts[0], *("within 0.4 s" in text for text in texts[1:])] == [True] * 4


@pytest.mark.slow
def test_a_wait_that_the_user_wants_is_kept(point_to, monkeypatch):
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    with black_hole() as address:
        point_to(address)
        fault = find_fault(Repository("someone/tiny", None, "model"))
    assert fault is not None
    assert fault.text.endswith(("does not answer within 1 s", "cannot be reached (timed out)"))


def test_offline_mode_is_told_and_asks_nothing(served, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"and HF_HUB_OFFLINE is set\. Unset HF_HUB_OFFLINE; or run `hf download"):
        build_base_model(MODEL)
    assert served.requests == []


@pytest.mark.parametrize(
    ("token", "why"), [(None, "it is gated: no token is set"), ("hf_other", "it is gated: your token may not read it")]
)
def test_a_gated_model_needs_a_token(served, monkeypatch, token, why):
    served.gated.add("someone/tiny")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError) as caught:
        build_base_model(MODEL)
    assert str(caught.value).endswith(
        f"and {why}. Ask for access at {served.address}/someone/tiny, then run `hf auth login` or set HF_TOKEN, with a "
        "token of the account that has access."
    )
    assert "hf_other" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.answers_heard.clear()
    assert read_model_config(MODEL).model_type == "phi3"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(path="someone/gone"), r"has none of that name that you may read\. Correct model\.path; if it"),
        (ModelSection(path="someone/tiny", revision="v9"), r"does not have this revision\. Correct model\.revision"),
    ],
)
def test_what_is_not_at_the_hub_is_told(served, section, message):
    with pytest.raises(ModelError, match=message) as caught:
        build_base_model(section)
    assert "hf download" not in str(caught.value)


def test_a_hub_that_is_down_or_no_hub_is_told(served, monkeypatch):
    served.status = 503
    with pytest.raises(ModelError, match=r"answers 503 Service Unavailable\. Try again later; or run `hf download"):
        build_base_model(MODEL)
    hub.answers_heard.clear()
    served.status, served.commit = 200, ""
    with pytest.raises(ModelError, match="is no hub: a proxy, or the page of a login"):
        build_base_model(MODEL)


def test_what_is_in_the_cache_needs_no_network(served, point_to, logged):
    build_base_model(MODEL), build_tokenizer(MODEL)
    with black_hole() as address:
        point_to(address)
        fault = hub.HubFault("unreachable", "it is silent")
        hub.answers_heard[address, "another", None, "model"] = time.monotonic(), hub.LIMIT_SECONDS, fault
        started = time.monotonic()
        _, tokenizer = build_base_model(MODEL), build_tokenizer(MODEL)
        assert time.monotonic() - started < 5
    assert tokenizer.chat_template is not None
    warning = "someone/tiny: it is silent; the copy in the hub's cache is used, which may not be the newest"
    assert [line for line in logged() if "cache" in line] == [warning]


def test_a_copy_that_lacks_a_file_is_no_copy(served, point_to):
    read_model_config(MODEL)
    point_to(no_hub())
    with pytest.raises(ModelError, match=r"which is not complete in the hub's cache \(.*\) \(model\.safetensors is"):
        build_base_model(MODEL)


@pytest.mark.slow
def test_a_slow_download_is_not_cut_off(served, monkeypatch):
    monkeypatch.setattr(hub, "LIMIT_SECONDS", 3.0)
    served.delay_seconds = 0.5  # of each eighth of the weights, which take longer than the limit as a whole
    served.slow_files.add("model.safetensors")
    assert build_base_model(MODEL).config.model_type == "phi3"


@pytest.mark.parametrize("revision", [None, "v9"])
def test_a_data_set_is_asked_for_once_too(served, point_to, revision):
    section = DataSection(path="someone/chats", revision=revision)
    with pytest.raises(
        DataError, match=r"has none of that name that you may read\. Correct data\.path; if it is a priv"
    ):
        load_examples(section)
    assert [request for request in served.requests if "chats" in request][1:] == []
    point_to(no_hub())
    option = "" if revision is None else " --revision v9"
    with pytest.raises(DataError) as caught:
        load_examples(section)
    assert re.fullmatch(
        r"data\.path is someone/chats, which is not a file or folder here and was not prepared here before, and "
        r"http\S+ cannot be reached \(.*\)\. Run `hf download someone/chats --repo-type dataset"
        + option
        + r" --local-dir chats` on a .* give data\.path=chats; or set HF_HOME to a cache that has the data set; or .*",
        str(caught.value),
    )


def test_a_data_set_that_was_prepared_here_needs_no_network(served, point_to, tmp_path):
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "train.jsonl").write_text(3 * ROWS)
    served.folders["datasets/someone/chats"] = tmp_path / "chats"
    assert len(load_examples(DataSection(path="someone/chats")).train) == 3
    point_to(no_hub())
    assert len(load_examples(DataSection(path="someone/chats")).train) == 3


@pytest.fixture
def shards(served, tmp_path):
    """A data set of the hub: a split in several Parquet files, with columns that JSON cannot express."""
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    when, nan = datetime.datetime(2024, 1, 1), float("nan")
    for split, count in (("train", 3), ("test", 1)):
        for shard in range(count):
            rows = [
                {"prompt": f"{split} {shard * 5 + row}", "completion": "yes", "when": when, "score": nan}
                | {"scores": [nan, 1.0], "of": {"score": nan}}
                for row in range(5)
            ]
            Dataset.from_list(rows).to_parquet(folder / "data" / f"{split}-{shard:05d}-of-{count:05d}.parquet")
    served.folders["datasets/someone/chats"] = folder
    return folder


@pytest.mark.slow
def test_only_the_first_rows_of_a_data_set_are_read_and_they_are_kept(
    served, shards, tmp_path, logged, point_to, monkeypatch
):
    section = DataSection(path="someone/chats", max_rows=7, cache_dir=str(tmp_path / "kept"))
    examples = load_examples(section)
    assert [example.prompt for example in examples.train] == [f"train {row}" for row in range(7)]
    assert len(examples.test) == 5
    assert examples.train[6].source == "someone/chats train row 7"
    assert "someone/chats train: the first 7 rows read from the hub" in logged()
    assert not any(request.endswith("train-00002-of-00003.parquet") for request in served.requests)
    splits = encode_examples(examples, tiny_tokenizer(), section)
    assert (len(splits.train), splits.train.source(0)) == (7, "someone/chats train row 1")

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the rows were read again"))
        assert [example.prompt for example in load_examples(section).train] == [f"train {row}" for row in range(7)]
        held_out = section.model_copy(update={"validation": "2"})
        splits = encode_examples(load_examples(held_out), tiny_tokenizer(), held_out)
        assert (len(splits.train), len(splits.validation)) == (5, 2)

        point_to(no_hub())
        assert [example.prompt for example in load_examples(section).train] == [f"train {row}" for row in range(7)]
        assert any("the rows that were read before are used" in line for line in logged())
        for file in (tmp_path / "kept").glob("hub-*.jsonl"):
            give_away(file, patch)
        with pytest.raises(DataError, match=r"which .* was not prepared here before"):
            load_examples(section)
    with pytest.raises(DataError, match=r"data\.path is someone/chats, which .* was not prepared here before"):
        load_examples(section.model_copy(update={"max_rows": 8}))

    (tmp_path / "file").touch()
    point_to(served.address)
    with pytest.raises(DataError, match=r"someone/chats train cannot be written to .* Not a directory"):
        load_examples(section.model_copy(update={"cache_dir": str(tmp_path / "file" / "cache")}))


@pytest.mark.slow
def test_a_slice_is_read_and_an_unknown_configuration_is_named(shards):
    section = DataSection(path="someone/chats", revision=COMMIT, max_rows=7, validation="train[80%:]")
    validation = load_examples(section).validation
    assert [example.prompt for example in validation] == ["train 12", "train 13", "train 14"]
    with pytest.raises(
        DataError, match=r"the hub's data set cannot be read \(ValueError: BuilderConfig 'en' not found"
    ):
        load_examples(section.model_copy(update={"name": "en"}))


@pytest.mark.slow
def test_a_new_commit_of_a_data_set_is_read(served, shards, tmp_path):
    section = DataSection(path="someone/chats", max_rows=2, cache_dir=str(tmp_path / "kept"))
    assert load_examples(section).train[0].prompt == "train 0"
    for path in shards.rglob("*.parquet"):
        Dataset.from_list([{"prompt": "new", "completion": "yes"}] * 2).to_parquet(path)
    served.commit = "beef" * 10
    assert load_examples(section).train[0].prompt == "new"


def test_a_downloaded_data_set_is_read_from_its_folder(shards, served):
    for path in (shards, shards / "data"):
        examples = load_examples(DataSection(path=str(path), max_rows=7))
        assert [example.prompt for example in examples.train] == [f"train {row}" for row in range(7)]
        assert len(examples.test) == 5
    assert served.requests == []
    for path in shards.rglob("*.parquet"):
        path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"set, which cannot be read as a data set \("):
        load_examples(DataSection(path=str(shards)))


@pytest.mark.parametrize(
    ("words", "rows", "message"),
    [
        (["data.path=gone.jsonl"], None, "data.path is gone.jsonl, but there is no such file or folder"),
        (["data.mixture=[{path: gone.jsonl}]"], None, "data.path is gone.jsonl, but there is no such file or folder"),
        (["data.path=rows.jsonl"], '{"question": "a", "answer": "b"}\n', "has the columns question, answer"),
        (["data.path=rows.jsonl", "output_dir=/proc/run"], ROWS, "output_dir=/proc/run cannot be written"),
    ],
)
def test_what_is_wrong_here_is_told_before_the_hub_is_asked(served, tmp_path, monkeypatch, words, rows, message):
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        Path("rows.jsonl").write_text(rows)
    ended = run_finetune("train", "task=finetune_lora", "model.path=someone/tiny", "output_dir=run", *words)
    assert (ended.returncode, message in ended.stdout) == (2, True), ended.stdout
    assert served.requests == []
