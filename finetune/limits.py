"""Open and read a file that others made: a regular one, of limited size."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MOST_BYTES = 16 << 20
"""The largest file of a run that is read whole, unless it has a limit of its own."""
_MOST_BYTES_OF_MODEL = 256 << 20
_COPY_BYTES = 1 << 20
_READ_WHOLE = (".json", ".jinja", ".model", ".txt")
_READ_BY_LIBRARIES = (*_READ_WHOLE, ".safetensors", ".bin")
_TYPES = {"-": "a regular file", "d": "a folder", "l": "a symbolic link", "p": "a FIFO", "s": "a socket"}
_log = logging.getLogger(__name__)


def open_regular(path: Path, *, most: int | None = None, follows_links: bool = False) -> BufferedReader:
    """Open a regular file to read. Opening never waits, as it would for a FIFO, and reads nothing.

    Files of a run are no links. Files of a model may be, because the hub's cache holds links.

    Raises:
        OSError: there is no such file, it is not a regular one, or it has more than `most` bytes.
    """
    _refuse_irregular(path, path.stat() if follows_links else path.lstat(), most)
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = open(os.open(path, flags | (0 if follows_links else getattr(os, "O_NOFOLLOW", 0))), "rb")  # noqa: PTH123, SIM115
    try:
        _refuse_irregular(path, os.fstat(file.fileno()), most)  # it may have been replaced in between
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, *, most: int = MOST_BYTES, follows_links: bool = False) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises the errors of `open_regular`."""
    with open_regular(path, most=most, follows_links=follows_links) as file:
        return file.read(most)


def read_chunks(path: Path) -> Iterator[bytes]:
    """Yield a regular file in pieces. It is opened when the first piece is asked for."""
    with open_regular(path) as file:
        while chunk := file.read(_COPY_BYTES):
            yield chunk


def irregular_files(folder: Path, *, follows_links: bool = False) -> list[str]:
    """Return a line for each file in the folder of a model that no library may open: it is irregular or too large."""
    problems = []
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if path.suffix in _READ_BY_LIBRARIES and not path.is_dir():
            most = _MOST_BYTES_OF_MODEL if path.suffix in _READ_WHOLE else None
            try:
                open_regular(path, most=most, follows_links=follows_links).close()
            except OSError as error:
                problems.append(f"{path.name}: {error.strerror}")
    return problems


def is_own_file(path: Path, instead: str) -> bool:
    """Return whether a file exists and only this user or root could change it.

    Warn if it is another user's. `instead` ends the warning: what is done instead of reading the file.
    """
    if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises where a folder is locked)
        return False
    owner = os.lstat(path).st_uid
    if is_own := not hasattr(os, "geteuid") or owner in (os.geteuid(), 0):
        return is_own
    _log.warning("%s belongs to another user (uid %d), who could change it; %s", path, owner, instead)
    return False


def type_of_file(status: os.stat_result) -> str:
    """Name the type of what is at a path: `a FIFO`."""
    return _TYPES.get(stat.filemode(status.st_mode)[0], "a device")


def _refuse_irregular(path: Path, status: os.stat_result, most: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {type_of_file(status)}, and only regular files are read", str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, and at most {most:,} are read", str(path))
