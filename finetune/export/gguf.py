"""A model folder as a GGUF file, through llama.cpp's own converter; what it needs and would not find is put beside.

Facts about the converter: ggml-org/llama.cpp, convert_hf_to_gguf.py and conversion/phi.py: a phi3 model's tokenizer is
read as byte-level BPE only where tokenizer_config.json calls its class GPT2Tokenizer, and else from tokenizer.model.
Format of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from finetune.errors import ConfigError, ModelError, RunFailedError

LLAMA_CPP_VARIABLE = "LLAMA_CPP_DIR"
CONVERTER = "convert_hf_to_gguf.py"
GgufType = Literal["auto", "f32", "f16", "bf16", "q8_0"]
_MAGIC = b"GGUF"
_HOW_TO_GET_IT = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp), install the packages that its "
    "requirements/requirements-convert_hf_to_gguf.txt names (at least gguf and sentencepiece), and say where it is "
    f"with --llama-cpp FOLDER or {LLAMA_CPP_VARIABLE}"
)


class GgufHeader(NamedTuple):
    """The first 24 bytes of a GGUF file."""

    version: int
    num_tensors: int
    num_metadata: int


def find_converter(folder: Path | None, environment: Mapping[str, str]) -> Path:
    """The converter in a checkout of llama.cpp.

    Args:
        folder: the checkout; None: what the environment says.
        environment: where LLAMA_CPP_DIR may be.

    Raises:
        ConfigError: there is none; says how to get it.
    """
    named = folder or (Path(environment[LLAMA_CPP_VARIABLE]) if environment.get(LLAMA_CPP_VARIABLE) else None)
    if named is None:
        raise ConfigError(f"--gguf needs llama.cpp's converter, and nothing says where it is. {_HOW_TO_GET_IT}.")
    script = named.expanduser().absolute() / CONVERTER
    if not script.is_file():
        raise ConfigError(f"{named} has no {CONVERTER}, so it is no checkout of llama.cpp. {_HOW_TO_GET_IT}.")
    return script


def convert(model: Path, out: Path, *, converter: Path, kind: GgufType, scratch: Path, base: Path | None) -> GgufHeader:
    """Run the converter, and look at what it wrote.

    Args:
        model: a merged folder.
        out: the file to write.
        converter: see `find_converter`.
        kind: the type of its weights; auto: the model's own 16-bit type.
        scratch: an empty folder for links to the model's files.
        base: the folder of the base, whose tokenizer.model a sentencepiece tokenizer needs; None: not known.

    Raises:
        ModelError: the converter does not know the model or its tokenizer; repeats its last words.
        RunFailedError: it wrote no whole file.
    """
    _link_model(model, scratch, base)
    command = [sys.executable, str(converter), str(scratch), "--outfile", str(out), "--outtype", kind]
    name = json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", "model")
    command += ["--model-name", str(name)]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise ModelError(_refusal(done.stderr, scratch))
    return read_header(out)


def read_header(path: Path) -> GgufHeader:
    """What a GGUF file says of itself.

    Raises:
        RunFailedError: it is no GGUF file, or holds nothing.
    """
    with path.open("rb") as file:
        start = file.read(24)
    if len(start) < 24 or start[:4] != _MAGIC:
        raise RunFailedError(f"the converter ended well, but {path.name} is no GGUF file. It was removed.")
    header = GgufHeader(*struct.unpack("<IQQ", start[4:24]))
    if not header.num_tensors:
        raise RunFailedError(f"the converter ended well, but {path.name} holds no tensor. It was removed.")
    return header


def _link_model(model: Path, scratch: Path, base: Path | None) -> None:
    """The model's files under their names; the tokenizer's description in the converter's words."""
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name != "README.md":
            (scratch / path.name).symlink_to(path.resolve())
    if not (scratch / "tokenizer.model").exists() and base is not None and (base / "tokenizer.model").is_file():
        (scratch / "tokenizer.model").symlink_to((base / "tokenizer.model").resolve())
    if is_byte_level(model) and not (scratch / "tokenizer.model").exists():
        described = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        described["tokenizer_class"] = "GPT2Tokenizer"
        (scratch / "tokenizer_config.json").unlink()
        (scratch / "tokenizer_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def is_byte_level(model: Path) -> bool:
    """Whether a folder's tokenizer is byte-level BPE, as that of GPT-2, phi-2, phi-4 and Phi-4-mini."""
    try:
        record = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    decoder = record.get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", ())]
    return record.get("model", {}).get("type") == "BPE" and any(part.get("type") == "ByteLevel" for part in parts)


def _refusal(log: str, scratch: Path) -> str:
    """The converter's own reason, and what to do where that is known."""
    reason = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "no word of why")
    hint = "Its own words tell what it needs; update llama.cpp if the model is newer than your checkout."
    if "pre-tokenizer was not recognized" in log:
        hint = (
            "llama.cpp knows tokenizers by name, from a list, and this one is not on it: models with a tokenizer of "
            "their own (phi_tiny is one) cannot be converted. Those of the Phi family on the hub can."
        )
    elif "tokenizer.model" in reason:
        hint = "Put the base's tokenizer.model into the merged folder; it is a file of the base's repository."
    elif "No module named" in reason:
        hint = f"Install the package into this environment: {_HOW_TO_GET_IT}."
    return f"llama.cpp's converter refused the model: {reason.replace(str(scratch), 'the model')}. {hint}"
