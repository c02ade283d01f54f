"""Convert a model folder to a GGUF file with llama.cpp's own converter, after adding what the converter would not find.

Facts about the converter: ggml-org/llama.cpp, convert_hf_to_gguf.py and conversion/phi.py: it reads the tokenizer of a
phi3 model as byte-level BPE only where tokenizer_config.json names the class GPT2Tokenizer, and otherwise from
tokenizer.model. Format of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune.errors import ConfigError, ModelError, RunFailedError

LLAMA_CPP_VARIABLE = "LLAMA_CPP_DIR"
CONVERTER = "convert_hf_to_gguf.py"
GgufType = Literal["auto", "f32", "f16", "bf16", "q8_0"]
_HOW_TO_GET_IT = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp), install the packages that its "
    "requirements/requirements-convert_hf_to_gguf.txt names (at least gguf and sentencepiece), and say where it is "
    f"with --llama-cpp FOLDER or {LLAMA_CPP_VARIABLE}"
)


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """The settings of a GGUF file.

    Attributes:
        converter: llama.cpp's script, see `find_converter`.
        kind: the type of the weights; auto is the model's own 16-bit type.
        base: a folder with the base's tokenizer.model, which a sentencepiece tokenizer needs.
    """

    converter: Path
    kind: GgufType
    base: Path | None = None


def find_converter(folder: Path | None, environment: Mapping[str, str]) -> Path:
    """Find the converter in a checkout of llama.cpp.

    Args:
        folder: the checkout; None reads LLAMA_CPP_DIR.
        environment: where LLAMA_CPP_DIR may be set.

    Raises:
        ConfigError: there is no converter; the message says how to get it.
    """
    named = folder or (Path(environment[LLAMA_CPP_VARIABLE]) if environment.get(LLAMA_CPP_VARIABLE) else None)
    if named is None:
        raise ConfigError(f"--gguf needs llama.cpp's converter, but its folder is not set. {_HOW_TO_GET_IT}.")
    script = named.expanduser().absolute() / CONVERTER
    if not script.is_file():
        raise ConfigError(f"{named} has no {CONVERTER}, so it is not a checkout of llama.cpp. {_HOW_TO_GET_IT}.")
    return script


def convert(model: Path, out: Path, gguf: Gguf) -> int:
    """Run the converter on a merged folder, and check the file it wrote. Returns the number of tensors in `out`.

    Raises:
        ModelError: the converter does not support the model or its tokenizer; the message repeats its reason.
        RunFailedError: it wrote no complete file.
    """
    name = str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", "model"))
    with tempfile.TemporaryDirectory() as scratch:
        _link_model(model, Path(scratch), gguf.base)
        command = [sys.executable, str(gguf.converter), scratch, "--outfile", str(out)]
        command += ["--outtype", gguf.kind, "--model-name", name]
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise ModelError(_refusal(done.stderr, scratch))
    return count_tensors(out)


def count_tensors(path: Path) -> int:
    """The number of tensors that the header of a GGUF file states.

    Raises:
        RunFailedError: it is not a GGUF file, or holds nothing.
    """
    with path.open("rb") as file:
        header = file.read(24)
    if len(header) < 24 or header[:4] != b"GGUF":
        raise RunFailedError(f"the converter reported success, but {path.name} is not a GGUF file. It was removed.")
    _version, num_tensors, _num_metadata = struct.unpack("<IQQ", header[4:])
    if not num_tensors:
        raise RunFailedError(f"the converter reported success, but {path.name} holds no tensors. It was removed.")
    return int(num_tensors)


def is_byte_level(model: Path) -> bool:
    """Whether a folder's tokenizer is byte-level BPE, like those of GPT-2, phi-2, phi-4 and Phi-4-mini."""
    try:
        record = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    decoder = record.get("decoder") or {}
    parts = [decoder, *decoder.get("decoders", ())]
    return record.get("model", {}).get("type") == "BPE" and any(part.get("type") == "ByteLevel" for part in parts)


def _link_model(model: Path, scratch: Path, base: Path | None) -> None:
    """Link the model's files, and describe the tokenizer the way the converter expects."""
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


def _refusal(log: str, scratch: str) -> str:
    """The converter's own reason, and what to do where that is known."""
    reason = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it gave no reason")
    hint = "If the model is newer than your checkout of llama.cpp, update llama.cpp."
    if "pre-tokenizer was not recognized" in log:
        hint = (
            "llama.cpp supports a fixed list of tokenizers, and this one is not on it. The Phi models on the hub can "
            "be converted; a model with its own tokenizer, like phi_tiny, cannot."
        )
    elif "tokenizer.model" in reason:
        hint = "Put the base's tokenizer.model into the merged folder; it is a file of the base's repository."
    elif "No module named" in reason:
        hint = f"Install the package into this environment: {_HOW_TO_GET_IT}."
    return f"llama.cpp's converter refused the model: {reason.replace(scratch, 'the model')}. {hint}"
