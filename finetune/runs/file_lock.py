"""A lock between processes, which the kernel releases when its holder dies, however it dies.

The package filelock, which Transformers installs, does not name the holder of a lock, and a run must name the process
that it waits for. Its older releases, which Transformers allows too, empty the lock's file at each try, so that the
holder cannot be written there, and let a forked data worker keep the lock of a killed parent.

Without `fcntl`, as on Windows, the file itself is the lock: it is created with its holder in it, and a process removes
the file of a holder that has ended. A holder on another machine that was killed keeps its lock there.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

from finetune.signals import after_fork_in_child

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_REMIND_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class LockHolder:
    """The process that holds a lock, as it wrote it down. For messages only: the lock itself is the kernel's."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started}"


class FileLock:
    """A held lock. The end of its `with` block, or `release`, releases it and removes its file.

    `descriptor` is of the open and locked file; None without `fcntl`.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_held = True
        _held.add(self)

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if not self._is_held:
            return
        if self._descriptor is None:
            self.path.unlink(missing_ok=True)
            self._is_held = False
            return
        # Removed while still locked: a process that opened the old file notices that the path changed, and tries again.
        try:
            self.path.unlink(missing_ok=True)
        finally:
            self.forget()

    def forget(self) -> None:
        """Close this process's handle and leave the file, as a forked child does with its parent's lock."""
        if self._is_held and self._descriptor is not None:
            os.close(self._descriptor)
        elif self._is_held:
            with suppress(OSError):  # on a disk that became read-only, it is held until this process ends
                self.path.write_bytes(b"")  # without a holder it is free
        self._is_held = False
        _held.discard(self)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_locks_of_parent() -> None:
    """Close the locks in a forked child, which would otherwise keep the lock of a dead parent."""
    for lock in list(_held):
        if lock._descriptor is not None:
            lock.forget()


after_fork_in_child(_forget_locks_of_parent)


def file_lock(path: Path, *, timeout_seconds: float | None = None, waiting_for: str) -> FileLock:
    """Wait for a lock and take it: `with file_lock(path, waiting_for="the encoded data"): …`.

    Args:
        path: the lock's file, in a folder that exists. It is created, and removed on release.
        timeout_seconds: how long to wait; None waits for as long as the holder lives.
        waiting_for: the name of the awaited thing, for the log.

    Raises:
        TimeoutError: another process still holds the lock after that time.
        OSError: the file cannot be created, or its file system has no locks.
    """
    started = reminded = time.monotonic()
    pause = _FIRST_PAUSE_SECONDS
    first = True
    while (lock := try_file_lock(path)) is None:
        now = time.monotonic()
        if timeout_seconds is not None and now - started >= timeout_seconds:
            raise TimeoutError(
                f"{waiting_for}: {_describe_holder(path)} still holds {path} after {timeout_seconds:g} s"
            )
        if first or now - reminded >= _REMIND_SECONDS:
            _log.info("waiting for %s: %s holds %s", waiting_for, _describe_holder(path), path)
            first, reminded = False, now
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return lock


def try_file_lock(path: Path) -> FileLock | None:
    """Take a lock if it is free; None if another process (or another part of this one) holds it.

    Raises:
        OSError: the file cannot be created, or its file system has no locks.
    """
    if fcntl is None:
        return _try_without_fcntl(path)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _as_holder(), 0)
                return FileLock(path, descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a living process holds a lock. Writes nothing, and blocks nobody."""
    if fcntl is None:
        return _lives(read_holder(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def read_holder(path: Path) -> LockHolder | None:
    """Read who holds the lock at `path`; None if that is unknown."""
    try:
        return LockHolder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _is_still_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still leads to the opened file, which its last holder may have removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _as_holder() -> bytes:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return json.dumps(asdict(LockHolder(host=socket.gethostname(), pid=os.getpid(), started=started))).encode()


def _try_without_fcntl(path: Path) -> FileLock | None:
    """Create the lock's file with this process as its holder. A file whose holder has ended is removed."""
    mine = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    mine.write_bytes(_as_holder())
    try:
        for _ in range(2):
            try:
                os.link(mine, path)
            except FileExistsError:
                if _lives(read_holder(path)):
                    return None
                _remove_of_ended(path, mine)
            else:
                return FileLock(path, None)
    finally:
        mine.unlink(missing_ok=True)
    return None


def _remove_of_ended(path: Path, mine: Path) -> None:
    """Remove the file of a holder that has ended, one process at a time: the next holder's file must stay."""
    turn = path.with_name(f"{path.name}.turn")
    try:
        os.link(mine, turn)
    except FileExistsError:
        if not _lives(read_holder(turn)):
            turn.unlink(missing_ok=True)
        return
    try:
        if not _lives(read_holder(path)):
            path.unlink(missing_ok=True)
    finally:
        turn.unlink(missing_ok=True)


def _lives(holder: LockHolder | None) -> bool:
    """Whether the process that wrote itself down still runs. On another machine it cannot be asked, and counts."""
    if holder is None:
        return False
    if holder.host != socket.gethostname():
        return True
    try:
        began = psutil.Process(holder.pid).create_time()
        return began <= datetime.fromisoformat(holder.started).timestamp() + 1  # else the number was given again
    except (psutil.Error, ValueError):
        return False


def _describe_holder(path: Path) -> str:
    holder = read_holder(path)
    return str(holder) if holder else "another process"
