"""Write small GGUF files, as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def write_gguf(
    path: Path,
    keys: Mapping[str, bool | float | str | list[str]],
    data: bytes = bytes(32),
    matrices: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Path:
    """A file with one tensor of bytes, and in its header matrices: the length of their rows and their type."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 1 + len(matrices), len(keys))
    for name, value in keys.items():
        content += _text(name) + _value(value)
    content += _text("tensor") + struct.pack("<IQIQ", 1, len(data), 24, 0)
    for name, (length, tensor_type) in matrices.items():
        content += _text(name) + struct.pack("<IQQIQ", 2, length, 1, tensor_type, 0)
    path.write_bytes(content + bytes(-len(content) % 32) + data)
    return path


def _value(value: bool | float | str | list[str]) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
