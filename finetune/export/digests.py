"""Digest the tensors and files of a model folder, and compare the digests with recorded ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from finetune.export.checks import Check
from finetune.export.vectors import LOGITS_FILE, VECTORS_FILE
from finetune.runs.durable import MANIFEST
from finetune.runs.tensors import digest_tensor, each_tensor
from finetune.runs.verification import OPTIMIZER_FILE

CERTIFICATE, VLLM_CERTIFICATE = "certificate.json", "certificate-vllm.json"
"""Of the runtime that the folder's files are for, and of vLLM."""
_EDITED_BY_USERS = ("README.md", "Modelfile")


class RecordedDigests(NamedTuple):
    """Digests of a folder that were recorded elsewhere, by name; empty if none were recorded."""

    tensors: Mapping[str, str] = {}
    files: Mapping[str, str] = {}

    def check(self, folder: Path) -> dict[str, Check]:
        """Check the tensors and the other files of a folder. Files that were not recorded do not count.

        Raises:
            CheckpointError: a file is not a safetensors file.
        """
        tensors = digest_weight_files(folder) if self.tensors else {}
        files = digest_files(folder) if self.files else {}
        known = {name: digest for name, digest in files.items() if name in self.files}
        return {
            "tensors": _check_digests(tensors, self.tensors, "tensor"),
            "files": _check_digests(known, self.files, "file"),
        }


def digest_weight_files(folder: Path) -> dict[str, str]:
    """Return the dtype, the shape and the SHA-256 of each weight in a folder's safetensors files, by name.

    Raises:
        CheckpointError: a file is not a safetensors file.
    """
    digests = {}
    for path in sorted(set(folder.glob("*.safetensors")) - {folder / OPTIMIZER_FILE}):
        for name, tensor in each_tensor(path):
            digests[name] = digest_tensor(tensor)
    return dict(sorted(digests.items()))


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, except weights, that decides what a model folder answers, by name."""
    left_out = (*_EDITED_BY_USERS, VECTORS_FILE, LOGITS_FILE, MANIFEST, CERTIFICATE, VLLM_CERTIFICATE)
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in left_out and path.suffix != ".safetensors":
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _check_digests(found: Mapping[str, str], expected: Mapping[str, str], what: str) -> Check:
    """Compare the digests of tensors or files with recorded ones."""
    equal = [name for name, digest in expected.items() if found.get(name) == digest]
    changed = sorted((found.keys() & expected.keys()) - set(equal))
    mismatches = (
        *(
            f"{what} {name} is not the one that was written ({_short(found[name])}, expected {_short(expected[name])})"
            for name in changed
        ),
        *(f"{what} {name} is missing" for name in sorted(expected.keys() - found.keys())),
        *(f"{what} {name} was not written by finetune" for name in sorted(found.keys() - expected.keys())),
    )
    return Check(len(expected), len(equal), mismatches)


def _short(digest: str) -> str:
    """Shorten the SHA-256 of a digest to 12 characters."""
    head, _, value = digest.rpartition(":")
    return f"{head}:{value[:12]}" if head else value[:12]
