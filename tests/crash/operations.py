"""Count what a process does to the files of one folder, and strike at the n-th time. For child processes only."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.runs import metrics

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "fcntl.flock"}


def watch(folder: Path, at: int, strike: Callable[[str], None]) -> list[str]:
    """From here on note each operation below `folder`, and call `strike` with it right before the `at`-th; 0: never.

    Those of all threads count: the interpreter tells of each, and numbers them one by one. Nothing is replaced by a
    stand-in: the operations themselves happen, reported by Python's own audit events, and by thin wrappers where it has
    none (fsync, and writes, which are done in two halves with a place between them). What lies on the disk right after
    an operation is what lies there right before the next; the last place is the end.

    Returns:
        The operations so far, one line each, growing.
    """
    seen: list[str] = []
    numbers = itertools.count(1)
    prefix = f"{folder}{os.sep}"

    def note(what: str, path: str) -> None:
        if not f"{path}{os.sep}".startswith(prefix):
            return
        operation = f"{what} {path.removeprefix(prefix)}"
        number = next(numbers)
        seen.append(operation)
        if number == at:
            strike(operation)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if flags & _WRITES and not isinstance(path, int):
                note("open", _resolved(path, -1))
        elif event in _CHANGES:
            dir_fd = args[1] if event in ("os.remove", "os.rmdir") else -1
            note(event.removeprefix("os."), _resolved(args[0], dir_fd))

    sys.addaudithook(audit)
    _wrap_syncs(note)
    _wrap_writes(note)
    return seen


def _resolved(path: Any, dir_fd: int) -> str:
    """What an audit event means by a path: a descriptor, or a name beside an open folder (`shutil.rmtree`)."""
    if isinstance(path, int):
        return _path_of(path)
    if dir_fd >= 0:
        path = Path(_path_of(dir_fd), os.fsdecode(path))
    return str(Path(os.fsdecode(path)).absolute())


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


def _wrap_syncs(note: Callable[[str, str], None]) -> None:
    really_sync, really_put = os.fsync, os.pwrite

    def fsync(descriptor: int) -> None:
        note("fsync", _path_of(descriptor))
        really_sync(descriptor)

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        path, half = _path_of(descriptor), len(data) // 2
        note("pwrite", path)
        really_put(descriptor, data[:half], offset)
        note("half of pwrite", path)
        return half + really_put(descriptor, data[half:], offset + half)

    os.fsync, os.pwrite = fsync, pwrite


def _wrap_writes(note: Callable[[str, str], None]) -> None:
    really_open = io.open

    class TornFile:
        """A file opened for writing bytes, whose every piece comes in two halves, each handed to the system at once."""

        def __init__(self, file: Any, path: str) -> None:
            self._file, self._path = file, path

        def write(self, data: Any) -> int:
            piece = memoryview(data)
            note("write", self._path)
            self._file.write(piece[: len(piece) // 2])
            self._file.flush()
            note("half of write", self._path)
            self._file.write(piece[len(piece) // 2 :])
            return len(piece)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def __enter__(self) -> TornFile:
            return self

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

    class TornFileIO(io.FileIO):
        def write(self, data: Any) -> int:
            piece = memoryview(data)
            note("write", str(self.name))
            written = super().write(piece[: len(piece) // 2])
            note("half of write", str(self.name))
            return written + super().write(piece[len(piece) // 2 :])

    def opening(file: Any, mode: str = "r", *args: Any, **keys: Any) -> Any:
        opened = really_open(file, mode, *args, **keys)
        is_written = "b" in mode and set(mode) & set("wxa") and not isinstance(file, int)
        return TornFile(opened, str(Path(file).absolute())) if is_written else opened

    io.open = builtins.open = opening
    metrics.FileIO = TornFileIO
