"""Files that are compressed: which suffixes there are, and how a file is read through its compression."""

from __future__ import annotations

import contextlib
import importlib
import zlib
from collections.abc import Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path, PurePath
from typing import IO, Any

from finetune.errors import DataError, extra_command
from finetune.runs.durable import describe_os_error
from finetune.units import format_bytes

_MODULES = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "backports.zstd"}
"""The module that opens each. The package zstandard is no choice for the last: it takes a file that was cut short for a
whole one. fsspec's own decompression falls back to it."""
_MOST_RATIO = 200
"""A file may unpack to so many times its size. Rows of text unpack to 3 to 20 times."""
_ALWAYS_BYTES = 256 << 20
"""Every file may unpack to this size."""
_FIRST_BYTES = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zX": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}


def suffix_of(path: PurePath | str) -> str:
    """Return the suffix that says what a file holds, in lower case: `.jsonl` for `rows.jsonl` and `rows.JSONL.gz`."""
    path = PurePath(path)
    return (PurePath(path.stem) if is_compressed(path) else path).suffix.lower()


def suffixes_of(path: PurePath | str) -> str:
    """Return the suffixes that say how to read a file: `.jsonl.gz` for `rows.jsonl.gz`."""
    path = PurePath(path)
    return suffix_of(path) + (path.suffix.lower() if is_compressed(path) else "")


def stem_of(path: PurePath) -> str:
    """Return the name of a file without its suffixes."""
    return PurePath(path.stem).stem if is_compressed(path) else path.stem


def is_compressed(path: PurePath) -> bool:
    """Whether the suffix of a file says that it is compressed."""
    return path.suffix.lower() in _MODULES


@contextlib.contextmanager
def opened(path: Path, label: str) -> Iterator[IO[bytes]]:
    """Open a file of UTF-8 text, through its compression if it has one. Memory does not grow with its size.

    Raises:
        DataError: also inside the block: the file cannot be read, is cut short or damaged, unpacks to far more than
            text does, or a package is missing. Or its first bytes are those of compressed data or of UTF-16.
    """
    if not is_compressed(path):
        try:
            with path.open("rb") as file:
                _refuse_other_bytes(file, label)
                yield file
        except OSError as error:
            raise _cannot_be_read(label, error) from error
        return
    try:
        module = importlib.import_module(_MODULES[path.suffix.lower()])
    except ModuleNotFoundError:
        raise DataError(
            f"{label} is compressed with Zstandard, which needs the package backports.zstd. Run "
            f"`{extra_command('zstd')}`, or compress the file with gzip."
        ) from None
    own = tuple(getattr(module, name) for name in ("LZMAError", "ZstdError") if hasattr(module, name))
    try:
        with module.open(path, "rb") as file:
            _refuse_other_bytes(file, label)
            yield BufferedReader(_Unpacked(file, max(_ALWAYS_BYTES, _MOST_RATIO * path.stat().st_size), label), 1 << 16)
    except (EOFError, OSError, zlib.error, *own) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the package
            raise _cannot_be_read(label, error) from error
        raise DataError(
            f"{label} cannot be decompressed ({error}): it is cut short, damaged, or no {path.suffix} file. Copy or "
            "compress it again."
        ) from error


class _Unpacked(RawIOBase):
    """Decompressed bytes, up to a limit. A file of 1 MB may unpack to a terabyte."""

    def __init__(self, file: IO[bytes], most_bytes: int, label: str) -> None:
        self._file, self._most, self._label = file, most_bytes, label
        self._left = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._file.readinto(buffer))  # type: ignore[attr-defined]
        self._left -= count
        if self._left < 0:
            raise DataError(
                f"{self._label} unpacks to more than {format_bytes(self._most)}, over {_MOST_RATIO} times its size. If "
                "its rows are what you expect, decompress it first."
            )
        return count


def _refuse_other_bytes(file: IO[bytes], label: str) -> None:
    start = file.read(4)
    file.seek(0)
    suffix = next((suffix for first_bytes, suffix in _FIRST_BYTES.items() if start.startswith(first_bytes)), None)
    if suffix is not None:
        raise DataError(f"{label} holds data that is compressed as {suffix}. Rename it to {label}{suffix}.")
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in start:
        raise DataError(f"{label} is text in UTF-16; expected UTF-8. Convert it: `iconv -f UTF-16 -t UTF-8`.")


def _cannot_be_read(label: str, error: OSError) -> DataError:
    return DataError(f"{label} cannot be read: {describe_os_error(error)}.")
