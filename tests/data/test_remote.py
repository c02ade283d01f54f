"""Rows at an address: from a server that the test starts, and from fsspec's memory."""

from __future__ import annotations

import gzip
import json
import signal
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest

from finetune.data import remote
from finetune.data.encode import encode_examples
from finetune.data.examples import check_local_rows, load_examples
from finetune.data.remote import RemoteRows
from finetune.errors import DataError
from tests.data.conftest import encode_train, give_away
from tests.launches import start_command, wait_until
from tests.raw_server import drip, http, raw_server
from tests.tiny import tiny_tokenizer

ROW = {"prompt": "Hi", "completion": "yes"}
SIGNED = "?X-Amz-Credential=AKIA1&X-Amz-Signature=5ecret"


@pytest.fixture
def server():
    with raw_server() as running:
        yield running


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    yield files.pipe
    files.rm("/rows", recursive=True)


def lines(count: int) -> bytes:
    return (json.dumps(ROW) + "\n").encode() * count


def test_rows_of_a_server_are_copied_once_until_they_change(server, make_section, write_jsonl, logged):
    server.answers["/rows.jsonl"] = http(lines(2), headers='ETag: "2"\r\n')
    section = make_section(path=f"{server.url}/rows.jsonl")
    first = encode_train(section)
    assert first.fingerprint == encode_train(make_section(path=write_jsonl([ROW] * 2))).fingerprint
    assert first.source(1) == f"{server.url}/rows.jsonl:2"
    assert encode_train(section).fingerprint == first.fingerprint
    assert any(f"{section.path}: copied before" in line for line in logged())
    server.answers["/rows.jsonl"] = http(lines(3), headers='ETag: "3"\r\n')
    assert len(encode_train(section)) == 3


def test_a_copy_of_another_user_is_copied_again(server, make_section, monkeypatch):
    server.answers["/rows.jsonl"] = http(lines(2), headers='ETag: "2"\r\n')
    section = make_section(path=f"{server.url}/rows.jsonl")
    first = encode_train(section).fingerprint
    (copy,) = Path(section.cache_dir).expanduser().glob("fetched-*.jsonl")
    copy.write_bytes(lines(3))
    give_away(copy, monkeypatch)
    assert encode_train(section).fingerprint == first


def test_a_compressed_file_and_a_validation_file_at_addresses(server, make_section):
    server.answers["/rows.jsonl.gz?download=1"] = http(gzip.compress(lines(3)))
    server.answers["/dev.csv"] = http(b"prompt,completion\nWhat,no\n")
    section = make_section(path=f"{server.url}/rows.jsonl.gz?download=1", validation=f"{server.url}/dev.csv")
    splits = encode_examples(load_examples(section), tiny_tokenizer(), section)
    assert (len(splits.train), len(splits.validation)) == (3, 1)
    assert splits.validation.source(0) == f"{server.url}/dev.csv row 1"


def test_a_folder_of_split_files_in_memory(memory, make_section):
    memory("/rows/train.jsonl", lines(3))
    memory("/rows/dev.jsonl", lines(1).replace(b"Hi", b"Bye"))
    memory("/rows/notes.txt", b"no rows")
    splits = load_examples(make_section(path="memory://rows"))
    assert (len(splits.train), len(splits.validation), splits.test) == (3, 1, None)
    assert splits.train.parts[0].source.place(2).endswith("/rows/train.jsonl:2")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{server}/gone.jsonl", "data.path is {server}/gone.jsonl, but there is no such file or folder"),
        ("{server}/forbidden.jsonl", "data.path is {server}/forbidden.jsonl, which cannot be read"),
        ("http://127.0.0.1:1/rows.jsonl", "which cannot be read (ClientConnectorError: Cannot connect to host"),
        ("s3://bucket/rows.jsonl", "which needs a package that is not installed (Install s3fs to access S3)"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_copied(server, make_section, path, message):
    server.answers["/forbidden.jsonl"] = http(b"", status="403 Forbidden")
    section = make_section(path=path.format(server=server.url))
    with pytest.raises(DataError) as caught:
        check_local_rows(section)
    assert message.format(server=server.url) in str(caught.value)
    assert not Path(section.cache_dir).exists()


def test_a_signature_is_never_shown(server, tmp_path):
    rows = RemoteRows("data.path", f"{server.url}/gone.jsonl{SIGNED}", str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        rows.check()
    shown = f"{rows.label} {rows.place(1)} {caught.value}"
    assert "X-Amz-Signature=…" in shown
    assert "5ecret" not in shown
    assert "AKIA1" not in shown


def test_a_copy_that_ends_early_is_refused(memory, tmp_path, monkeypatch):
    memory("/rows/train.jsonl", lines(3))
    rows = RemoteRows("data.path", "memory://rows/train.jsonl", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    info = files.info("/rows/train.jsonl")
    monkeypatch.setattr(type(files), "info", lambda *_, **__: {**info, "size": 10_000})
    with pytest.raises(DataError, match=r"rows/train\.jsonl ended after \d+ of 10,000 bytes"):
        rows.digest()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] in ([], [".lock"])


SLOW = {
    "nothing": drip(b"", byte=b""),
    "headers": drip(b"HTTP/1.1 200 OK\r\nX: "),
    "body": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
    "body without a size": drip(b"HTTP/1.1 200 OK\r\n\r\n"),
}
GENEROUS_SECONDS = 30.0
"""For what has a limit of half a second, on a busy machine."""


@pytest.mark.parametrize("name", SLOW)
def test_a_server_that_is_too_slow_is_given_up(server, tmp_path, monkeypatch, name):
    monkeypatch.setattr(remote, "REMOTE_SECONDS", 0.5)
    server.answers["/rows.jsonl"] = SLOW[name]
    began = time.monotonic()
    with pytest.raises(DataError, match=r"has not sent an answer, or the next 1\.05 MB, within 0\.5 s"):
        RemoteRows("data.path", f"{server.url}/rows.jsonl", str(tmp_path)).digest()
    assert time.monotonic() - began < GENEROUS_SECONDS
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])


def test_what_a_server_declares_as_compressed_is_not_decompressed(server, tmp_path):
    bomb = gzip.compress(bytes(64 << 20))
    server.answers["/rows.jsonl"] = http(bomb, headers="Content-Encoding: gzip\r\n")
    rows = RemoteRows("data.path", f"{server.url}/rows.jsonl", str(tmp_path))
    with pytest.raises(DataError, match=r"rows\.jsonl holds data that is compressed as \.gz"):
        list(rows.rows())
    assert [path.stat().st_size for path in tmp_path.glob("fetched-*.jsonl")] == [len(bomb)]


def test_a_file_without_an_end_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MOST_BYTES_WITHOUT_SIZE", 4 << 20)

    def endless(_):
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while True:
            yield lines(1000)

    server.answers["/rows.jsonl"] = endless
    with pytest.raises(DataError, match="has more than 4,194,304 bytes"):
        RemoteRows("data.path", f"{server.url}/rows.jsonl", str(tmp_path)).digest()
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])


@pytest.mark.slow
def test_a_signal_ends_a_run_whose_rows_drip(server, tmp_path):
    asked = threading.Event()

    def rows(_):
        asked.set()
        yield from SLOW["body"](_)

    server.answers["/rows.jsonl"] = rows
    words = ("model=phi_tiny", f"data.path={server.url}/rows.jsonl", f"output_dir={tmp_path}/run")
    words += (f"data.cache_dir={tmp_path}/cache",)
    process = start_command([sys.executable, "-m", "finetune", "train", *words])
    wait_until(lambda: process.poll() is not None or any((tmp_path / "cache").glob("*.*")), "the copy")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=GENEROUS_SECONDS)
    assert process.returncode == 75, output
    assert "stopped during set-up as asked by SIGTERM" in output
