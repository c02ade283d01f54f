"""Write a folder from which llama.cpp or Ollama serves a merged model: a GGUF file, a Modelfile, or both."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from finetune.errors import CheckpointError, ConfigError
from finetune.export.gguf import Gguf, GgufType, convert, keys_for_llama_cpp, refuse_other_tokens, stops_left_out
from finetune.export.gguf_file import with_keys
from finetune.export.gguf_served import MODEL_FILE, ROUNDING_KEY, GgufFiles, check_in_llama_cpp, installed_version
from finetune.export.gguf_tokens import Reading, find_rules, refuse_other_ids
from finetune.export.ollama import modelfile
from finetune.export.out_folder import new_folder
from finetune.export.rounding import ROUNDED, measure_folder
from finetune.export.vectors import VECTORS_FILE, copy_vectors, read_vectors
from finetune.model.unsupported import refuse_oversized_folder
from finetune.runs.durable import FolderWriter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export."""

    num_tensors: int | None = None
    """The number of tensors in the GGUF file; None without a GGUF file."""
    reading: Reading | None = None
    """How llama.cpp reads chats, by its rules; None without a GGUF file."""
    runtime: str | None = None
    """The llama.cpp that confirmed the reading; None if it is not installed."""

    @property
    def token_ids(self) -> str:
        """Return a sentence: whether llama.cpp encodes chats as in training, and how this was found."""
        if self.reading is None:
            return "Token ids were not compared, because the base was not exported."
        others, num = len(self.reading.plain) + len(self.reading.edges), len(self.reading.chats)
        same = f"{num - others} of {num} texts as the token ids of training"
        if self.runtime is not None:
            return f"{self.runtime} reads {same}, and stops where the run's model does."
        return f"By its rules llama.cpp reads {same}. Install llama-cpp-python to have it checked in llama.cpp itself."


def export_model(model: Path, out: Path, *, gguf: Gguf | None, with_modelfile: bool = True) -> Exported:
    """Write a folder with a GGUF file, a Modelfile, or both; all of it or nothing.

    Without a GGUF file (`gguf` is None), the Modelfile names the merged folder, which Ollama imports itself.

    Raises:
        CheckpointError: `out` is taken, or `model` is not a merged folder.
        ConfigError: there is nothing to write.
        ModelError: llama.cpp or Ollama does not support the model, or llama.cpp would read chats as other tokens.
        RunFailedError: the disk has too little room, or failed.
    """
    model = model.expanduser().absolute()
    refuse_no_model(model)
    if gguf is None and not with_modelfile:
        raise ConfigError("there is nothing to export: add --gguf, or leave out --no-modelfile.")
    refuse_oversized_folder(model)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    measure = partial(measure_folder, model, read_vectors(model)) if (model / VECTORS_FILE).is_file() else None
    stops = stored_stop_ids(model) or [it for it in [tokenizer.eos_token_id] if it is not None]
    named = f"./{MODEL_FILE}" if gguf else str(model)
    text = modelfile(tokenizer, named, stops) if with_modelfile else None
    exported = Exported()
    with new_folder(out, gguf_bytes(model, gguf.weight_type) if gguf else 0) as writer:
        if gguf is not None:
            exported = write_gguf(model, writer, MODEL_FILE, gguf, tokenizer, stops, measure)
        if text is not None:
            writer.write("Modelfile", [text.encode()])
        copy_vectors(model, writer)
    return exported


def gguf_bytes(model: Path, weight_type: GgufType) -> int:
    """Estimate the size of a model's GGUF file in bytes. The model may be stored in 16 bits."""
    return (4 if weight_type == "f32" else 2) * sum(path.stat().st_size for path in model.glob("*.safetensors"))


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
    with tempfile.TemporaryDirectory(dir=writer.path.parent) as aside:
        made = Path(aside, name)
        header = convert(model, made, gguf, reading.rules)
        refuse_other_tokens(header, tokenizer)
        keys: dict[str, float] = {**keys_for_llama_cpp(reading.rules, header, stop_ids)}
        file_type = header.keys.get("general.file_type", -1)
        if measure is not None and file_type in ROUNDED:
            keys[ROUNDING_KEY] = measure(file_type)
        writer.write(name, with_keys(made, header, keys))
    if others := [*reading.plain, *reading.edges]:
        causes = "; ".join(reading.causes) or "not known"
        message = "llama.cpp reads %d of %d texts as other tokens than training did. The first: %s. Cause: %s"
        _log.warning(message, len(others), len(reading.chats), others[0], causes)
    files, runtime = GgufFiles(writer.path / name), None
    if installed_version() is not None:
        runtime = check_in_llama_cpp(files, reading, tokenizer, stop_ids)
    elif left_out := stops_left_out(header, stop_ids):
        _log.warning(
            "a GGUF file names eos and two more ends of an answer, and the model stops at %d tokens: llama.cpp may not "
            "stop at %s. Give their texts as `stop` in each request, and start llama-server with --special",
            len(stop_ids),
            ", ".join(f"{tokenizer.convert_ids_to_tokens(token_id)} ({token_id})" for token_id in left_out),
        )
    return Exported(num_tensors=header.num_tensors, reading=reading, runtime=runtime)


def refuse_no_model(model: Path) -> None:
    """Refuse a folder that transformers cannot load as a model.

    Raises:
        CheckpointError: it is a run, an adapter, or something else.
    """
    if (model / "config.json").is_file() and any(model.glob("*.safetensors")):
        return
    if (model / "config.yaml").is_file() or (model / "adapter_config.json").is_file():
        raise CheckpointError(f"{model} is a run or an adapter, not a model. Merge it first: finetune merge RUN OUT.")
    raise CheckpointError(
        f"{model} is not a model folder: it has no config.json with weights. Name a folder that finetune merge wrote."
    )


def stored_stop_ids(model: Path) -> list[int]:
    """Return the stop ids of generation_config.json; an empty list if the file names none."""
    file = model / "generation_config.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    return [found] if isinstance(found, int) else [int(token_id) for token_id in found or []]
