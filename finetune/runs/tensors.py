"""Write and read tensors in the safetensors format, one tensor at a time, through plain Python I/O.

The library's own writer needs all tensors at once, and then a second copy of them, or reports a full disk without its
errno. Tensors that are sharded are made whole here one at a time. The library also orders tensors of different types
differently, so checkpoints would have other bytes.
Format: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from finetune.errors import CheckpointError
from finetune.limits import open_regular
from finetune.runs.durable import describe_os_error

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each process holds a shard."""
    return hasattr(tensor, "to_local")  # to import its class takes half a second


def local_shard(tensor: Any) -> torch.Tensor:
    """Return this process's shard of a tensor, or the whole tensor if it is not sharded."""
    shard: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return shard


def shard_like(full: torch.Tensor, like: Any) -> torch.Tensor:
    """Return a view of the part of a full tensor that corresponds to this process's shard of `like`."""
    for axis, placement in enumerate(like.placements if is_sharded(like) else ()):
        if placement.is_shard():
            chunks = torch.chunk(full, like.device_mesh.size(axis), placement.dim)
            rank = like.device_mesh.get_local_rank(axis)
            full = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full


@dataclass(frozen=True)
class TensorFile:
    """The content of a safetensors file. Iterating yields its bytes; equal tensors give equal bytes."""

    tensors: Mapping[str, torch.Tensor]
    """On any device, with any strides. Each is copied to the host when it is written."""
    metadata: tuple[str, str]
    """The one key and value of the file's metadata."""
    full_tensor: Callable[[torch.Tensor], torch.Tensor] = local_shard
    """Returns the full tensor of a sharded one. It is called while iterating, in the order of `ordered`."""

    @property
    def ordered(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors as they follow each other in the file."""
        # Wide types first, so that each tensor starts at a multiple of its item size.
        return sorted(self.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, without the header."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def copied(self) -> TensorFile:
        """Copy the tensors to the host, so that later optimizer steps do not change them."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return replace(self, tensors=copies)

    def not_finite(self) -> Iterator[str]:
        """Yield the names of tensors whose shard on this process has a value that is not finite."""
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(local_shard(tensor)).all()):
                yield name

    def __iter__(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes."""
        header: dict[str, object] = {"__metadata__": dict([self.metadata])}
        position = 0
        for name, tensor in self.ordered:
            end = position + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for _, tensor in self.ordered:
            full = self.full_tensor(tensor)  # also of an empty one: every rank counts these calls
            if full.numel():
                yield _bytes_of(full)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read the tensors of a file to the host, and its metadata. Raises CheckpointError as `open_tensors` does."""
    with open_tensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the dtype, the shape and the SHA-256 of a tensor, which may be on any device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} sha256:{hashlib.sha256(_bytes_of(tensor)).hexdigest()}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy before 2: no stub


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file to read its tensors to the host; CheckpointError if it is missing or no safetensors file."""
    try:
        open_regular(path, follows_links=True).close()  # the library opens the path itself, and would wait for a FIFO
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from error
