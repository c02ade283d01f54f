"""A merged folder for those who serve models: a GGUF file where it is wanted, and a Modelfile for Ollama."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CheckpointError, ConfigError
from finetune.export.gguf import GgufHeader, GgufType, convert
from finetune.export.ollama import modelfile
from finetune.export.out_folder import refuse_small_disk, refuse_taken
from finetune.runs.durable import committed_folder, disk_failures_end_the_run

GGUF_FILE = "model.gguf"
_COPY_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """How to make a GGUF file.

    Attributes:
        converter: llama.cpp's script.
        kind: the type of its weights.
        base: a folder that may hold the base's tokenizer.model.
    """

    converter: Path
    kind: GgufType
    base: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: the files by name with their sizes, and what the GGUF file says of itself."""

    files: dict[str, int]
    header: GgufHeader | None


def export_model(model: Path, out: Path, *, gguf: Gguf | None, with_modelfile: bool = True) -> Exported:
    """Write a folder with a GGUF file, a Modelfile, or both; all of it or nothing.

    Args:
        model: a merged folder.
        out: a folder that is not there or is empty.
        gguf: None: no GGUF file; the Modelfile then names the merged folder, which Ollama imports itself.
        with_modelfile: write one.

    Raises:
        CheckpointError: the folder is taken, or `model` is no merged folder.
        ConfigError: nothing is wanted.
        ModelError: the converter or the Modelfile's language does not know the model.
        RunFailedError: the disk is too small or failed.
    """
    out, model = refuse_taken(out), model.expanduser().absolute()
    refuse_no_model(model)
    if gguf is None and not with_modelfile:
        raise ConfigError("there is nothing to export: ask for --gguf, or leave out --no-modelfile.")
    text = _modelfile(model, f"./{GGUF_FILE}" if gguf else str(model)) if with_modelfile else None
    header = None
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    refuse_small_disk(out, (4 if gguf and gguf.kind == "f32" else 2) * size if gguf else 0)
    with disk_failures_end_the_run("Writing", out), committed_folder(out) as writer:
        if gguf is not None:
            with tempfile.TemporaryDirectory(dir=writer.path.parent) as aside, tempfile.TemporaryDirectory() as links:
                made = Path(aside, GGUF_FILE)
                header = convert(
                    model, made, converter=gguf.converter, kind=gguf.kind, scratch=Path(links), base=gguf.base
                )
                with made.open("rb") as file:
                    writer.write(GGUF_FILE, iter(lambda: file.read(_COPY_BYTES), b""))
        if text is not None:
            writer.write("Modelfile", [text.encode()])
    names = [name for name in (GGUF_FILE, "Modelfile") if (out / name).is_file()]
    return Exported(files={name: (out / name).stat().st_size for name in names}, header=header)


def refuse_no_model(model: Path) -> None:
    """Only a folder that transformers loads can be exported.

    Raises:
        CheckpointError: it is a run, an adapter, or nothing of that kind.
    """
    if (model / "config.json").is_file() and any(model.glob("*.safetensors")):
        return
    if (model / "config.yaml").is_file() or (model / "adapter_config.json").is_file():
        raise CheckpointError(f"{model} is a run or an adapter, not a model. Merge it first: finetune merge RUN OUT.")
    raise CheckpointError(f"{model} is no model folder: it has no config.json with weights. Name one that merge wrote.")


def _modelfile(model: Path, named: str) -> str:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    return modelfile(tokenizer, named, _stop_ids(model, tokenizer))


def _stop_ids(model: Path, tokenizer: Any) -> list[int]:
    """As generation_config.json says; a merged folder has them as a list."""
    file = model / "generation_config.json"
    found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
    ids = [found] if isinstance(found, int) else found or [tokenizer.eos_token_id]
    return [int(token_id) for token_id in ids if token_id is not None]
