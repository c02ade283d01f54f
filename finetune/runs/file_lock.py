"""A lock between processes, which the kernel releases when its holder dies, however it dies.

The package filelock, which Transformers installs, does not name the holder of a lock, and a run must name the process
that it waits for. Its older releases, which Transformers allows too, empty the lock's file at each try, so that the
holder cannot be written there, and let a forked data worker keep the lock of a killed parent.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import socket
import time
import weakref
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from finetune.limits import open_regular, read_regular
from finetune.signals import after_fork_in_child

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
    msvcrt: Any = importlib.import_module("msvcrt")

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_NEITHER_LINK_NOR_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_LOCKED_BYTE = 1 << 30
"""Windows locks bytes, which then cannot be read. This one is far behind the description of the holder."""
_log = logging.getLogger(__name__)


class FileLock(AbstractContextManager["FileLock"]):
    """A held lock. The end of its `with` block, or `release`, releases it and removes its file.

    On Windows, which removes no open file, the file stays.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Release the lock and remove its file. A second call does nothing."""
        # Removed while still locked: a process that opened the old file notices that the path changed, and tries again.
        # After the file was lost, another process may hold a lock of its own at this path.
        try:
            if self._descriptor is not None and fcntl is not None and not self.is_lost():
                self.path.unlink(missing_ok=True)
        finally:
            self.forget()

    def is_lost(self) -> bool:
        """Return whether the lock's file was removed or moved, so that another process can take the lock."""
        descriptor = self._descriptor
        try:
            return descriptor is not None and not _is_still_at(self.path, descriptor)
        except OSError as error:
            # On NFS, the open file is stale once another machine has removed it. Other errors prove nothing.
            return error.errno in (errno.ENOTDIR, errno.ESTALE)

    def forget(self) -> None:
        """Close this process's handle and leave the file, as a forked child does with its parent's lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)

    def __exit__(self, *_: object) -> None:
        self.release()


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_locks_of_parent() -> None:
    """Close the locks in a forked child, which would otherwise keep the lock of a dead parent."""
    for lock in list(_held):
        lock.forget()


after_fork_in_child(_forget_locks_of_parent)


def file_lock(path: Path, *, timeout_seconds: float | None = None, waiting_for: str) -> FileLock:
    """Wait for a lock and take it: `with file_lock(path, waiting_for="the encoded data"): …`.

    The file is created in a folder that exists, and removed on release. Without a timeout, wait for as long as the
    holder lives. `waiting_for` names the awaited thing in the log.

    Raises:
        TimeoutError: another process still holds the lock after that time.
        OSError: the file cannot be created, or its file system has no locks.
    """
    started, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
    while (lock := try_file_lock(path)) is None:
        if timeout_seconds is not None and time.monotonic() - started >= timeout_seconds:
            raise TimeoutError(f"{waiting_for}: {describe_holder(path)} still holds {path} after {timeout_seconds:g} s")
        if pause == _FIRST_PAUSE_SECONDS:
            _log.info("waiting for %s: %s holds %s", waiting_for, describe_holder(path), path)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return lock


def try_file_lock(path: Path) -> FileLock | None:
    """Take a lock if it is free; None if another process (or another part of this one) holds it.

    Raises:
        OSError: the file cannot be created, or its file system has no locks.
    """
    while True:
        # Whoever may read the file can lock it, and so keep its holder waiting.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NEITHER_LINK_NOR_WAIT, 0o600)
        try:
            is_free = _try_lock(descriptor)
            if is_free and _is_still_at(path, descriptor):
                started = datetime.now(UTC).isoformat(timespec="seconds")
                here = {"host": socket.gethostname(), "pid": os.getpid(), "parent": os.getppid()}
                holder = {**here, "started": started}
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, json.dumps(holder).encode())
                return FileLock(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not is_free:
            return None


def is_held(path: Path) -> bool:
    """Whether a living process holds a lock. Writes nothing, and blocks nobody.

    A lock that only another user may read counts as held.
    """
    try:
        with open_regular(path) as file:
            return not _try_lock(file.fileno(), is_shared=True)
    except PermissionError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False


def is_held_here(path: Path) -> bool:
    """Whether a process of this machine, perhaps this one, holds a lock, and the process that started it lives.

    The ranks of a killed launcher end soon, so that a scheduler may start the run again at once.
    """
    import psutil

    try:
        holder = json.loads(read_regular(path))
        is_here = holder["host"] == socket.gethostname() and is_held(path)
        parent = psutil.Process(int(holder["pid"])).ppid()
        return is_here and parent == holder["parent"] and psutil.pid_exists(parent)
    except (OSError, psutil.Error, ValueError, TypeError, KeyError, RecursionError):
        return False


def describe_holder(path: Path) -> str:
    """Describe the process that holds a lock, from what it wrote into the file."""
    try:
        holder = json.loads(read_regular(path))
        return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "another process"


def _try_lock(descriptor: int, *, is_shared: bool = False) -> bool:
    """Lock an open file until it is closed. Return False if another handle has locked it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        else:
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _is_still_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still leads to the opened file, which its last holder may have removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
