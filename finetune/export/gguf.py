"""Convert a model folder to a GGUF file with llama.cpp's own converter, after adding what the converter would not find.

Facts about the converter: ggml-org/llama.cpp, convert_hf_to_gguf.py and conversion/phi.py: it reads the tokenizer of a
phi3 model as byte-level BPE only where tokenizer_config.json names the class GPT2Tokenizer, and otherwise from
tokenizer.model. Format of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from finetune.errors import ConfigError, ModelError, RunFailedError, last_line
from finetune.export.gguf_file import Header, read_header
from finetune.export.gguf_tokens import TokenRules, is_byte_level

LLAMA_CPP_VARIABLE = "LLAMA_CPP_DIR"
CONVERTER = "convert_hf_to_gguf.py"
GgufType = Literal["auto", "f32", "f16", "bf16", "q8_0"]
_ENDS_BESIDE_EOS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_HOW_TO_GET_IT = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp, or vendor/llama.cpp in the source package of "
    "llama-cpp-python: pip download --no-deps --no-binary :all: llama-cpp-python), install sentencepiece, and say "
    f"where it is with --llama-cpp FOLDER or {LLAMA_CPP_VARIABLE}"
)


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """The settings of a GGUF file.

    Attributes:
        converter: llama.cpp's script, see `find_converter`.
        kind: the type of the weights; auto is the model's own 16-bit type.
        base: a folder with the base's tokenizer.model, which a sentencepiece tokenizer needs.
        allows_differences: write the file even if llama.cpp reads chats as other tokens than the run trained on.
    """

    converter: Path
    kind: GgufType
    base: Path | None = None
    allows_differences: bool = False


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


def convert(model: Path, out: Path, gguf: Gguf, rules: TokenRules) -> Header:
    """Run the converter on a merged folder. Returns the header of the file that it wrote.

    Args:
        model: a merged folder.
        out: the file to write.
        gguf: the settings.
        rules: how llama.cpp is to read texts. The file's name tells it a part; `keys_for_llama_cpp` has the rest.

    Raises:
        ModelError: the converter does not support the model or its tokenizer; the message repeats its reason.
        RunFailedError: it wrote no complete file.
    """
    kind = str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", "model"))
    with tempfile.TemporaryDirectory() as scratch:
        _link_model(model, Path(scratch), gguf.base)
        words = [scratch, "--outtype", gguf.kind, "--model-name", _name(kind, rules)]
        run_converter(gguf.converter, words, out, scratch)
    return read_written(out)


def run_converter(script: Path, words: Sequence[str], out: Path, scratch: str) -> None:
    """Run a script of llama.cpp in a process of its own, which asks no hub.

    Raises:
        ModelError: it refuses; the message repeats its reason.
    """
    command = [sys.executable, str(script), *words, "--outfile", str(out)]
    done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise ModelError(_refusal(done.stderr, scratch))


def read_written(out: Path) -> Header:
    """Read the header of the file that a script of llama.cpp wrote.

    Raises:
        RunFailedError: it wrote no complete file.
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
    """Refuse a file whose tokens are not the tokenizer's, as when tokenizer.model is another model's.

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
                "tokenizer.model belongs to another tokenizer. Take that of the base (--base). Nothing was written."
            )


def _stops_beside_eos(header: Header, stop_ids: Sequence[int]) -> list[int]:
    eos = header.keys.get("tokenizer.ggml.eos_token_id")
    return [token_id for token_id in stop_ids if token_id != eos]


def _name(kind: str, rules: TokenRules) -> str:
    """Choose the file's `general.name`, which tells llama.cpp whether special tokens strip white space."""
    if rules.strips:
        return "phi-3"
    return "phi" if kind.startswith("phi3") else kind


def _is_byte_level(model: Path) -> bool:
    try:
        return is_byte_level(json.loads((model / "tokenizer.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _link_model(model: Path, scratch: Path, base: Path | None) -> None:
    """Link the model's files, and describe the tokenizer the way the converter expects.

    Raises:
        ModelError: the folder does not describe its tokenizer.
    """
    for path in sorted(model.iterdir()):
        if path.is_file() and path.name != "README.md":
            (scratch / path.name).symlink_to(path.resolve())
    if not (scratch / "tokenizer.model").exists() and base is not None and (base / "tokenizer.model").is_file():
        (scratch / "tokenizer.model").symlink_to((base / "tokenizer.model").resolve())
    if _is_byte_level(model) and not (scratch / "tokenizer.model").exists():
        if not (model / "tokenizer_config.json").is_file():
            raise ModelError(
                f"{model} has a tokenizer.json but no tokenizer_config.json, which llama.cpp's converter reads. Put "
                "that of the base there, or merge the run again. Nothing was written."
            )
        described = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
        described["tokenizer_class"] = "GPT2Tokenizer"
        (scratch / "tokenizer_config.json").unlink()
        (scratch / "tokenizer_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")


def _refusal(log: str, scratch: str) -> str:
    """Write the message of a refusal: the converter's own reason, and what to do if it is known."""
    reason = last_line(log) or "it gave no reason"
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
