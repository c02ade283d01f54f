"""Write a folder from which llama.cpp or Ollama serves a model: a GGUF file, a Modelfile, or both.

llama.cpp's own converter writes the GGUF file. Keys that it does not write as the run needs them are set afterwards.
Format of the file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from finetune.data.templates import adds_bos
from finetune.engine.decoder import family_of
from finetune.errors import ConfigError, ModelError, RunFailedError, first_line
from finetune.export.converters import (
    BYTE_LEVEL_TO_GGUF,
    HOW_TO_GET_LLAMA_CPP,
    SENTENCEPIECE_TO_GGUF,
    Converter,
    files_of_model,
    refuse_no_model,
)
from finetune.export.gguf_file import Header, read_header, with_keys
from finetune.export.gguf_sentencepiece import refuse_other_tokens, refuse_other_vocabulary, sentencepiece_model
from finetune.export.gguf_served import (
    MODEL_FILE,
    ROUNDING_KEY,
    GgufFiles,
    LlamaCpp,
    check_in_llama_cpp,
    installed_version,
)
from finetune.export.gguf_tokens import Reading, TokenRules, find_rules, is_byte_level, refuse_other_ids
from finetune.export.merge import SENTENCEPIECE
from finetune.export.ollama import modelfile
from finetune.export.out_folder import new_folder
from finetune.export.quantizing import Quantizer, vectors_of_quantized
from finetune.export.rounding import ROUNDED, measure_folder
from finetune.export.vectors import VECTORS_FILE, copy_vectors, digest_files, read_vectors, write_vectors
from finetune.limits import read_chunks
from finetune.model.unsupported import refuse_oversized_folder
from finetune.runs.durable import FolderWriter

LLAMA_CPP_VARIABLE = "LLAMA_CPP_DIR"
CONVERTER = "convert_hf_to_gguf.py"
GgufType = Literal["auto", "f32", "f16", "bf16", "q8_0", "q2_k", "q3_k_m", "q4_0", "q4_k_m", "q5_k_m", "q6_k"]
_ADDS_BOS = "tokenizer.ggml.add_bos_token"
_ENDS_BESIDE_EOS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """The settings of a GGUF file."""

    converter: Path
    """The script of llama.cpp, see `find_converter`."""
    weight_type: GgufType
    """The type of the weights; auto is the model's own 16-bit type."""
    quantizer: Quantizer | None = None
    """For a type in `QUANTIZED`, which the converter does not write."""
    base: Path | None = None
    """A folder with the base's tokenizer.model. None, or without that file: it is made from tokenizer.json."""
    allows_differences: bool = False
    """Write the file even if llama.cpp reads chats as other tokens than the run trained on."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    num_tensors: int | None = None
    """The number of tensors in the GGUF file; None without a GGUF file."""
    reading: Reading | None = None
    """How llama.cpp reads chats, by its rules; None without a GGUF file of a model."""
    runtime: str | None = None
    """The llama.cpp that confirmed the reading; None if it is not installed."""
    note: str = ""
    """How a quantized model was measured against the run, as a sentence without a full stop."""

    @property
    def token_ids(self) -> str:
        """Return a sentence: whether llama.cpp encodes chats as in training, and how this was found."""
        if self.reading is None:
            return "Token ids were not compared, because the base was not exported."
        num_chats, num_others = len(self.reading.chats), len(self.reading.others)
        same = f"{num_chats - num_others} of {num_chats} texts as the token ids of training"
        if self.runtime is not None:
            return f"{self.runtime} reads {same}, and stops where the run's model does."
        return f"By its rules llama.cpp reads {same}. Install llama-cpp-python to have it checked in llama.cpp itself."


def find_converter(folder: Path | None, environment: Mapping[str, str]) -> Path:
    """Find the converter in a checkout of llama.cpp: in `folder`, or by default in the folder that LLAMA_CPP_DIR names.

    Raises:
        ConfigError: there is no converter; the message says how to get it.
    """
    named = folder or (Path(environment[LLAMA_CPP_VARIABLE]) if environment.get(LLAMA_CPP_VARIABLE) else None)
    if named is None:
        raise ConfigError(f"GGUF files need llama.cpp's converter, but its folder is not set. {HOW_TO_GET_LLAMA_CPP}.")
    script = named.expanduser().absolute() / CONVERTER
    if not script.is_file():
        raise ConfigError(f"{named} has no {CONVERTER}, so it is not a checkout of llama.cpp. {HOW_TO_GET_LLAMA_CPP}.")
    return script


def export_model(model: Path, out: Path, *, gguf: Gguf | None, with_modelfile: bool = True) -> Exported:
    """Write a folder with a GGUF file, a Modelfile, or both; all of it or nothing.

    Without a GGUF file (`gguf` is None), the Modelfile names the merged folder, which Ollama imports itself.

    Raises:
        CheckpointError: `out` is taken, or `model` is not a merged folder.
        ModelError: llama.cpp or Ollama does not support the model, or would read chats as other tokens.
        RunFailedError: the disk has too little room, or failed.
    """
    model = model.expanduser().absolute()
    refuse_no_model(model)
    refuse_oversized_folder(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    record = tokenizer.backend_tokenizer.to_str() if gguf is None and not (model / SENTENCEPIECE).is_file() else None
    if record and not is_byte_level(json.loads(record)):
        raise ModelError(
            f"{model} has no {SENTENCEPIECE}, without which Ollama takes its tokenizer for another kind, and reads "
            "other tokens than those of training. Export a GGUF file instead: finetune export gguf."
        )
    measure = partial(measure_folder, model, read_vectors(model)) if (model / VECTORS_FILE).is_file() else None
    stops = stored_stop_ids(model)
    if not stops and tokenizer.eos_token_id is not None:
        stops = [tokenizer.eos_token_id]
    text = modelfile(tokenizer, f"./{MODEL_FILE}" if gguf else str(model), stops) if with_modelfile else None
    exported = Exported()
    with new_folder(out, gguf_bytes(model, gguf.weight_type) if gguf else 0) as writer:
        if gguf is not None:
            exported = write_gguf(model, writer, MODEL_FILE, gguf, tokenizer, stops, measure)
        if text is not None:
            writer.write("Modelfile", [text.encode()])
        if gguf is not None and gguf.quantizer is not None and measure is not None:
            file = writer.path / MODEL_FILE
            with closing(LlamaCpp(GgufFiles(file))) as served:
                own = vectors_of_quantized(served, read_vectors(model), file, gguf.weight_type, gguf.quantizer)
            write_vectors(writer, replace(own, files=digest_files(writer.path)))
            exported = replace(exported, note=own.note)
        else:
            copy_vectors(model, writer)
    return exported


def write_gguf(
    model: Path,
    writer: FolderWriter,
    name: str,
    gguf: Gguf,
    tokenizer: Any,
    stop_ids: Sequence[int],
    measure: Callable[[int], float] | None,
) -> Exported:
    """Convert a model into a folder, so that llama.cpp reads chats as the tokenizer does.

    If llama-cpp-python is installed, load the file there, and compare how it encodes the same chats. `measure` is
    `measure_rounding` of what is served, by file type; None if it has no test vectors.

    Raises:
        ModelError: llama.cpp does not support the model, or would read chats as other tokens.
        RunFailedError: numbers of the model are too large for the type.
    """
    reading = find_rules(tokenizer)
    if not gguf.allows_differences:
        refuse_other_ids(reading)
    kept = gguf.quantizer and gguf.quantizer.workspace
    with nullcontext(str(kept)) if kept else tempfile.TemporaryDirectory(dir=writer.path) as aside:
        converted, unquantized = Path(aside, name), Path(aside, "unquantized.gguf")
        if not unquantized.is_file():
            header = convert(model, converted, gguf, reading)
            keys: dict[str, float] = {**keys_for_llama_cpp(reading.rules, header, stop_ids)}
            if tokenizer.chat_template is None:
                keys[_ADDS_BOS] = adds_bos(tokenizer)
            file_type = header.keys.get("general.file_type", -1)
            if measure is not None and gguf.quantizer is None and file_type in ROUNDED:
                keys[ROUNDING_KEY] = measure(file_type)
            with unquantized.open("wb") as file:
                file.writelines(with_keys(converted, header, keys))
            converted.unlink()
        written = gguf.quantizer.quantize(unquantized, gguf.weight_type) if gguf.quantizer else unquantized
        header = read_written(written)
        refuse_other_tokens(header.keys, tokenizer)
        if not gguf.allows_differences:
            refuse_other_vocabulary(header.keys, tokenizer, reading.record)
        writer.write(name, read_chunks(written))
    if reading.others:
        message = "llama.cpp reads %d of %d texts as other tokens than training did. The first: %s"
        _log.warning(message, len(reading.others), len(reading.chats), reading.others[0])
    files, runtime = GgufFiles(writer.path / name), None
    if installed_version() is not None:
        runtime = check_in_llama_cpp(files, reading, tokenizer, stop_ids)
    elif unnamed := _stops_beside_eos(header, stop_ids)[len(_ENDS_BESIDE_EOS) :]:
        _log.warning(
            "a GGUF file names eos and two more ends of an answer, and the model stops at %d tokens: llama.cpp may not "
            "stop at %s. Give their texts as `stop` in each request, and start llama-server with --special",
            len(stop_ids),
            ", ".join(f"{tokenizer.convert_ids_to_tokens(token_id)} ({token_id})" for token_id in unnamed),
        )
    return Exported(num_tensors=header.num_tensors, reading=reading, runtime=runtime)


def gguf_bytes(model: Path, weight_type: GgufType) -> int:
    """Estimate the size of a model's GGUF file in bytes. The model may be stored in 16 bits."""
    return (4 if weight_type == "f32" else 2) * sum(path.stat().st_size for path in model.glob("*.safetensors"))


def stored_stop_ids(model: Path) -> list[int]:
    """Return the stop ids of generation_config.json; an empty list if the file names none.

    Raises:
        ModelError: the file is damaged.
    """
    file = model / "generation_config.json"
    try:
        stops = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        return [stops] if isinstance(stops, int) else [int(token_id) for token_id in stops or []]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {first_line(error)}. Merge the run again.") from error


def convert(model: Path, out: Path, gguf: Gguf, reading: Reading) -> Header:
    """Run the converter on a merged folder. Returns the header of the file that it wrote.

    Some of the rules are expressed by the name of the model in the file, the others by `keys_for_llama_cpp`.

    Raises:
        ModelError: the converter does not support the model or its tokenizer; the message repeats its reason.
        RunFailedError: it wrote no complete file.
    """
    model_type = str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("model_type", "model"))
    name = "phi-3" if reading.rules.strips else family_of(model_type).gguf_name or model_type
    with tempfile.TemporaryDirectory() as scratch:
        converter = copy_for_llama_cpp(model, Path(scratch), gguf.base, reading.record)
        weight_type = "auto" if gguf.quantizer else gguf.weight_type
        options = ["--outtype", weight_type, "--model-name", name, "--outfile", str(out)]
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
        reason = str(error).replace(str(out), out.name)
        raise RunFailedError(f"the converter reported success, but {reason} It was removed.") from error


def keys_for_llama_cpp(rules: TokenRules, header: Header, stop_ids: Sequence[int]) -> dict[str, bool | int]:
    """Return the keys that the converter does not write as the run needs them.

    A chat template renders the whole text, so llama.cpp must add no token before it; without a template, `write_gguf`
    sets this key. llama.cpp ends an answer at eos, end of turn and end of message, and at tokens whose text it knows.
    """
    keys = dict(zip(_ENDS_BESIDE_EOS, _stops_beside_eos(header, stop_ids), strict=False))
    return {_ADDS_BOS: False, "tokenizer.ggml.add_space_prefix": rules.puts_space, **keys}


def _stops_beside_eos(header: Header, stop_ids: Sequence[int]) -> list[int]:
    """Return the stop ids but eos. A file has keys for two. At others, llama.cpp stops only if it knows their text."""
    eos = header.keys.get("tokenizer.ggml.eos_token_id")
    return [token_id for token_id in stop_ids if token_id != eos]


def copy_for_llama_cpp(model: Path, copy: Path, base: Path | None, record: dict[str, Any]) -> Converter:
    """Copy the model for the converter, with the corrections that its tokenizer needs.

    A sentencepiece tokenizer needs tokenizer.model. If the model has none, take the one in the folder `base`, or make
    one from `record`, the content of tokenizer.json.

    Raises:
        ModelError: the folder does not describe its tokenizer.
    """
    files = {path.name: path for path in files_of_model(model)}
    if "tokenizer_config.json" not in files:
        raise ModelError(
            f"{model} has no tokenizer_config.json, which llama.cpp's converter reads. Put the base's file there, or "
            "merge the run again. Nothing was written."
        )
    if is_byte_level(record):
        converter = BYTE_LEVEL_TO_GGUF
    else:
        # The converter looks for them there, where transformers 5 does not write them, and takes them for text.
        added = {"added_tokens_decoder": {str(token["id"]): token for token in record["added_tokens"]}}
        converter = SENTENCEPIECE_TO_GGUF._replace(corrections={"tokenizer_config.json": lambda own: {**own, **added}})
        if base is not None and (base / SENTENCEPIECE).is_file():
            files.setdefault(SENTENCEPIECE, base / SENTENCEPIECE)
        elif SENTENCEPIECE not in files:
            (copy / SENTENCEPIECE).write_bytes(sentencepiece_model(record))
    converter.copy(files.values(), copy)
    return converter
