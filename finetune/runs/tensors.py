"""Write and read tensors in the safetensors format, one tensor at a time, through plain Python I/O.

The library's own writer either holds a second copy of everything in memory or reports a full disk without its
errno, and it orders several metadata keys at random.
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
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def shard_like(whole: torch.Tensor, held: Any) -> torch.Tensor:
    """Return a view of the part of a full tensor that corresponds to this process's shard of `held`."""
    for axis, placement in enumerate(held.placements if is_sharded(held) else ()):
        if placement.is_shard():
            pieces = torch.chunk(whole, held.device_mesh.size(axis), placement.dim)
            place = held.device_mesh.get_local_rank(axis)
            whole = pieces[place] if place < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


@dataclass(frozen=True)
class TensorFile:
    """The content of a safetensors file. Iterating yields its bytes; equal tensors give equal bytes.

    Attributes:
        tensors: on any device, with any strides; each is copied to the host when it is written.
        metadata: the one key and value of the file's metadata.
        whole: returns the full tensor of a sharded one. It is called while iterating, in the order of `ordered`.
    """

    tensors: Mapping[str, torch.Tensor]
    metadata: tuple[str, str]
    whole: Callable[[torch.Tensor], torch.Tensor] = local_shard

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
        """Yield the bytes; raise CheckpointError if the format has no name for a tensor's dtype."""
        header: dict[str, object] = {"__metadata__": dict([self.metadata])}
        position = 0
        for name, tensor in self.ordered:
            if tensor.dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{name} is of type {tensor.dtype}, which a safetensors file cannot hold.")
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
            flat = self.whole(tensor).detach().to("cpu").contiguous().reshape(-1)
            if len(flat):
                yield memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy before 2: no stub


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read the tensors of a file to the host, and its metadata.

    Raises:
        CheckpointError: the file is missing or is not a safetensors file.
    """
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def each_tensor(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the tensors of a file to the host, one after the other.

    Raises:
        CheckpointError: the file is missing or is not a safetensors file.
    """
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the dtype, the shape and the SHA-256 of a tensor, which may be on any device."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} sha256:{hashlib.sha256(raw).hexdigest()}"


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {describe_os_error(error)}.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from error
