"""The header of a GGUF file: read its keys, and write the file again with keys set.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, with numbers in little-endian order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from finetune.errors import RunFailedError

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_INT, _FLOAT, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_MOST_ITEMS = 1 << 24
"""The most items of an array: vocabularies have fewer tokens."""
_MOST_ALIGNMENT = 1 << 16
_COPY_BYTES = 1 << 22
TENSOR_TYPES = {0: "f32", 1: "f16", 2: "q4_0", 6: "q5_0", 7: "q5_1", 8: "q8_0", 30: "bf16"} | {
    **{10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k"}
}
"""The names of the types of tensors, by `ggml_type` in ggml/include/ggml.h."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a GGUF file."""

    version: int
    num_tensors: int
    keys: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    """The offsets at which each key begins, and at which its value ends."""
    tensors: tuple[int, int]
    """The offsets of the list of tensors. Their data begin at the next multiple of the alignment."""
    matrices: list[tuple[int, int]]
    """The length of the rows and the type, see `TENSOR_TYPES`, of each tensor that is not a vector."""


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file.

    Raises:
        RunFailedError: it is not a GGUF file, holds no tensors, or ends within its header.
    """
    with path.open("rb") as file:
        start = file.read(24)
        if len(start) < 24 or start[:4] != b"GGUF":
            raise RunFailedError(f"{path} is not a GGUF file.")
        version, num_tensors, num_keys = struct.unpack("<IQQ", start[4:])
        if not num_tensors:
            raise RunFailedError(f"{path} holds no tensors.")
        try:
            keys, spans = dict[str, Any](), dict[str, tuple[int, int]]()
            for _ in range(num_keys):
                begin, name = file.tell(), _text(file)
                keys[name] = _value(file, _numbers(file, "I")[0])
                spans[name] = (begin, file.tell())
            tensors_at, matrices = file.tell(), []
            for _ in range(num_tensors):
                _text(file)  # its name
                (num_dimensions,) = _numbers(file, "I")
                *shape, tensor_type, _ = _numbers(file, f"{_checked(num_dimensions)}QIQ")  # the last one is its place
                if len(shape) > 1:
                    matrices.append((shape[0], tensor_type))
            alignment = keys.get("general.alignment", 32)
            if not isinstance(alignment, int) or not 0 < alignment <= _MOST_ALIGNMENT:
                raise ValueError(f"general.alignment is {alignment!r}")
        except (struct.error, KeyError, ValueError, OverflowError, MemoryError, RecursionError) as error:
            raise RunFailedError(f"{path} is damaged: its header cannot be read ({error}).") from error
        places = (tensors_at, file.tell())
    return Header(version=version, num_tensors=num_tensors, keys=keys, spans=spans, tensors=places, matrices=matrices)


def with_keys(path: Path, header: Header, keys: Mapping[str, bool | int | float]) -> Iterator[bytes]:
    """Yield the bytes of the file with these keys set. They replace keys of the same names."""
    alignment = int(header.keys.get("general.alignment", 32))
    kept_spans = [span for name, span in header.spans.items() if name not in keys]
    with path.open("rb") as file:
        start = struct.pack("<4sIQQ", b"GGUF", header.version, header.num_tensors, len(kept_spans) + len(keys))
        parts = [start, *(_encode(name, value) for name, value in keys.items())]
        for begin, end in [*kept_spans, header.tensors]:
            file.seek(begin)
            parts.append(file.read(end - begin))
        size = sum(map(len, parts))
        yield b"".join([*parts, bytes(-size % alignment)])
        file.seek(header.tensors[1] + -header.tensors[1] % alignment)
        yield from iter(partial(file.read, _COPY_BYTES), b"")


def _encode(name: str, value: bool | int | float) -> bytes:
    text = name.encode()
    value_type = {bool: _BOOL, int: _INT, float: _FLOAT}[type(value)]
    return struct.pack(f"<Q{len(text)}sI{_NUMBERS[value_type]}", len(text), text, value_type, value)


def _value(file: BinaryIO, value_type: int) -> Any:
    if value_type == _STRING:
        return _text(file)
    if value_type != _ARRAY:
        return _numbers(file, _NUMBERS[value_type])[0]
    item_type, count = _numbers(file, "IQ")
    _checked(count)
    if item_type in _NUMBERS:
        return list(_numbers(file, f"{count}{_NUMBERS[item_type]}"))
    return [_value(file, item_type) for _ in range(count)]


def _text(file: BinaryIO) -> str:
    (length,) = _numbers(file, "Q")
    return file.read(_checked(length)).decode("utf-8", errors="replace")


def _numbers(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _checked(count: int) -> int:
    """Return a count of items or bytes. A ValueError says that no file has so many, before memory is taken for them."""
    if count > _MOST_ITEMS:
        raise ValueError(f"it names a value of {count:,} items; expected at most {_MOST_ITEMS:,}")
    return count
