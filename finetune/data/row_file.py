"""The file of encoded rows: written row by row while they are encoded, and mapped when it is read.

It is a safetensors file. The header has a fixed size, so that rows can be written before their number is known. While
a file is written, memory holds a few numbers for each row, but not its tokens.
Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from array import array
from collections.abc import Callable, Sequence
from io import BufferedRandom, BufferedReader, BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import torch

from finetune.data.held_out import digest_row
from finetune.data.templates import TokenisedRow
from finetune.runs.durable import replacing

_HEADER_BYTES = 4096
_METADATA_KEY = "finetune"  # one key only: safetensors writes several in random order
_DTYPES = {"I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool, "U8": torch.uint8}


class EncodedRows(NamedTuple):
    """Rows as flat tensors: row i is `token_ids[offsets[i]:offsets[i + 1]]`."""

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
    is_good: torch.Tensor
    """bool, shape (rows,): false for an answer that is labelled as bad."""
    raw_digests: torch.Tensor
    """uint8, shape (16 * rows,): the `digest_row` of each row."""
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


class RowFacts(NamedTuple):
    """Facts about the rows of a source; see `EncodedRows`."""

    row_type: str = "text"
    read_as: str = ""
    ignored_keys: Sequence[tuple[str, int, int]] = ()
    unread: Sequence[str] = ()
    num_dropped: int = 0


Encode: TypeAlias = "Callable[[RowWriter], RowFacts]"
"""Puts all rows into a writer."""


class CannotWriteError(Exception):
    """The rows cannot be written. Not an OSError, because `encode_in_processes` takes an OSError for a lost process."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class RowWriter:
    """Lays rows end to end: their tokens in one stream, and a byte for each token in another."""

    def __init__(self, token_ids: IO[bytes], is_target: IO[bytes]) -> None:
        self._streams = (token_ids, is_target)
        self._begin = tuple(stream.tell() for stream in self._streams)
        self.restart()

    def restart(self) -> None:
        """Forget all rows."""
        for stream, position in zip(self._streams, self._begin, strict=True):
            stream.seek(position)
            stream.truncate()
        self.offsets, self.numbers = array("q", [0]), array("q")
        self.full_lengths, self.num_targets = array("q"), array("q")
        self.is_good, self.raw_digests = bytearray(), bytearray()

    def add(
        self, number: int, row: TokenisedRow, *, max_length: int, is_good: bool = True, digest: str | None = None
    ) -> None:
        """Append a row, cut at `max_length` tokens. Raise a CannotWriteError if the disk refuses it.

        `digest` is the `digest_row` of the row as it was read. Default: that of its tokens.
        """
        ids, is_target = array("i", row.token_ids[:max_length]), row.is_target[:max_length]
        try:
            self._streams[0].write(ids)
            self._streams[1].write(is_target)
        except OSError as error:
            raise CannotWriteError(error) from error
        self.offsets.append(self.offsets[-1] + len(ids))
        self.numbers.append(number)
        self.full_lengths.append(len(row.token_ids))
        self.num_targets.append(is_target.count(1))
        self.is_good.append(is_good)
        self.raw_digests += bytes.fromhex(digest or digest_row(ids.tolist()))

    def of_each_row(self) -> dict[str, tuple[str, array[int] | bytearray]]:
        """Return the numbers of the rows by their names in `EncodedRows`, with their types in the file."""
        int64 = ("offsets", "numbers", "full_lengths", "num_targets")
        others = {"is_good": ("BOOL", self.is_good), "raw_digests": ("U8", self.raw_digests)}
        return {**{name: ("I64", getattr(self, name)) for name in int64}, **others}


def rows_in_memory(encode: Encode) -> EncodedRows:
    """Encode rows without a file."""
    streams = BytesIO(), BytesIO()
    writer = RowWriter(*streams)
    facts = encode(writer)
    tokens = [("token_ids", "I32", streams[0]), ("is_target", "BOOL", streams[1])]
    tensors: dict[str, Any] = {name: _as_tensor(bytearray(stream.getbuffer()), dtype) for name, dtype, stream in tokens}
    tensors |= {name: _as_tensor(values, dtype) for name, (dtype, values) in writer.of_each_row().items()}
    return EncodedRows(**tensors, **facts._asdict())


def write_rows(path: Path, encode: Encode) -> None:
    """Write a file of rows, which takes its name once it is complete.

    Raises:
        OSError: the disk refused.
        CannotWriteError: it refused a row.
    """
    with replacing(path) as file, tempfile.TemporaryFile(dir=path.parent) as is_target:
        file.write(bytes(_HEADER_BYTES))
        writer = RowWriter(file, is_target)
        facts = json.dumps(encode(writer)._asdict()).encode()
        is_target.seek(0)
        shutil.copyfileobj(is_target, file)
        num_tokens = writer.offsets[-1]
        facts += b" " * (-(file.tell() + len(facts)) % 8)  # the numbers of 8 bytes after it must be aligned
        file.write(facts)
        header: dict[str, Any] = {}
        _enter(header, "token_ids", "I32", num_tokens)
        _enter(header, "is_target", "BOOL", num_tokens)
        _enter(header, "facts", "U8", len(facts))
        for name, (dtype, values) in writer.of_each_row().items():
            _enter(header, name, dtype, len(values))
            file.write(values)
        file.seek(_HEADER_BYTES)
        metadata = {"__metadata__": {_METADATA_KEY: json.dumps({"sha256": _digest(file, header)})}}
        text = json.dumps({**metadata, **header}, separators=(",", ":")).encode()
        file.seek(0)
        file.write((_HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(_HEADER_BYTES - 8))


def map_rows(path: Path) -> EncodedRows:
    """Map the rows of a file. The kernel reads pages when they are used, and can drop them when memory is short.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb") as raw:
        header = _read_header(raw)
        about = json.loads(header.pop("__metadata__")[_METADATA_KEY])
        if _digest(raw, header) != about["sha256"]:
            raise ValueError("its content has changed since it was written")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in header}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    facts = json.loads(tensors.pop("facts").numpy().tobytes())
    rows = EncodedRows(**tensors, **facts)
    _check_shapes(rows)
    return rows


def _read_header(file: BufferedReader) -> dict[str, Any]:
    if int.from_bytes(file.read(8), "little") != _HEADER_BYTES - 8:
        raise ValueError("it does not begin like a file of encoded rows")
    try:
        header: dict[str, Any] = json.loads(file.read(_HEADER_BYTES - 8))
    except UnicodeDecodeError:
        raise ValueError("its header is no text") from None
    return header


def _check_shapes(rows: EncodedRows) -> None:
    """Raise a ValueError if the tensors do not belong together. The digest only shows that they are as written."""
    num_tokens, num_rows = len(rows.token_ids), len(rows.numbers)
    expected = dict.fromkeys(("numbers", "full_lengths", "num_targets"), (torch.int64, num_rows))
    expected |= {"token_ids": (torch.int32, num_tokens), "is_target": (torch.bool, num_tokens)}
    expected |= {"offsets": (torch.int64, num_rows + 1), "is_good": (torch.bool, num_rows)}
    expected |= {"raw_digests": (torch.uint8, 16 * num_rows)}
    for name, (dtype, length) in expected.items():
        tensor: torch.Tensor = getattr(rows, name)
        if tensor.dtype != dtype or tuple(tensor.shape) != (length,):
            raise ValueError(f"{name} is {tensor.dtype} of {tuple(tensor.shape)}; expected {dtype} of ({length},)")
    ends_fit = bool(rows.offsets[0] == 0 and rows.offsets[-1] == num_tokens and (rows.offsets.diff() >= 0).all())
    if not ends_fit or (num_tokens and int(rows.token_ids.min()) < 0):
        raise ValueError("its offsets or tokens are out of range")
    if rows.row_type not in ("messages", "prompt_completion", "text"):
        raise ValueError(f"its row type is {rows.row_type}")


def _enter(header: dict[str, Any], name: str, dtype: str, length: int) -> None:
    """Add a tensor to a header, after the tensors that it has."""
    begin = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    end = begin + length * _DTYPES[dtype].itemsize
    header[name] = {"dtype": dtype, "shape": [length], "data_offsets": [begin, end]}


def _digest(file: BufferedRandom | BufferedReader, header: dict[str, Any]) -> str:
    """Compute a SHA-256 over the rest of a file and its header, in pieces."""
    digest = hashlib.file_digest(file, "sha256")
    digest.update(json.dumps(header, sort_keys=True).encode())
    return digest.hexdigest()


def _as_tensor(values: array[int] | bytearray, dtype: str) -> torch.Tensor:
    torch_dtype = _DTYPES[dtype]
    return torch.frombuffer(values, dtype=torch_dtype) if values else torch.zeros(0, dtype=torch_dtype)
