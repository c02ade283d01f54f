"""The cache of encoded rows: the first process of a node encodes, the others read.

The name of a file is a digest of everything that its content depends on, so a file is never out of date. Files are
written under another name and renamed, so they are complete, and a digest of the content is checked on reading. The
processes of a node take turns by a file lock, not by a collective, because encoding may outlast its timeout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.row_file import CannotWriteError, Encode, EncodedRows, map_rows, rows_in_memory, write_rows
from finetune.data.rows import ROW_TYPE_NAMES
from finetune.fallbacks import Fallback, Fallbacks
from finetune.runs.durable import describe_os_error
from finetune.runs.file_lock import file_lock

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.data.rows import Examples

_log = logging.getLogger(__name__)

ENCODING_VERSION = 10
"""Raise it when the same rows and tokenizer give other tensors, or another refusal, than before."""


def encoding_key(examples: Examples, tokenizer_digest: str, section: DataSection) -> str:
    """Compute a SHA-256 over everything that the encoded rows of a source depend on."""
    parts = {
        "version": ENCODING_VERSION,
        "libraries": [version("transformers"), version("tokenizers")],
        "rows": examples.source.digest(),
        "format": [examples.reads, examples.format, sorted(examples.columns.items())],
        "drops": examples.drops,
        "train_on": section.train_on,
        "max_rows": examples.max_rows,
        "max_length": section.max_length,
        "tokenizer": tokenizer_digest,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_or_encode(folder: Path, key: str, encode: Encode, fallbacks: Fallbacks, what: str) -> EncodedRows:
    """Map the rows of the cache, or encode them and write them there first.

    The folder is created if it is missing. For `key` see `encoding_key`; `what` names the rows in the log.

    Raises:
        DataError: whatever `encode` raises.
        ConfigError: the cache cannot be written and the run is strict.
    """
    path = folder / f"encoded-{key[:32]}.safetensors"
    found = _read(path, what)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock"), waiting_for=f"the encoding of {what}"):
            found = _read(path, what)  # another process may have written it meanwhile
            if found is None:
                write_rows(path, encode)
                found = map_rows(path)
            return found
    except (OSError, CannotWriteError) as error:
        used = "no cache: every process encodes the rows itself, at every start"
        fallbacks.take(_fallback("data.cache_dir", str(folder), used, error))
    return _without_cache(encode, fallbacks)


def _without_cache(encode: Encode, fallbacks: Fallbacks) -> EncodedRows:
    """Encode into a temporary file without a name, or into memory if there is no room for a file."""
    try:
        with tempfile.TemporaryDirectory(prefix="finetune-rows-") as folder:
            path = Path(folder) / "rows.safetensors"
            write_rows(path, encode)
            return map_rows(path)  # the pages outlive the name
    except (OSError, CannotWriteError) as error:
        wanted = f"a file in {tempfile.gettempdir()}"
        fallbacks.take(_fallback("the encoded rows", wanted, "main memory, which holds all of them", error))
    return rows_in_memory(encode)


def _read(path: Path, what: str) -> EncodedRows | None:
    """Map a file. Return None if it does not exist, may not be read, is damaged, or is another user's."""
    if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises where a folder is locked)
        return None
    owner = os.lstat(path).st_uid
    if hasattr(os, "geteuid") and owner not in (os.geteuid(), 0):
        _log.warning("%s belongs to another user (uid %d), who could change it; %s is encoded again", path, owner, what)
        return None
    try:
        rows = map_rows(path)
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        _log.warning("%s is damaged (%s); %s is encoded again", path, error, what)
        return None
    _log.info("%s: %s; encoded before, read from %s", what, rows.read_as or ROW_TYPE_NAMES[rows.row_type], path)
    return rows


def _fallback(what: str, wanted: str, used: str, error: OSError | CannotWriteError) -> Fallback:
    cause = error.error if isinstance(error, CannotWriteError) else error
    return Fallback(what=what, wanted=wanted, used=used, why=describe_os_error(cause))
