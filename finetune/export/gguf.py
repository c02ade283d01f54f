"""Convert a model folder to a GGUF file with llama.cpp's own converter, and choose the keys that llama.cpp needs.

The converter reads the tokenizer of a phi3 model as byte-level BPE only if tokenizer_config.json names the class
GPT2Tokenizer, and otherwise from tokenizer.model (converters.py).
Format of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.errors import ConfigError, ModelError, RunFailedError
from finetune.export.converters import (
    BYTE_LEVEL_TO_GGUF,
    HOW_TO_GET_LLAMA_CPP,
    SENTENCEPIECE_TO_GGUF,
    Converter,
    files_of_model,
)
from finetune.export.gguf_file import Header, read_header
from finetune.export.gguf_tokens import TokenRules, is_byte_level

LLAMA_CPP_VARIABLE = "LLAMA_CPP_DIR"
CONVERTER = "convert_hf_to_gguf.py"
SENTENCEPIECE = "tokenizer.model"
GgufType = Literal["auto", "f32", "f16", "bf16", "q8_0"]
_ENDS_BESIDE_EOS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """The settings of a GGUF file."""

    converter: Path
    """The script of llama.cpp, see `find_converter`."""
    weight_type: GgufType
    """The type of the weights; auto is the model's own 16-bit type."""
    base: Path | None = None
    """A folder with the base's tokenizer.model, which a sentencepiece tokenizer needs."""
    allows_differences: bool = False
    """Write the file even if llama.cpp reads chats as other tokens than the run trained on."""


def find_converter(folder: Path | None, environment: Mapping[str, str]) -> Path:
    """Find the converter in a checkout of llama.cpp: in `folder`, or by default in the folder that LLAMA_CPP_DIR names.

    Raises:
        ConfigError: there is no converter; the message says how to get it.
    """
    named = folder or (Path(environment[LLAMA_CPP_VARIABLE]) if environment.get(LLAMA_CPP_VARIABLE) else None)
    if named is None:
        raise ConfigError(f"--gguf needs llama.cpp's converter, but its folder is not set. {HOW_TO_GET_LLAMA_CPP}.")
    script = named.expanduser().absolute() / CONVERTER
    if not script.is_file():
        raise ConfigError(f"{named} has no {CONVERTER}, so it is not a checkout of llama.cpp. {HOW_TO_GET_LLAMA_CPP}.")
    return script


def convert(model: Path, out: Path, gguf: Gguf, rules: TokenRules) -> Header:
    """Run the converter on a merged folder. Returns the header of the file that it wrote.

    Some of the rules are expressed by the name of the model in the file, the others by `keys_for_llama_cpp`.

    Raises:
        ModelError: the converter does not support the model or its tokenizer; the message repeats its reason.
        RunFailedError: it wrote no complete file.
    """
    family = str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", "model"))
    # `general.name` tells llama.cpp whether special tokens strip white space.
    neutral_name = "phi" if family.startswith("phi3") else family
    name = "phi-3" if rules.strips else neutral_name
    with tempfile.TemporaryDirectory() as scratch:
        converter = copy_for_llama_cpp(model, Path(scratch), gguf.base)
        options = ["--outtype", gguf.weight_type, "--model-name", name, "--outfile", str(out)]
        converter.run([sys.executable, str(gguf.converter), scratch, *options], Path(scratch))
    return read_written(out)


def read_written(out: Path) -> Header:
    """Read the header of the file that a converter of llama.cpp wrote.

    Raises:
        RunFailedError: the file is not complete.
    """
    try:
        return read_header(out)
    except RunFailedError as error:
        why = str(error).replace(str(out), out.name)
        raise RunFailedError(f"the converter reported success, but {why} It was removed.") from error


def keys_for_llama_cpp(rules: TokenRules, header: Header, stop_ids: Sequence[int]) -> dict[str, bool | int]:
    """Return the keys that the converter does not write as the run needs them.

    A chat template renders the whole text, so llama.cpp must add no token before it. llama.cpp ends an answer at eos,
    end of turn and end of message, and at tokens whose text it knows.
    """
    keys = dict(zip(_ENDS_BESIDE_EOS, _stops_beside_eos(header, stop_ids), strict=False))
    return {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_space_prefix": rules.puts_space, **keys}


def stops_left_out(header: Header, stop_ids: Sequence[int]) -> list[int]:
    """Return the stop ids without a key in a GGUF file. llama.cpp stops there only if it knows the token's text."""
    return _stops_beside_eos(header, stop_ids)[len(_ENDS_BESIDE_EOS) :]


def refuse_other_tokens(header: Header, tokenizer: Any) -> None:
    """Refuse a file with other tokens than the tokenizer has, for example from the tokenizer.model of another model.

    Raises:
        ModelError: names the first token that differs.
    """
    there = header.keys.get("tokenizer.ggml.tokens", [])
    ours = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    for token_id, token in enumerate(ours):
        if token is not None and there[token_id : token_id + 1] != [token]:
            other = there[token_id] if token_id < len(there) else "missing"
            raise ModelError(
                f"token {token_id} is {token!r} in the model's tokenizer.json, but {other!r} in the GGUF file: "
                "tokenizer.model belongs to another tokenizer. Take the base's file (--base). Nothing was written."
            )


def _stops_beside_eos(header: Header, stop_ids: Sequence[int]) -> list[int]:
    eos = header.keys.get("tokenizer.ggml.eos_token_id")
    return [token_id for token_id in stop_ids if token_id != eos]


def copy_for_llama_cpp(model: Path, copy: Path, base: Path | None) -> Converter:
    """Copy the model for the converter, and choose the corrections that its tokenizer needs.

    If the model has no tokenizer.model, which a sentencepiece tokenizer needs, take the one in the folder `base`.

    Raises:
        ModelError: the folder does not describe its tokenizer.
    """
    files = files_of_model(model)
    if base is not None and (base / SENTENCEPIECE).is_file() and not (model / SENTENCEPIECE).exists():
        files.append(base / SENTENCEPIECE)
    has_sentencepiece = any(path.name == SENTENCEPIECE for path in files)
    if has_sentencepiece or not _is_byte_level(model):
        converter = SENTENCEPIECE_TO_GGUF
    elif not (model / "tokenizer_config.json").is_file():
        raise ModelError(
            f"{model} has a tokenizer.json but no tokenizer_config.json, which llama.cpp's converter reads. Put the "
            "base's file there, or merge the run again. Nothing was written."
        )
    else:
        converter = BYTE_LEVEL_TO_GGUF
    converter.copy(files, copy)
    return converter


def _is_byte_level(model: Path) -> bool:
    try:
        return is_byte_level(json.loads((model / "tokenizer.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
