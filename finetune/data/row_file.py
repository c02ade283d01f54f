"""Encoded rows, the safetensors file that keeps them, and the cache of these files.

While rows are encoded, memory holds a few numbers for each row, but not its tokens: these go to temporary files. A
finished file is mapped when it is read.

In the cache, the first process of a node encodes and the others read. The name of a file is a digest of everything
that its content depends on, so a file is never out of date. Files are written under another name and renamed, so they
are complete, and a digest of the content is checked on reading. The processes of a node take turns by a file lock, not
by a collective, because encoding may outlast its timeout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from finetune.data.rows import ROW_TYPE_NAMES
from finetune.data.splits import digest_row
from finetune.data.templates import LOSS_KINDS, ODDITIES, TokenisedRow
from finetune.fallbacks import Fallback, Fallbacks
from finetune.limits import is_own_file, open_regular
from finetune.runs.durable import describe_os_error, replacing
from finetune.runs.file_lock import file_lock
from finetune.runs.tensors import TensorFile, digest_tensor

if TYPE_CHECKING:
    from finetune.config.schema import DataSection
    from finetune.data.rows import Examples

METADATA_KEY = "finetune"
_log = logging.getLogger(__name__)
ENCODING_VERSION = 16
"""Raise it when the same rows and tokenizer give other tensors, or another refusal, than before."""


class RowFacts(NamedTuple):
    """Facts about the rows of a source."""

    row_type: str = "text"
    """messages, prompt_completion or text."""
    read_as: str = ""
    """A description of the format and the columns that the rows were read from."""
    ignored_keys: Sequence[tuple[str, int, int]] = ()
    """The keys that the chat template does not render: each with the number of rows of the source that have it, and the
    number of the first of them."""
    unread: Sequence[str] = ()
    """Columns that hold a part of the prompt and are not read."""
    num_dropped: int = 0
    """Rows that were left out because they cannot be used."""


class EncodedRows(NamedTuple):
    """The rows of a source as flat tensors: row i is `token_ids[offsets[i]:offsets[i + 1]]`."""

    token_ids: torch.Tensor
    """int32, shape (tokens,)."""
    is_target: torch.Tensor
    """bool, shape (tokens,): the model must predict this token."""
    offsets: torch.Tensor
    """int64, shape (rows + 1,)."""
    numbers: torch.Tensor
    """int64, shape (rows,): line or row in the source."""
    full_lengths: torch.Tensor
    """int64, shape (rows,): tokens of the row before it was cut at data.max_length."""
    num_targets: torch.Tensor
    """int64, shape (rows,): target tokens of the row."""
    loss_kinds: torch.Tensor
    """int32, shape (rows, 3): target tokens of the row of each of `LOSS_KINDS`."""
    oddities: torch.Tensor
    """bool, shape (rows, 2): which of `ODDITIES` each row has."""
    is_good: torch.Tensor
    """bool, shape (rows,): false for an answer that is labelled as bad."""
    raw_digests: torch.Tensor
    """uint8, shape (rows, 16): the `digest_row` of each row."""
    facts: RowFacts


class RowWriter:
    """Lays rows end to end: their tokens in one stream, and a byte for each token in another."""

    def __init__(self, token_ids: IO[bytes], is_target: IO[bytes]) -> None:
        self._streams = (token_ids, is_target)
        self.restart()

    def restart(self) -> None:
        """Forget all rows."""
        for stream in self._streams:
            stream.seek(0)
            stream.truncate()
        self._offsets, self._numbers = array("q", [0]), array("q")
        self.full_lengths, self.num_targets, self._loss_kinds = array("q"), array("q"), array("i")
        self._oddities, self._is_good, self._raw_digests = bytearray(), bytearray(), bytearray()

    def add(
        self, number: int, row: TokenisedRow, *, max_length: int, is_good: bool = True, digest: str | None = None
    ) -> None:
        """Append a row, cut at `max_length` tokens. Raises OSError if the disk refuses it.

        `digest` is the `digest_row` of the row as it was read. Default: that of its tokens.
        """
        ids, is_target = array("i", row.token_ids[:max_length]), row.is_target[:max_length]
        self._streams[0].write(ids)
        self._streams[1].write(is_target)
        self._offsets.append(self._offsets[-1] + len(ids))
        self._numbers.append(number)
        self.full_lengths.append(len(row.token_ids))
        self.num_targets.append(is_target.count(1))
        counts = [0] * len(LOSS_KINDS)
        for first, end, kind in row.kinds:
            counts[kind] += is_target.count(1, first, end)  # none beyond the cut
        self._loss_kinds.extend(counts)
        self._oddities.extend(row.oddities)
        self._is_good.append(is_good)
        self._raw_digests += bytes.fromhex(digest or digest_row(ids.tolist()))

    def rows(self, facts: RowFacts) -> EncodedRows:
        """Return all rows. Their tokens are mapped from the files, and stay there when the files are closed."""
        token_ids, is_target = map(_content, self._streams)
        return EncodedRows(
            token_ids=_as_tensor(token_ids, torch.int32),
            is_target=_as_tensor(is_target, torch.bool),
            offsets=_as_tensor(self._offsets, torch.int64),
            numbers=_as_tensor(self._numbers, torch.int64),
            full_lengths=_as_tensor(self.full_lengths, torch.int64),
            num_targets=_as_tensor(self.num_targets, torch.int64),
            loss_kinds=_as_tensor(self._loss_kinds, torch.int32).view(-1, len(LOSS_KINDS)),
            oddities=_as_tensor(self._oddities, torch.bool).view(-1, len(ODDITIES)),
            is_good=_as_tensor(self._is_good, torch.bool),
            raw_digests=_as_tensor(self._raw_digests, torch.uint8).view(-1, 16),
            facts=facts,
        )


Encode: TypeAlias = Callable[[RowWriter], RowFacts]
"""Puts all rows into a writer."""


def encode_to_disk(folder: Path, encode: Encode) -> EncodedRows:
    """Return encoded rows with their tokens mapped from temporary files in a folder. The files have no name.

    Raises:
        OSError: the disk refused.
    """
    with tempfile.TemporaryFile(dir=folder) as token_ids, tempfile.TemporaryFile(dir=folder) as is_target:
        writer = RowWriter(token_ids, is_target)
        facts = encode(writer)
        for stream in (token_ids, is_target):
            stream.flush()
        return writer.rows(facts)


def rows_in_memory(encode: Encode) -> EncodedRows:
    """Encode rows without a file."""
    writer = RowWriter(BytesIO(), BytesIO())
    return writer.rows(encode(writer))


def write_rows(path: Path, encode: Encode) -> None:
    """Write a file of rows, which takes its name once it is complete.

    Raises:
        OSError: the disk refused.
    """
    rows = encode_to_disk(path.parent, encode)
    tensors = _tensors_of(rows)
    about = {"sha256": _digest(tensors, rows.facts), "facts": rows.facts._asdict(), "date": date.today().isoformat()}
    with replacing(path) as file:
        file.writelines(TensorFile(tensors, (METADATA_KEY, json.dumps(about))))


def map_rows(path: Path) -> EncodedRows:
    """Map the rows of a file. The kernel reads pages when they are used, and can drop them when memory is short.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or of another version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()  # the library opens the path itself
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()[METADATA_KEY])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = RowFacts(**about["facts"])
        if _digest(tensors, facts) != about["sha256"]:
            raise ValueError("its content has changed since it was written")
        rows = EncodedRows(**tensors, facts=facts)
        _check_shapes(rows)
    except (SafetensorError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return rows


def _check_shapes(rows: EncodedRows) -> None:
    """Raise a ValueError if the tensors do not belong together. The digest only shows that they are as written."""
    num_tokens, num_rows = len(rows.token_ids), len(rows.numbers)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "token_ids": (torch.int32, (num_tokens,)),
        "is_target": (torch.bool, (num_tokens,)),
        "offsets": (torch.int64, (num_rows + 1,)),
        "numbers": (torch.int64, (num_rows,)),
        "full_lengths": (torch.int64, (num_rows,)),
        "num_targets": (torch.int64, (num_rows,)),
        "loss_kinds": (torch.int32, (num_rows, len(LOSS_KINDS))),
        "oddities": (torch.bool, (num_rows, len(ODDITIES))),
        "is_good": (torch.bool, (num_rows,)),
        "raw_digests": (torch.uint8, (num_rows, 16)),
    }
    for name, (dtype, shape) in expected.items():
        tensor: torch.Tensor = getattr(rows, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}; expected {dtype} of {shape}")
    ends_fit = bool(rows.offsets[0] == 0 and rows.offsets[-1] == num_tokens and (rows.offsets.diff() >= 0).all())
    if not ends_fit or (num_tokens and int(rows.token_ids.min()) < 0):
        raise ValueError("its offsets or tokens are out of range")
    if rows.facts.row_type not in ("messages", "prompt_completion", "text"):
        raise ValueError(f"its row type is {rows.facts.row_type}")


def _tensors_of(rows: EncodedRows) -> dict[str, torch.Tensor]:
    return {name: value for name, value in rows._asdict().items() if name != "facts"}


def _digest(tensors: Mapping[str, torch.Tensor], facts: RowFacts) -> str:
    """Compute a SHA-256 over the types, shapes and values of all tensors, and the facts."""
    digests = {name: digest_tensor(tensor) for name, tensor in tensors.items()}
    return hashlib.sha256(json.dumps([digests, facts], sort_keys=True).encode()).hexdigest()


def _content(stream: IO[bytes]) -> Any:
    """Return the content of a stream as a buffer. A file is mapped into memory."""
    if isinstance(stream, BytesIO):
        return stream.getbuffer()
    return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY) if stream.tell() else b""


def _as_tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(values, dtype=dtype) if len(values) else torch.zeros(0, dtype=dtype)


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
        **({"tools": examples.tools} if examples.tools else {}),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def path_of_rows(folder: Path, key: str) -> Path:
    """Return the file of the cache for a key, see `encoding_key`."""
    return folder / f"encoded-{key[:32]}.safetensors"


def load_or_encode(folder: Path, key: str, encode: Encode, fallbacks: Fallbacks, rows_name: str) -> EncodedRows:
    """Map the rows of the cache, or encode them and write them there first.

    The folder is created if it is missing. For `key` see `encoding_key`; `rows_name` names them in the log.

    Raises:
        DataError: whatever `encode` raises.
        ConfigError: the cache cannot be written and the run is strict.
    """
    path = path_of_rows(folder, key)
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
    if not is_own_file(path, f"{rows_name} is encoded again"):
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
