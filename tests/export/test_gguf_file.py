"""A GGUF file that lies about its sizes is refused in a sentence, before memory is taken for them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from finetune.errors import CheckpointError, RunFailedError
from finetune.export.gguf_file import read_header
from finetune.export.gguf_served import MODEL_FILE, ROUNDING_KEY, gguf_bound


def text(content: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content


def gguf(*keys: bytes, num_keys: int | None = None, num_tensors: int = 1, tensors: bytes = b"") -> bytes:
    start = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, len(keys) if num_keys is None else num_keys)
    return start + b"".join(keys) + tensors


TENSOR = text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)
ARRAY = text(b"a") + struct.pack("<I", 9)
LIES = {
    "keys": gguf(num_keys=2**63),
    "tensors": gguf(num_tensors=2**63, tensors=TENSOR),
    "a name": gguf(text(b"a", 2**62)),
    "a string": gguf(text(b"a") + struct.pack("<I", 8) + text(b"", 2**40)),
    "an array of numbers": gguf(ARRAY + struct.pack("<IQ", 4, 2**33)),
    "an array of strings": gguf(ARRAY + struct.pack("<IQ", 8, 2**60)),
    "arrays in arrays": gguf(ARRAY + struct.pack("<IQ", 9, 1) * 5000),
    "dimensions": gguf(tensors=text(b"t") + struct.pack("<I", 2**32 - 1)),
    "an unknown type": gguf(text(b"a") + struct.pack("<I", 99)),
    "alignment": gguf(text(b"general.alignment") + struct.pack("<IQ", 10, 2**62), tensors=TENSOR),
    "no alignment": gguf(text(b"general.alignment") + struct.pack("<II", 4, 0), tensors=TENSOR),
}


@pytest.mark.parametrize("what", LIES)
def test_a_file_that_lies_about_its_sizes_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_bytes(LIES[what])
    with pytest.raises(RunFailedError, match=r"is damaged: its header cannot be read \("):
        read_header(tmp_path / MODEL_FILE)


@pytest.mark.parametrize("claimed", [float("inf"), float("nan"), 1e9, -1.0])
def test_a_file_cannot_choose_how_far_it_may_be_off(claimed: float, tmp_path: Path) -> None:
    key = text(ROUNDING_KEY.encode()) + struct.pack("<Id", 12, claimed)
    (tmp_path / MODEL_FILE).write_bytes(gguf(key, tensors=TENSOR))
    with pytest.raises(CheckpointError, match=r"finetune\.rounding is .*; expected a number from 0 to 1"):
        gguf_bound(tmp_path)
