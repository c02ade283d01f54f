"""Write a folder for those who serve a merged model: a GGUF file if you want one, and a Modelfile for Ollama."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, ConfigError
from finetune.export.gguf import Gguf, convert
from finetune.export.ollama import modelfile
from finetune.export.out_folder import new_folder
from finetune.export.vectors import copy_vectors

GGUF_FILE = "model.gguf"
COPY_BYTES = 1 << 22


def export_model(model: Path, out: Path, *, gguf: Gguf | None, with_modelfile: bool = True) -> int | None:
    """Write a folder with a GGUF file, a Modelfile, or both; all of it or nothing.

    Args:
        model: a merged folder.
        out: a folder that does not exist or is empty.
        gguf: None makes no GGUF file; the Modelfile then names the merged folder, which Ollama imports itself.
        with_modelfile: write a Modelfile.

    Returns:
        The number of tensors in the GGUF file; None without one.

    Raises:
        CheckpointError: `out` is taken, or `model` is not a merged folder.
        ConfigError: there is nothing to write.
        ModelError: llama.cpp or Ollama does not support the model.
        RunFailedError: the disk has too little room, or failed.
    """
    model = model.expanduser().absolute()
    refuse_no_model(model)
    if gguf is None and not with_modelfile:
        raise ConfigError("there is nothing to export: add --gguf, or leave out --no-modelfile.")
    text = _modelfile(model, f"./{GGUF_FILE}" if gguf else str(model)) if with_modelfile else None
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    num_tensors = None
    with new_folder(out, (4 if gguf and gguf.kind == "f32" else 2) * size if gguf else 0) as writer:
        if gguf is not None:
            with tempfile.TemporaryDirectory(dir=writer.path.parent) as aside:
                made = Path(aside, GGUF_FILE)
                num_tensors = convert(model, made, gguf)
                with made.open("rb") as file:
                    writer.write(GGUF_FILE, iter(lambda: file.read(COPY_BYTES), b""))
        if text is not None:
            writer.write("Modelfile", [text.encode()])
        copy_vectors(model, writer)
    return num_tensors


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


def _modelfile(model: Path, named: str) -> str:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    return modelfile(tokenizer, named, _stop_ids(model, tokenizer))


def _stop_ids(model: Path, tokenizer: Any) -> list[int]:
    """The stop ids of generation_config.json, which a merged folder holds as a list."""
    file = model / "generation_config.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ids = [found] if isinstance(found, int) else found or [tokenizer.eos_token_id]
    return [int(token_id) for token_id in ids if token_id is not None]
