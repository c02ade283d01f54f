"""Write files and folders so that they are never incomplete: under a temporary name, synced, then renamed.

Everything is written through plain Python I/O, because only that reports a full or failing disk as an OSError with
its errno.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Any, BinaryIO

from finetune.errors import RunFailedError
from finetune.limits import irregular_files, open_regular, read_regular

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
_SCHEMA = 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")

_log = logging.getLogger(__name__)

Chunks = Iterable[bytes | memoryview]


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader sees either the old bytes or the new ones.

    Raises:
        OSError: the disk refused; the old file is untouched.
    """
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BufferedRandom]:
    """Write a file that replaces another in one step, at the end of the block; see `replace_file`.

    Raises:
        OSError: the disk refused; the old file is untouched.
    """
    temporary = path.with_name(_TEMPORARY + path.name)
    remove(temporary)
    try:
        with temporary.open("x+b") as file:
            yield file
            _sync(file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise
    _sync_folder(path.parent)


class FolderWriter:
    """Write the files of a folder that is not yet visible, and record their sizes and digests for its manifest."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, int | str]] = {}

    def write(self, name: str, chunks: Chunks) -> dict[str, int | str]:
        """Write and sync one file. Returns its entry in the manifest: size and SHA-256.

        Raises:
            OSError: the disk refused.
            ValueError: the name is not a plain file name, or was written before.
        """
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST or name in self._entries:
            raise ValueError(f"{name!r} cannot be the name of a file here")
        size, digest = _write_synced(self.path / name, chunks)
        self._entries[name] = {"size": size, "sha256": digest}
        return self._entries[name]

    def finish(self) -> None:
        """Write the manifest, and sync the folder's own list of names."""
        _write_synced(self.path / MANIFEST, [_manifest_bytes(self._entries)])
        _sync_folder(self.path)


@contextlib.contextmanager
def committed_folder(target: Path) -> Iterator[FolderWriter]:
    """Fill a temporary folder, which takes the target's name, with a manifest, at the end of the block.

    An earlier target stays intact until then. If the block or the disk fails, the target is as it was and the
    temporary folder is removed. If the process is killed, `clear_leftovers` removes the temporary folder.

    Raises:
        OSError: the disk refused.
    """
    temporary = target.with_name(_TEMPORARY + target.name)
    _make_way(temporary)
    temporary.mkdir(parents=True)
    try:
        writer = FolderWriter(temporary)
        yield writer
        writer.finish()
        _put_in_place(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary)
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder under a temporary name: a kill never leaves half a folder under its own name.

    Raises:
        OSError: the disk refused.
    """
    temporary = path.with_name(_TEMPORARY + path.name)
    _make_way(temporary)
    path.rename(temporary)
    remove(temporary)


def clear_leftovers(parent: Path, is_ours: Callable[[str], object]) -> list[str]:
    """Remove what killed writers left in a folder, and restore folders that were renamed but not replaced.

    A leftover that cannot be removed stays, with a warning; see `_make_way`.

    Args:
        parent: the folder to clear.
        is_ours: returns whether finetune writes a file or folder of this final name. Others are left alone.

    Returns:
        The temporary names that were removed or restored.

    Raises:
        OSError: the disk refused.
    """
    if not parent.is_dir():
        return []
    cleared = []
    for path in sorted(parent.iterdir()):
        name = path.name
        while is_leftover(name):  # `_make_way` puts a second prefix before the first
            name = name[len(_TEMPORARY) :]
        if name == path.name or not is_ours(name):
            continue
        target = path.with_name(name)
        if path.name.startswith(_REPLACED) and not os.path.lexists(target):
            path.rename(target)
        elif not _is_removed(path):
            continue
        cleared.append(path.name)
    if cleared:
        _sync_folder(parent)
    return cleared


def is_leftover(name: str) -> bool:
    """Whether a name is the name of a temporary file or folder."""
    return name.startswith((_TEMPORARY, _REPLACED))


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the size and SHA-256 of each file of a committed folder, by name.

    Raises:
        ValueError: the manifest is missing, unreadable or not exactly as `FolderWriter` writes it.
    """
    if folder.is_symlink():
        raise ValueError(f"{MANIFEST}: reached through a symbolic link")
    try:
        raw = read_regular(folder / MANIFEST)
        record = json.loads(raw)
        entries: dict[str, dict[str, Any]] = record["files"]
        # Only one spelling is valid, so that a flipped byte is found even in white space.
        is_canonical = raw == _manifest_bytes(entries)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST}: missing, so the folder was never finished") from None
    except OSError as error:
        raise ValueError(f"{MANIFEST}: cannot be read: {describe_os_error(error)}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{MANIFEST}: not a manifest (empty, cut short or changed)") from None
    if not is_canonical:
        raise ValueError(f"{MANIFEST}: not as it was written")
    for name, entry in entries.items():
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"{MANIFEST}: {name!r} is not a plain file name")
        if not isinstance(entry, dict) or set(entry) != {"size", "sha256"}:
            raise ValueError(f"{MANIFEST}: the entry of {name} is malformed")
    return entries


def find_damage(folder: Path) -> list[str]:
    """Compare a folder with its manifest. Returns one line per damaged file; empty if it is intact.

    Files that the manifest does not name are not read, but libraries may read them, so they must be regular files too.
    """
    try:
        entries = read_manifest(folder)
    except ValueError as error:
        return [str(error)]
    problems = (_compare(folder / name, entry) for name, entry in entries.items())
    return irregular_files(folder) or [problem for problem in problems if problem]


@contextlib.contextmanager
def disk_failures_end_the_run(doing: str, path: Path, *, then: str = "go on with resume=auto") -> Iterator[None]:
    """Turn an OSError into a message that a user can act on; `then` says what to do once the disk is mended.

    Raises:
        RunFailedError: the message names the operation, the path, the reason and the free bytes.
    """
    try:
        yield
    except OSError as error:
        raise RunFailedError(
            f"{doing} {path} failed: {describe_os_error(error)}; {_free_space(path)}. "
            f"What was there before is untouched: make room or mend the disk, then {then}."
        ) from error


def describe_os_error(error: OSError) -> str:
    """Describe an error with its symbol: `No space left on device (ENOSPC)`."""
    symbol = errno.errorcode.get(error.errno or 0, "no errno")
    return f"{error.strerror or error} ({symbol})"


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with its content, if it exists. Links are never followed.

    Raises:
        OSError: the disk refused.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_way(path: Path) -> None:
    """Remove a leftover that has a name which is needed now. If it cannot be removed, give it another name.

    On NFS, a folder keeps the deleted files that a process has open, and cannot be removed until they are closed.
    """
    try:
        remove(path)
    except OSError:
        if not path.is_dir():
            raise
        aside = path.with_name(_TEMPORARY + path.name)
        _make_way(aside)
        path.rename(aside)


def _is_removed(leftover: Path) -> bool:
    """Remove a leftover, and return whether that succeeded. A leftover takes disk space and does no harm."""
    try:
        remove(leftover)
    except OSError as error:
        _log.warning(
            "%s is left over and cannot be removed now: %s. A process may have its files open. The next start with "
            "this output_dir tries again.",
            leftover,
            describe_os_error(error),
        )
        return False
    return True


def _put_in_place(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its name. An old one is renamed first, because a rename cannot replace a folder."""
    replaced = target.with_name(_REPLACED + target.name)
    if not os.path.lexists(target):
        temporary.rename(target)
    else:
        _make_way(replaced)
        target.rename(replaced)
        try:
            temporary.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
    _sync_folder(target.parent)
    _is_removed(replaced)  # if not, the new folder has its name all the same


def _write_synced(path: Path, chunks: Chunks) -> tuple[int, str]:
    """Write and sync a new file. Returns its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        _sync(file)
    return size, digest.hexdigest()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folder
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot sync a folder, and answer with one of these errors.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _manifest_bytes(entries: dict[str, dict[str, Any]]) -> bytes:
    record = {"files": dict(sorted(entries.items())), "schema_version": _SCHEMA}
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()


def _compare(path: Path, entry: dict[str, Any]) -> str | None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry["size"]:
                return f"{path.name}: has {size} bytes, {entry['size']} were written"
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return f"{path.name}: missing"
    except OSError as error:
        return f"{path.name}: cannot be read: {describe_os_error(error)}"
    return None if digest == entry["sha256"] else f"{path.name}: its bytes have changed (SHA-256 differs)"


def _free_space(path: Path) -> str:
    """Describe the free space at a path, or at its nearest parent that exists."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(place).free:,} bytes are free there"
    return "the free space there is unknown"
