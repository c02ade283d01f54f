"""Decompress files of rows, up to a limit. `readers.py` imports this module only for them."""

from __future__ import annotations

import contextlib
import importlib
import sys
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any

from finetune.errors import DataError, extra_command
from finetune.units import format_bytes

MOST_RATIO = 200
"""A file may unpack to so many times its size. Rows of text unpack to 3 to 20 times."""
ALWAYS_BYTES = 256 << 20
"""Every file may unpack to this size."""


def most_unpacked(path: Path) -> int:
    """Return the number of bytes to which a file may unpack."""
    return max(ALWAYS_BYTES, MOST_RATIO * path.stat().st_size)


@contextlib.contextmanager
def decompressed(
    path: Path, module_name: str, label: str, *, check: Callable[[IO[bytes], str], None]
) -> Iterator[IO[bytes]]:
    """Open a compressed file with a module, such as `gzip`. `check` is called with the file before it is read.

    Raises:
        DataError: also inside the block: the file is cut short or damaged, unpacks to far more than text does, or a
            package is missing.
        OSError: also inside the block: the system cannot read it.
    """
    if sys.version_info >= (3, 14):  # its own library reads Zstandard
        module_name = module_name.replace("backports.", "compression.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError:
        raise DataError(
            f"{label} is compressed with Zstandard, which needs the package backports.zstd. Run "
            f"`{extra_command('zstd')}`, or compress the file with gzip."
        ) from None
    own = tuple(getattr(module, name) for name in ("LZMAError", "ZstdError") if hasattr(module, name))
    try:
        with module.open(path, "rb") as file:
            check(file, label)
            yield BufferedReader(_Unpacked(file, most_unpacked(path), label), 1 << 16)
    except (EOFError, OSError, zlib.error, *own) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of the package
            raise
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
                f"{self._label} unpacks to more than {format_bytes(self._most)}, over {MOST_RATIO} times its size. If "
                "its rows are what you expect, decompress it first."
            )
        return count
