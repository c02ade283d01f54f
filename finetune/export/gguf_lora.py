"""Convert a run's adapter to a GGUF LoRA beside its base, for servers that keep one base and several adapters.

Facts: ggml-org/llama.cpp, convert_lora_to_gguf.py (it converts pairs of lora_A and lora_B only) and
src/llama-adapter.h (`get_scale`: llama.cpp scales the update by alpha / rank).
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from finetune.config.hub import cached_file
from finetune.data.templates import stop_ids
from finetune.errors import ConfigError, ModelError
from finetune.export.converters import ADAPTER_TO_GGUF
from finetune.export.gguf import Exported, Gguf, gguf_bytes, read_written, stored_stop_ids, write_gguf
from finetune.export.gguf_served import ADAPTER_FILE, BASE_FILE, GgufFiles, check_in_llama_cpp
from finetune.export.gguf_tokens import refuse_other_tokenizer
from finetune.export.merge import load_tuned_model
from finetune.export.ollama import modelfile
from finetune.export.out_folder import new_folder
from finetune.export.rounding import measure_rounding
from finetune.export.vectors import digest_weight_files, write_vectors
from finetune.export.verifying import vectors_of_run
from finetune.inference.finished_run import FinishedRun
from finetune.model.from_hub import locate_model, repository_of
from finetune.model.local_files import missing_from_cache
from finetune.model.tokens import build_run_tokenizer
from finetune.runs.durable import FolderWriter
from finetune.runs.model_files import encode_tokenizer

LORA_CONVERTER = "convert_lora_to_gguf.py"
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_lora(run: FinishedRun, out: Path, *, gguf: Gguf, with_base: bool, with_modelfile: bool) -> Exported:
    """Write a folder with the adapter as a GGUF LoRA and, beside it, its base as a GGUF file and a Modelfile.

    The base's file has the run's tokenizer, chat template and stop ids. The test vectors are made now, from the run.

    The base's weights are stored in the type of `gguf`, and the adapter's in fp32. If `with_base` is False,
    there is no base and no Modelfile, and llama.cpp cannot load the adapter to check it.

    Raises:
        CheckpointError: `out` is taken.
        ConfigError: the run has no adapter.
        ModelError: a GGUF LoRA cannot carry the adapter, or llama.cpp does not support the base.
        RunFailedError: the disk has too little room, or failed.
    """
    if run.is_full:
        raise ConfigError(
            f"{run.folder.path} trained every weight, so there is no adapter. Export the "
            "model: finetune export gguf RUN OUT."
        )
    _refuse_what_is_lost(run.weights)
    base, tokenizer = _base_folder(run), build_run_tokenizer(run.config)
    if with_base:
        refuse_other_tokenizer(tokenizer)  # before the test vectors, which take longer
    size = (run.weights / _WEIGHTS).stat().st_size + (gguf_bytes(base, gguf.weight_type) if with_base else 0)
    with new_folder(out, size) as writer, tempfile.TemporaryDirectory(dir=writer.path) as aside:
        num_tensors = _write_adapter(run.weights, base, writer, Path(aside), gguf)
        vectors = replace(vectors_of_run(run), trained=digest_weight_files(run.weights))
        write_vectors(writer, vectors)
        if not with_base:
            return Exported(num_tensors=num_tensors)
        ends = stop_ids(tokenizer, stored_stop_ids(base))
        model = _with_tokenizer_of_run(base, tokenizer, Path(aside))
        measure = partial(measure_rounding, load_tuned_model(run), vectors)
        exported = write_gguf(model, writer, BASE_FILE, gguf, tokenizer, ends, measure)
        if with_modelfile:
            text = modelfile(tokenizer, f"./{BASE_FILE}\nADAPTER ./{ADAPTER_FILE}", ends)
            writer.write("Modelfile", [text.encode()])
        if exported.runtime is not None and exported.reading is not None:
            files = GgufFiles(writer.path / BASE_FILE, writer.path / ADAPTER_FILE)
            check_in_llama_cpp(files, exported.reading, tokenizer, ends)
    return exported


def _refuse_what_is_lost(adapter: Path) -> None:
    """Refuse an adapter with more than lora_A and lora_B of linear layers."""
    record: dict[str, Any] = json.loads((adapter / _CONFIG).read_text(encoding="utf-8"))
    with safe_open(adapter / _WEIGHTS, framework="pt") as file:
        other = sorted(name for name in file.keys() if not name.endswith((".lora_A.weight", ".lora_B.weight")))  # noqa: SIM118
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if record.get(name)]
    if not other and not patterns:
        return
    reasons = {
        "lora_magnitude_vector": "DoRA's magnitudes",
        "trainable_tokens": "new tokens",
        "embed_tokens": "trained embeddings",
    }
    lost_parts = [next((reason for part, reason in reasons.items() if part in name), "other weights") for name in other]
    unsupported = ", ".join(dict.fromkeys([*lost_parts, *patterns]))
    example = f" ({other[0]})" if other else ""
    raise ModelError(
        f"a GGUF LoRA holds lora_A and lora_B alone, and this adapter also has {unsupported}{example}. Merge it, and "
        "export the merged model: finetune export gguf RUN OUT."
    )


def _write_adapter(adapter: Path, base: Path, writer: FolderWriter, aside: Path, gguf: Gguf) -> int:
    """Run llama.cpp's script on the adapter. Returns the number of tensors written."""
    source, converted = aside / "adapter", aside / ADAPTER_FILE
    source.mkdir()
    ADAPTER_TO_GGUF.copy([adapter / _WEIGHTS, adapter / _CONFIG], source)
    script = gguf.converter.with_name(LORA_CONVERTER)
    options = ["--base", str(base), "--outtype", "f32", "--outfile", str(converted)]
    ADAPTER_TO_GGUF.run([sys.executable, str(script), str(source), *options], aside)
    header = read_written(converted)
    writer.write(ADAPTER_FILE, [converted.read_bytes()])
    return header.num_tensors


def _base_folder(run: FinishedRun) -> Path:
    """Return the folder of the run's base, in the hub's cache if it came from the hub."""
    where = locate_model(run.config.model)
    repository = repository_of(where, run.config.model.revision)
    if repository is None:
        return Path(where)
    lacking, config = missing_from_cache(repository, "weights"), cached_file(repository, "config.json")
    if lacking is not None or config is None:
        raise ModelError(
            f"the base {where} is not complete in the hub's cache ({lacking} is missing). Download it (hf download "
            f"{where}), or name its folder with --base."
        )
    return config.parent


def _with_tokenizer_of_run(base: Path, tokenizer: Any, aside: Path) -> Path:
    """Make a folder with the base's weights and the run's tokenizer."""
    model = aside / "base"
    model.mkdir()
    for path in base.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "tokenizer.model") or "index" in path.name:
            (model / path.name).symlink_to(path.resolve())
    for name, chunks in encode_tokenizer(tokenizer).items():
        if not (model / name).exists():
            (model / name).write_bytes(b"".join(chunks))
    return model
