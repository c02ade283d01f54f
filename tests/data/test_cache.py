from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from finetune.config.schema import DataSection
from finetune.data import row_file, templates
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.row_file import RowFacts, load_or_encode
from finetune.data.rows import Examples
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallbacks
from tests.data.conftest import give_away
from tests.tiny import tiny_tokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture
def section(make_section, write_jsonl):
    return make_section(path=write_jsonl([CHAT] * 3))


@pytest.fixture
def times_tokenised(monkeypatch):
    """Count the batches of rows that have gone through a tokenizer."""
    calls: list[int] = []

    def counting(*arguments):
        calls.append(1)
        return templates.encode_batch(*arguments)

    monkeypatch.setattr("finetune.data.encode.encode_batch", counting)
    return lambda: len(calls)


def encode(section: DataSection, fallbacks: Fallbacks | None = None, template: str | None = None) -> EncodedExamples:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return encode_examples(load_examples(section), tokenizer, section, fallbacks=fallbacks).train


def cache_files(section: DataSection) -> list[Path]:
    return sorted(Path(section.cache_dir).iterdir())


def test_a_second_time_nothing_is_parsed_or_tokenised(section, times_tokenised, logged, monkeypatch):
    first = encode(section)
    assert times_tokenised() == 1
    monkeypatch.setattr(Examples, "read", lambda self: pytest.fail("the file was parsed"))
    second = encode(section)
    assert times_tokenised() == 1
    as_first = "3 rows of chat messages (format messages, columns messages)"
    assert [line.partition("train.jsonl: ")[2].partition("; encoded before")[0] for line in logged()].count(
        as_first
    ) == 2
    assert second.fingerprint == first.fingerprint
    assert second.row_type == "messages"
    assert second.source(2) == first.source(2) == f"{section.path}:3"
    assert second.prompt_and_answer(0) == first.prompt_and_answer(0)


def test_the_only_cached_file_has_the_same_bytes_however_often_it_is_made(section):
    encode(section)
    (path,) = cache_files(section)
    with safe_open(path, framework="pt") as file:
        assert list(file.metadata()) == ["finetune"]
    before = path.read_bytes()
    path.unlink()
    encode(section)
    assert path.read_bytes() == before


def test_whatever_changes_the_tokens_changes_the_key(section, times_tokenised):
    encode(section)
    encode(section.model_copy(update={"max_length": 8}))
    encode(section.model_copy(update={"max_rows": 2}))
    encode(section.model_copy(update={"format": "messages"}))
    encode(section, template=(tiny_tokenizer().chat_template or "").replace("<|end|>", "<|end|> "))
    Path(section.path).write_text(Path(section.path).read_text().replace("yes", "no"))
    encode(section)
    assert times_tokenised() == len(cache_files(section)) == 6


def test_padding_that_another_call_left_in_the_tokenizer_does_not_change_its_digest():
    tokenizer = tiny_tokenizer()
    before = templates.digest_tokenizer(tokenizer), tokenizer.backend_tokenizer.to_str()
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.to_str() != before[1]
    assert templates.digest_tokenizer(tokenizer) == before[0]


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "one bit"])
def test_a_damaged_file_is_found_and_made_again(section, times_tokenised, logged, damage):
    fingerprint = encode(section).fingerprint
    (path,) = cache_files(section)
    whole = path.read_bytes()
    one_bit = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    damaged = {"cut": whole[:-20], "empty": b"", "other": b"not a tensor" * 9, "one bit": one_bit}
    path.write_bytes(damaged[damage])
    assert encode(section).fingerprint == fingerprint
    assert times_tokenised() == 2
    assert any("is damaged (" in line and "is encoded again" in line for line in logged())
    assert path.read_bytes() == whole


def test_rows_that_cannot_be_used_are_never_cached(make_section, write_jsonl):
    section = make_section(path=write_jsonl([CHAT, "no"]))
    for _ in range(2):
        with pytest.raises(DataError, match=r"train.jsonl:2: not JSON"):
            encode(section)
    assert cache_files(section) == []


def test_a_file_that_changes_while_it_is_read_is_refused_and_never_cached(section, monkeypatch):
    before = Path(section.path).read_text()

    def changing(*arguments):
        Path(section.path).write_text(before.replace("yes", "no"))
        return templates.encode_batch(*arguments)

    monkeypatch.setattr("finetune.data.encode.encode_batch", changing)
    with pytest.raises(DataError, match=r"train\.jsonl has changed while it was read"):
        encode(section)
    assert cache_files(section) == []


def test_without_a_cache_rows_are_mapped_from_a_file_without_a_name_and_that_is_recorded(section, tmp_path):
    cached = encode(section)
    (tmp_path / "file").touch()
    section = section.model_copy(update={"cache_dir": str(tmp_path / "file" / "cache")})
    fallbacks = Fallbacks()
    rows = encode(section, fallbacks)
    assert rows.fingerprint == cached.fingerprint
    if (mapped := Path("/proc/self/maps")).exists():
        assert re.search(rf" {tempfile.gettempdir()}/.* \(deleted\)\n", mapped.read_text())
    encode(section, fallbacks)  # as another split does, which takes the same fallback
    (record,) = fallbacks.as_records()
    assert record["what"] == "data.cache_dir"
    assert record["wanted"] == section.cache_dir
    assert record["why"] == "Not a directory (ENOTDIR)"
    with pytest.raises(ConfigError, match=r"strict"):
        encode(section, Fallbacks(strict=True))


def test_a_disk_that_fills_up_while_writing_is_a_fallback_to_memory(section, monkeypatch):
    whole = encode(section)
    cache_files(section)[0].unlink()
    monkeypatch.setattr("finetune.data.row_file.tempfile.TemporaryFile", lambda **_: OnlyFull())
    fallbacks = Fallbacks()
    assert encode(section, fallbacks).fingerprint == whole.fingerprint
    assert cache_files(section) == []
    assert [record["what"] for record in fallbacks.as_records()] == ["data.cache_dir", "the encoded rows"]
    assert {record["why"] for record in fallbacks.as_records()} == {"No space left on device (ENOSPC)"}


class OnlyFull(BytesIO):
    """A file on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


ENCODE = """
import sys, time
from pathlib import Path
from finetune.data.row_file import load_or_encode
from finetune.data.row_file import RowFacts
from finetune.data.templates import TokenisedRow
from finetune.fallbacks import Fallbacks

def encode(writer):
    print("encoding", flush=True)
    time.sleep(float(sys.argv[2]))
    writer.add(1, TokenisedRow([0], bytearray(1)), max_length=9)
    return RowFacts()

rows = load_or_encode(Path(sys.argv[1]), "0" * 64, encode, Fallbacks(strict=True), "rows")
print("rows", len(rows.token_ids), flush=True)
"""


def start_encoding(tmp_path: Path, seconds: float) -> subprocess.Popen[str]:
    """Another process, which has the lock and takes so long to encode."""
    command = [sys.executable, "-c", ENCODE, str(tmp_path / "cache"), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "encoding\n"
    return process


@pytest.mark.slow
def test_while_one_process_encodes_another_waits_and_reads(tmp_path, logged):
    other = start_encoding(tmp_path, 0.5)
    rows = load_or_encode(
        tmp_path / "cache", "0" * 64, lambda _: pytest.fail("encoded twice"), Fallbacks(strict=True), "rows"
    )
    assert rows.token_ids.tolist() == [0]
    assert other.communicate(timeout=240)[0] == "rows 1\n"
    assert f"waiting for the encoding of rows: process {other.pid} on " in logged()[0]


def _signed(path: Path, **changes: Any) -> None:
    """Write the file again with other tensors and a digest that agrees, as whoever can write the folder could."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()} | changes  # noqa: SIM118
        about = json.loads(file.metadata()["finetune"])
    about["facts"] |= tensors.pop("facts", {})
    about["sha256"] = row_file._digest(tensors, RowFacts(*about["facts"].values()))
    save_file(tensors, path, {"finetune": json.dumps(about)})


LIES = {
    "rows of no type": {"facts": {"row_type": "pickles"}},
    "offsets that point outside": {"offsets": torch.tensor([0, 5, 10**12, 10**15])},
    "tokens of another type": {"token_ids": torch.zeros(3, dtype=torch.int64)},
    "tokens that no vocabulary has": {"token_ids": torch.full((4,), -7, dtype=torch.int32)},
    "too few targets": {"is_target": torch.zeros(1, dtype=torch.bool)},
    "no digests": {"raw_digests": torch.zeros(0, 16, dtype=torch.uint8)},
}


@pytest.mark.parametrize("what", LIES)
def test_a_signed_file_whose_tensors_lie_is_encoded_again(what, section, logged):
    first = encode(section).fingerprint
    (path,) = Path(section.cache_dir).glob("*.safetensors")
    _signed(path)
    assert encode(section).fingerprint == first, "this test writes files that are read"
    assert "is damaged" not in " ".join(logged())
    _signed(path, **LIES[what])
    assert encode(section).fingerprint == first
    assert "is damaged" in " ".join(logged())


@pytest.mark.parametrize("metadata", [None, {"finetune": "[" * 100_000}, {"finetune": "{}"}])
def test_a_file_whose_metadata_are_others_is_encoded_again(metadata, section, logged):
    first = encode(section).fingerprint
    (path,) = Path(section.cache_dir).glob("*.safetensors")
    save_file(load_file(path), path, metadata)
    assert encode(section).fingerprint == first
    assert "is damaged" in " ".join(logged())


def test_a_file_of_another_user_is_not_trusted(section, logged, monkeypatch):
    encode(section)
    (path,) = Path(section.cache_dir).glob("*.safetensors")
    give_away(path, monkeypatch)
    encode(section)
    assert re.search(r"belongs to another user \(uid \d+\), who could change it", " ".join(logged()))


def test_a_link_in_the_place_of_the_lock_leaves_its_target_alone(section, tmp_path):
    encode(section)
    (path,) = Path(section.cache_dir).glob("*.safetensors")
    path.unlink()
    (tmp_path / "theirs").write_text("mine")
    path.with_suffix(".lock").symlink_to(tmp_path / "theirs")
    fallbacks = Fallbacks()
    encode(section, fallbacks)
    assert (tmp_path / "theirs").read_text() == "mine"
    assert [record["what"] for record in fallbacks.as_records()] == ["data.cache_dir"]
