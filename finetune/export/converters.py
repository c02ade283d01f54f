"""The converters of other projects, with the table of what each of them would misread.

A converter runs in a process of its own, on a copy of the model folder in which some files are corrected for it. The
merged folder stays as transformers reads it. To support another converter, add a `Converter` with its corrections.

Facts about the converters: ggml-org/llama.cpp, convert_hf_to_gguf.py, conversion/phi.py and convert_lora_to_gguf.py;
microsoft/onnxruntime-genai 0.18, models/builder.py, builders/base.py and builders/phi.py.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from finetune.engine.decoder import SLIDING, family_of
from finetune.errors import CheckpointError, ConfigError, ModelError, last_line

Json = dict[str, Any]
SPLIT_OF_PHI_TINY = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"
_SAME_SPLITS = {SPLIT_OF_PHI_TINY: r"[\p{L}]+|[\p{N}]"}
"""Patterns by which a tokenizer splits text, in a form that onnxruntime-genai knows. Text between two matches is also a
piece."""
HOW_TO_GET_LLAMA_CPP = (
    "Get llama.cpp (git clone https://github.com/ggml-org/llama.cpp, or vendor/llama.cpp in the source package of "
    "llama-cpp-python: pip download --no-deps --no-binary :all: llama-cpp-python), install sentencepiece, and say "
    "where it is with --llama-cpp FOLDER or LLAMA_CPP_DIR"
)


class Converter(NamedTuple):
    """A converter of another project."""

    name: str
    corrections: Mapping[str, Callable[[Json], Json]]
    """For each JSON file that the converter or its runtime would misread: makes the content of the copy."""
    hints: Mapping[str, str]
    """What to do about a refusal, by a part of its reason. The empty part fits all others."""

    def copy(self, files: Iterable[Path], folder: Path) -> None:
        """Link files into a folder, and write corrected copies of those that the converter would misread."""
        for path in sorted(files):
            if correct := self.corrections.get(path.name):
                content = correct(json.loads(path.read_text(encoding="utf-8")))
                (folder / path.name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
            else:
                (folder / path.name).symlink_to(path.resolve())

    def run(self, command: Sequence[str], source: Path, *, inside: Path | None = None) -> None:
        """Run the converter, in the folder `inside`, without access to the hub.

        `source` is the copy of the model, which messages call `the model`.

        Raises:
            ModelError: the converter refuses the model; the message repeats its reason, and says what to do.
        """
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if command[0] != sys.executable:
            variables.pop("PYTHONPATH", None)  # it is of this environment
        try:
            process = subprocess.run(command, cwd=inside, env=variables, capture_output=True, text=True)
        except OSError as error:
            raise ModelError(f"{self.name} does not start: {command[0]}: {error.strerror}. Build it again.") from error
        if process.returncode != 0:
            reason = (last_line(process.stderr) or "it gave no reason").replace(str(source), "the model")
            hint = next(hint for part, hint in self.hints.items() if part in reason)
            raise ModelError(f"{self.name} refused the model: {reason}. {hint}")


def python_with(module: str, variable: str, *, name: str, remedy: str) -> str:
    """Return the Python that an environment variable names, by default this one, if it has the module.

    Raises:
        ConfigError: it has no such module; `name` is the name of the package, and `remedy` says what to do.
    """
    named = os.environ.get(variable)
    if named is None:
        if find_spec(module):
            return sys.executable
        raise ConfigError(f"{name} is not installed here. {remedy}")
    # -I: neither the current folder nor PYTHONPATH may supply the module.
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    if shutil.which(named) is None or subprocess.run([named, "-I", "-c", looks]).returncode:
        raise ConfigError(f"{name} is not in the environment of {variable}={named}. {remedy}")
    return named


def refuse_no_model(model: Path) -> None:
    """Refuse a folder that transformers cannot load as a model.

    Raises:
        CheckpointError: it is a run, an adapter, or something else.
    """
    if (model / "config.json").is_file() and any(model.glob("*.safetensors")):
        return
    if (model / "config.yaml").is_file() or (model / "adapter_config.json").is_file():
        merge = shlex.join(["finetune", "merge", str(model), "OUT"])
        raise CheckpointError(f"{model} is a run or an adapter, not a model. Merge it first: {merge}.")
    if not model.exists():
        raise CheckpointError(f"{model} does not exist. Name a folder that finetune merge wrote.")
    raise CheckpointError(
        f"{model} is not a model folder: it has no config.json with weights. Name a folder that finetune merge wrote."
    )


def files_of_model(model: Path) -> list[Path]:
    """List the files of a model folder that a converter gets: all except the card, and code that it might run."""
    return [path for path in model.iterdir() if path.is_file() and path.name != "README.md" and path.suffix != ".py"]


def _as_gpt2(tokenizer_config: Json) -> Json:
    """Name the class by which llama.cpp's converter recognises byte-level BPE for a phi3 model."""
    return {**tokenizer_config, "tokenizer_class": "GPT2Tokenizer"}


def _with_scale_of_llama_cpp(adapter_config: Json) -> Json:
    """Set the alpha for which alpha / rank, llama.cpp's scale, is the run's. rsLoRA scales by alpha / sqrt(rank)."""
    alpha = float(adapter_config["lora_alpha"])
    scaled = alpha * math.sqrt(adapter_config["r"]) if adapter_config.get("use_rslora") else alpha
    return {**adapter_config, "lora_alpha": scaled}


def _with_layers_and_rope(config: Json) -> Json:
    """Add the keys of config.json that onnxruntime-genai's builder needs and transformers does not.

    The builder gives a layer its window only if `layer_types` says so. `Family.is_longrope_by_context` says which
    models it takes for ones with LongRoPE. It reads the type of the rotary embedding under an older name.
    """
    family = family_of(config["model_type"])
    longest, window = config.get("max_position_embeddings"), config.get("sliding_window")
    changed = dict(config)
    if rope := config.get("rope_parameters") or config.get("rope_scaling"):
        changed["rope_parameters"] = {**rope, "type": rope.get("rope_type", rope.get("type", "default"))}
    if family.is_longrope_by_context and (not rope or changed["rope_parameters"]["type"] == "default"):
        changed["original_max_position_embeddings"] = longest
    if family.window == "all layers" and window and longest and window < longest:
        changed["layer_types"] = [SLIDING] * config["num_hidden_layers"]
    return changed


def _with_known_splits(tokenizer: Json) -> Json:
    """Spell the patterns of tokenizer.json as in `_SAME_SPLITS`."""
    splitter = tokenizer.get("pre_tokenizer") or {}
    for part in splitter.get("pretokenizers", [splitter]):
        pattern = part.get("pattern", {})
        if pattern.get("Regex") in _SAME_SPLITS:
            pattern["Regex"] = _SAME_SPLITS[pattern["Regex"]]
    return tokenizer


_LLAMA_CPP_HINTS = {
    "pre-tokenizer was not recognized": "llama.cpp supports a fixed list of tokenizers, and this one is not on it. The "
    "Phi models on the hub can be converted; a model with its own tokenizer, like phi_tiny, cannot.",
    "No module named": f"Install the package into this environment: {HOW_TO_GET_LLAMA_CPP}.",
    "": "If the model is newer than your checkout of llama.cpp, update llama.cpp.",
}
_LLAMA_CPP = "llama.cpp's converter"
SENTENCEPIECE_TO_GGUF = Converter(_LLAMA_CPP, {}, _LLAMA_CPP_HINTS)
BYTE_LEVEL_TO_GGUF = Converter(_LLAMA_CPP, {"tokenizer_config.json": _as_gpt2}, _LLAMA_CPP_HINTS)
QUANTIZER = Converter(
    "llama.cpp's quantizer", {}, {"": "Choose another --type, or export with --type q8_0, which needs no quantizer."}
)
IMATRIX = Converter("llama-imatrix", {}, {"": "Name more rows with --imatrix, or leave it out."})
ADAPTER_TO_GGUF = Converter(_LLAMA_CPP, {"adapter_config.json": _with_scale_of_llama_cpp}, _LLAMA_CPP_HINTS)
MODEL_TO_ONNX = Converter(
    "onnxruntime-genai's builder",
    {"config.json": _with_layers_and_rope, "tokenizer.json": _with_known_splits},
    {"": "If the model is newer than your onnxruntime-genai, update it. The merged folder can be served without it."},
)
MODEL_TO_COMPRESSED = Converter("llm-compressor", {}, {"": "Nothing was written."})
