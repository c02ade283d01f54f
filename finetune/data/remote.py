"""Copy rows at an address (`s3://…`, `https://…`) into the cache folder, with fsspec.

Files are copied into `data.cache_dir` first, because every process of a node reads the rows several times and must get
the same bytes each time. The name of a copy is a digest of the address, the size and what tells versions apart (an
ETag, a date, a checksum). fsspec's `filecache` is not used: for https it never notices that a file has changed, and it
does not compare the bytes of a copy with the size that the server names.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import urlsplit

from finetune.config.config_files import local_path
from finetune.data.readers import SUFFIXES, FileRows, RawRow, suffix_of, suffixes_of
from finetune.deadlines import DeadlineExceededError, StopRequestedError, call_within
from finetune.errors import DataError, PreemptedError, extra_command, first_line
from finetune.limits import is_own_file
from finetune.logs import waiting
from finetune.runs.durable import describe_os_error, replacing
from finetune.runs.file_lock import file_lock
from finetune.signals import received_stop_signal
from finetune.terminal import without_passwords
from finetune.units import format_bytes

_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_SAME_IN_ALL_VERSIONS = {"name", "type", "size", "url", "mimetype", "partial", "time"}
"""Keys of fsspec's `info` that do not identify a version. `time` is the time of the last read (SFTP, SMB)."""
_PIECE_BYTES = 1 << 20
REMOTE_SECONDS = 120.0
"""The longest that a server may take to answer a question, and to send one piece of a file."""
MOST_BYTES_WITHOUT_SIZE = 64 << 30
"""The largest file for which the server does not announce a size."""


@contextmanager
def in_cache(lock: Path, content: str) -> Iterator[None]:
    """Let only one process at a time write a file into `data.cache_dir`, which is created if it is missing.

    Raises:
        DataError: also inside the block: the folder cannot be written. `content` names what would be kept there.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(lock, waiting_for=content):
            yield
    except OSError as error:
        raise DataError(
            f"{content} cannot be written to {lock.parent}: {describe_os_error(error)}. Set data.cache_dir to another "
            "folder, or make room."
        ) from error


@dataclass(frozen=True)
class RemoteRows:
    """The rows of a file at an address. It is copied into `cache_dir` on first use. Messages name it by its key."""

    key: str
    address: str
    cache_dir: str
    separator: str | None = None
    """The character between the cells of a CSV file, or `tab`; None: by the name of the file."""

    @property
    def label(self) -> str:
        """The address for messages, without credentials."""
        return without_passwords(self.address)

    def place(self, number: int) -> str:
        """Name one row in messages."""
        return FileRows(Path(name_of(self.address)), self.label).place(number)

    def check(self) -> None:
        """Check that the file exists and can be read. Raises the errors of `digest`."""
        ask(self.key, self.address, lambda files, path: files.info(path))

    def digest(self) -> str:
        """Compute a SHA-256 over the bytes of the file and what decides how they are read.

        Raises:
            DataError: there is no such file, it cannot be read, or its copy cannot be written.
        """
        return self._copy.digest()

    def rows(self) -> Iterator[RawRow]:
        """Yield every row, also rows that cannot be read. Raises the errors of `digest`."""
        return self._copy.rows()

    @cached_property
    def _copy(self) -> FileRows:
        info = ask(self.key, self.address, lambda files, path: files.info(path))
        version = {key: value for key, value in info.items() if key not in _SAME_IN_ALL_VERSIONS and value is not None}
        known = json.dumps([self.address, info.get("size"), version], sort_keys=True, default=str)
        folder = local_path(self.cache_dir)
        file = folder / f"fetched-{hashlib.sha256(known.encode()).hexdigest()[:32]}{suffixes_of(name_of(self.address))}"
        with in_cache(file.with_suffix(".lock"), f"the copy of {self.label}"):
            if version and is_own_file(file, "the rows are copied again"):
                _log.info("%s: copied before, to %s", self.label, file)
            else:
                self._fetch(file, info.get("size"))
        return FileRows(file, self.label, separator=self.separator)

    def _fetch(self, file: Path, size: int | None) -> None:
        """Copy the file piece by piece."""
        with (
            waiting(f"copying {self.label}"),
            closing(ask(self.key, self.address, lambda files, path: files.open(path, "rb"))) as remote,
            replacing(file) as copy,
        ):
            while piece := ask(self.key, self.address, lambda *_: _read_piece(remote)):
                copy.write(piece)
                if copy.tell() > (most := MOST_BYTES_WITHOUT_SIZE if size is None else size):
                    raise DataError(f"{self.label} has more than {most:,} bytes, the most that its server may send.")
            copied = copy.tell()
            if size is not None and copied != size:
                raise DataError(f"{self.label} ended after {copied:,} of {size:,} bytes. Start again.")
        _log.info("%s: %s copied to %s", self.label, format_bytes(copied), file)


def _read_piece(file: Any) -> bytes:
    """Read a whole piece, so that its deadline is one of many bytes. Some servers send a few bytes at a time."""
    piece = bytearray()
    while len(piece) < _PIECE_BYTES and (part := file.read(_PIECE_BYTES - len(piece))):
        piece += part
    return bytes(piece)


def names_at(key: str, address: str) -> dict[str, str]:
    """Return the addresses of the data files in a folder at an address, by file name. Raises the errors of `ask`."""

    def list_files(files: Any, path: str) -> dict[str, str]:
        return {name_of(file): files.unstrip_protocol(file) for file in sorted(files.ls(path, detail=False))}

    addresses = ask(key, address, list_files)
    return {name: file for name, file in addresses.items() if suffix_of(name) in SUFFIXES}


def name_of(address: str) -> str:
    """Return the name of the file at an address."""
    parts = urlsplit(address.partition("::")[0])
    return PurePosixPath(parts.netloc + parts.path).name


def ask(key: str, address: str, question: Callable[[Any, str], _Answer]) -> _Answer:
    """Call fsspec, and turn its errors into one sentence without credentials.

    `key` names the address in messages. The question gets the file system and the path there.

    Raises:
        DataError: there is no such scheme, file or folder, a package is missing, or the server refuses or is too slow.
        PreemptedError: the run was asked to stop meanwhile.
    """
    import fsspec

    subject = f"{key} is {without_passwords(address)}"
    try:
        files, path = fsspec.core.url_to_fs(address, **_http_options(address))
        return call_within(
            REMOTE_SECONDS,
            lambda: question(files, path),
            name=f"reading {key}",
            is_to_stop=lambda: received_stop_signal() is not None,
        )
    except StopRequestedError:
        raise PreemptedError(f"stopped as asked, while it read {without_passwords(address)}") from None
    except DeadlineExceededError:
        raise DataError(
            f"{subject}: the server has not sent an answer, or the next {format_bytes(_PIECE_BYTES)}, within "
            f"{REMOTE_SECONDS:g} s. Try again later, or copy the file here."
        ) from None
    except ImportError as error:
        fix = f"Run `{extra_command('http')}`" if address.startswith("http") else "Install it into this environment"
        raise DataError(f"{subject}, which needs a package that is not installed ({error}). {fix}.") from None
    except Exception as error:  # each scheme has its own errors; http names the status only in the cause
        cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
        if isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) == 404:
            raise DataError(f"{subject}, but there is no such file or folder. Correct the address.") from None
        reason = without_passwords(first_line(cause))
        raise DataError(
            f"{subject}, which cannot be read ({type(cause).__name__}: {reason}). Check the address, and the "
            "credentials that its scheme takes from the environment."
        ) from None


def _http_options(address: str) -> dict[str, Any]:
    """Return what fsspec should do for http: read a file as one stream, and leave its bytes as they are.

    Otherwise, aiohttp decompresses what the server declares as compressed, and fsspec reads a part of a file into
    memory however long it is. The time is counted in `ask`, because a large file may take longer than an answer.
    """
    schemes = [scheme for scheme in ("http", "https") if f"{scheme}://" in address]
    if not schemes:
        return {}
    from aiohttp import ClientTimeout

    client = {
        "auto_decompress": False,
        "headers": {"Accept-Encoding": "identity"},
        "timeout": ClientTimeout(total=None, sock_connect=30),
    }
    return {scheme: {"block_size": 0, "client_kwargs": client} for scheme in schemes}
