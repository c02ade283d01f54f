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

from finetune.data.row_file import Encode, EncodedRows, encode_to_disk, map_rows, rows_in_memory, write_rows
from finetune.data.rows import ROW_TYPE_NAMES
from finetune.fallbacks import Fallback, Fallbacks
from finetune.runs.durable import describe_os_error
from finetune.runs.file_lock import file_lock

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.data.rows import Examples

_log = logging.getLogger(__name__)

ENCODING_VERSION = 11
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


def load_or_encode(folder: Path, key: str, encode: Encode, fallbacks: Fallbacks, rows_name: str) -> EncodedRows:
    """Map the rows of the cache, or encode them and write them there first.

    The folder is created if it is missing. For `key` see `encoding_key`; `rows_name` names them in the log.

    Raises:
        DataError: whatever `encode` raises.
        ConfigError: the cache cannot be written and the run is strict.
    """
    path = folder / f"encoded-{key[:32]}.safetensors"
    rows = _read(path, rows_name)
    if rows is not None:
        return rows
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock"), waiting_for=f"the encoding of {rows_name}"):
            rows = _read(path, rows_name)  # another process may have written it meanwhile
            if rows is None:
                write_rows(path, encode)
                rows = map_rows(path)
            return rows
    except OSError as error:
        used = "no cache: every process encodes the rows itself, at every start"
        _fall_back(fallbacks, "data.cache_dir", str(folder), used, error)
    temporary = tempfile.gettempdir()
    try:
        return encode_to_disk(Path(temporary), encode)
    except OSError as error:
        used = "main memory, which holds all of them"
        _fall_back(fallbacks, "the encoded rows", f"a file in {temporary}", used, error)
    return rows_in_memory(encode)


def _fall_back(fallbacks: Fallbacks, what: str, wanted: str, used: str, error: OSError) -> None:
    fallbacks.take(Fallback(what=what, wanted=wanted, used=used, why=describe_os_error(error)))


def _read(path: Path, rows_name: str) -> EncodedRows | None:
    """Map a file. Return None if it does not exist, may not be read, is damaged, or is another user's."""
    if not os.path.exists(path):  # noqa: PTH110 (Path.exists raises where a folder is locked)
        return None
    owner = os.lstat(path).st_uid
    if hasattr(os, "geteuid") and owner not in (os.geteuid(), 0):
        _log.warning(
            "%s belongs to another user (uid %d), who could change it; %s is encoded again", path, owner, rows_name
        )
        return None
    try:
        rows = map_rows(path)
    except (ValueError, OSError) as error:
        _log.warning("%s is damaged (%s); %s is encoded again", path, error, rows_name)
        return None
    _log.info(
        "%s: %s; encoded before, read from %s",
        rows_name,
        rows.facts.read_as or ROW_TYPE_NAMES[rows.facts.row_type],
        path,
    )
    return rows
