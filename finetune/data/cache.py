"""The cache of encoded rows: the first process of a node encodes, the others read.

The name of a file is a digest of everything that its content depends on, so a file is never out of date. Files are
written under another name and renamed, so they are complete, and a digest of the content is checked on reading. The
processes of a node take turns by a file lock, not by a collective, because encoding may outlast its timeout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.encoded import EncodedRows, digest_tensors
from finetune.data.rows import kind_in_words
from finetune.fallbacks import Fallback, Fallbacks
from finetune.runs.durable import describe_os_error, replace_file
from finetune.runs.file_lock import file_lock

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.data.rows import Examples

_log = logging.getLogger(__name__)

ENCODING_VERSION = 5
"""Raise it when the same rows and tokenizer give other tensors, or another refusal, than before."""

_METADATA_KEY = "finetune"  # one key only: safetensors writes several in random order
_TENSORS = tuple(name for name in EncodedRows._fields if name not in ("kind", "read_as"))


def encoding_key(examples: Examples, tokenizer_digest: str, section: DataSection) -> str:
    """Compute a SHA-256 over everything that the encoded rows of a source depend on."""
    parts = {
        "version": ENCODING_VERSION,
        "libraries": [version("transformers"), version("tokenizers")],
        "rows": examples.source.digest(),
        "format": [examples.format, sorted(examples.columns.items())],
        "train_on": section.train_on,
        "max_rows": examples.max_rows,
        "max_length": section.max_length,
        "tokenizer": tokenizer_digest,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load_or_encode(
    folder: Path, key: str, encode: Callable[[], EncodedRows], fallbacks: Fallbacks, what: str
) -> EncodedRows:
    """Read the rows from the cache, or encode them and write them there.

    Args:
        folder: the cache; created if missing.
        key: see `encoding_key`.
        encode: makes the rows.
        fallbacks: records that the cache cannot be written.
        what: names the rows in the log.

    Raises:
        DataError: whatever `encode` raises.
        ConfigError: the cache cannot be written and the run is strict.
    """
    path = folder / f"encoded-{key[:32]}.safetensors"
    found = _read(path, what)
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(path.with_suffix(".lock"), waiting_for=f"the encoding of {what}"))
        except OSError as error:
            fallbacks.take(_without_cache(folder, error))
            return encode()
        found = _read(path, what)  # another process may have written it meanwhile
        if found is not None:
            return found
        made = encode()
        try:
            _write(path, made)
        except OSError as error:
            fallbacks.take(_without_cache(folder, error))
        return made


def _write(path: Path, rows: EncodedRows) -> None:
    from safetensors.torch import save

    tensors = {name: getattr(rows, name) for name in _TENSORS}
    about = {"sha256": digest_tensors(tensors.values()), "kind": rows.kind, "read_as": rows.read_as}
    replace_file(path, save(tensors, {_METADATA_KEY: json.dumps(about)}))


def _read(path: Path, what: str) -> EncodedRows | None:
    """Read a file; None if it does not exist, or is damaged, which is logged."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[_METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in _TENSORS}
        if digest_tensors(tensors.values()) != about["sha256"]:
            raise ValueError("its content has changed since it was written")
        rows = EncodedRows(**tensors, kind=about["kind"], read_as=about["read_as"])
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        _log.warning("%s is damaged (%s); %s is encoded again", path, error, what)
        return None
    _log.info("%s: %s; encoded before, read from %s", what, rows.read_as or kind_in_words(rows.kind), path)
    return rows


def _without_cache(folder: Path, error: OSError) -> Fallback:
    return Fallback(
        what="data.cache_dir",
        wanted=str(folder),
        used="no cache: every process encodes the rows itself, at every start",
        why=describe_os_error(error),
    )
