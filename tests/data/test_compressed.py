from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from datasets import Dataset

from finetune.data import compressed, readers
from finetune.data.readers import FileRows
from finetune.errors import DataError

zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
WITH_CHECKSUM = {zstd.CompressionParameter.checksum_flag: 1}  # as the command zstd writes by default
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": partial(zstd.compress, options=WITH_CHECKSUM),
}
LINES = b'{"prompt": "a", "completion": "b"}\n\n{"prompt": "c", "completion": 5\n{"prompt": "d", "completion": "e"}\n'


def file_rows(path: Path, content: bytes) -> FileRows:
    path.write_bytes(content)
    return FileRows(path, path.name)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_rows_and_their_numbers_are_those_of_the_file_itself(tmp_path, suffix):
    plain = file_rows(tmp_path / "a.jsonl", LINES)
    compressed = file_rows(tmp_path / f"a.jsonl{suffix}", COMPRESS[suffix](LINES))
    assert list(compressed.rows()) == list(plain.rows())
    assert [row.number for row in compressed.rows() if row.problem] == [3]
    assert compressed.place(3) == f"a.jsonl{suffix}:3"


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_a_damaged_file_is_refused_and_none_of_its_rows_lost_in_silence(tmp_path, suffix, damage):
    whole = COMPRESS[suffix](LINES * 500)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :]
    rows = file_rows(tmp_path / f"a.jsonl{suffix}", {"cut": whole[:-9], "flipped": flipped, "other": LINES}[damage])
    with pytest.raises(DataError, match=rf"a\.jsonl{suffix} cannot be decompressed \(.+\): it is cut short, damaged"):
        list(rows.rows())


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python itself reads Zstandard")
def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    with pytest.raises(DataError, match=r"needs the package backports.zstd. Run `pip install 'phi-finetune\[zstd\]'`"):
        list(file_rows(tmp_path / "a.jsonl.zst", zstd.compress(LINES)).rows())


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_file_that_unpacks_to_far_more_than_text_does_is_refused(tmp_path, monkeypatch, suffix, name):
    monkeypatch.setattr(compressed, "ALWAYS_BYTES", 1 << 20)
    row = {"a.json": '{"text": "%s"},', "a.csv": "a,%s\n"}.get(name, '{"text": "%s"}\n').encode() % (b"a" * 1000)
    start, end = {"a.json": (b"[", b"1]"), "a.csv": (b"prompt,completion\n", b"")}.get(name, (b"", b""))
    rows = file_rows(tmp_path / f"{name}{suffix}", COMPRESS[suffix](start + row * ((2 << 20) // len(row)) + end))
    with pytest.raises(DataError, match=r"unpacks to more than [\d.]+ MB, over 200 times its size"):
        for _ in rows.rows():
            pass


def test_a_parquet_file_that_unpacks_to_far_more_is_refused_by_its_sizes(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    Dataset.from_list([{"prompt": "a" * (2 << 20), "completion": "b"}]).to_parquet(file)
    assert len(list(FileRows(file, "a.parquet").rows())) == 1
    monkeypatch.setattr(compressed, "ALWAYS_BYTES", 1 << 20)
    monkeypatch.setattr(compressed, "MOST_RATIO", 2)
    with pytest.raises(
        DataError, match=r"a\.parquet cannot be read as parquet: ValueError: it unpacks to more than [\d.]+ MB"
    ):
        list(FileRows(file, "a.parquet").rows())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz"])
def test_a_line_has_a_limit(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "MOST_OF_A_LINE", 1000)
    content = b"a,b\n" + b"x" * 2000 + b",y\n" if "csv" in name else b'{"text": "a"}\n"' + b"x" * 2000 + b'"\n'
    rows = file_rows(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"{name}:2: the line has more than 1,000 characters"):
        list(rows.rows())
    quoted = content.replace(b"x" * 2000, b'"' + b"x\n" * 1000 + b'"')
    if "csv" in name:
        with pytest.raises(DataError, match="field larger than field limit"):
            list(file_rows(tmp_path / name, gzip.compress(quoted) if name.endswith(".gz") else quoted).rows())


@pytest.mark.slow
@pytest.mark.parametrize("content", ["one line", "long rows"])
def test_memory_does_not_grow_with_a_compressed_file(tmp_path, content):
    """600 MiB in 3 MB or less. A line may have 128 MiB, and Python holds a line twice while it reads it."""
    path = tmp_path / "a.jsonl.zst"
    piece = b"x" * (1 << 20) if content == "one line" else b'{"text": "' + b"x" * (1 << 20) + b'"}\n'
    with zstd.open(path, "wb") as file:
        for _ in range(600):
            file.write(piece)
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom finetune.data.readers import FileRows\n"
        "from finetune.errors import DataError\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before = peak()\n"
        "try:\n    for row in FileRows(Path(sys.argv[1]), 'a').rows(): pass\n"
        "except DataError as error: print(error)\n"
        "print('MiB', peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert float(done.stdout.split("MiB")[1]) < 4 * 128, done.stdout + done.stderr
    is_refused = content == "one line" or path.stat().st_size * 200 < 600 << 20
    assert ("more than" in done.stdout, done.stderr) == (is_refused, "")
