"""Merge a run's adapter, write the model to a temporary folder, compare it after a reload, and give it its name."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from finetune.errors import ModelError, RunFailedError, last_line
from finetune.export import plain_reload
from finetune.export.digests import digest_files, digest_weight_files
from finetune.export.logits import compare_logits, refuse_far
from finetune.export.merge import Merged, cast_weights, is_tied, merge_adapter
from finetune.export.model_card import merged_card
from finetune.export.out_folder import new_folder
from finetune.export.plain_reload import logits_in_fp32
from finetune.export.system_turn import usual_system, with_default_system
from finetune.export.vectors import Vector, make_vectors, prompts_to_ask, write_vectors
from finetune.inference.finished_run import FinishedRun, put_adapter_on
from finetune.model.base import build_base_model
from finetune.model.tokens import build_run_tokenizer, set_stop_and_pad_ids
from finetune.runs.durable import Chunks
from finetune.runs.model_files import encode_full_model, encode_tokenizer, has_adapter
from finetune.runs.tensors import TensorFile, read_tensors

MAX_SHARD_BYTES = 5 * 10**9
"""A larger model is written as several files, as transformers does."""
_WEIGHTS = "model.safetensors"
_log = logging.getLogger(__name__)


def write_merged(
    run: FinishedRun,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    most_difference: float | None = None,
    adds_system: bool = False,
) -> Merged:
    """Write a run's model for transformers alone, then load and compare it.

    Args:
        run: a finished run, of an adapter or of full fine-tuning.
        out: a folder that does not exist or is empty. If anything fails, it stays as it was.
        dtype: the type to store weights in; None takes the base's.
        most_difference: see `refuse_far`.
        adds_system: let the chat template add the system turn of the training rows to conversations without one.

    Raises:
        CheckpointError: the folder is taken.
        ConfigError: the training rows have no system turn to add.
        ModelError: transformers alone cannot load this model, or the adapter cannot be merged.
        RunFailedError: the disk has too little room or failed, or the merged model is not the tuned one.
    """
    tokenizer, system = build_run_tokenizer(run.config), usual_system(run.config)
    if adds_system:
        tokenizer.chat_template = with_default_system(tokenizer.chat_template, system)
    model = load_tuned_model(run)
    _refuse_foreign_code(model)
    target = _type_to_store(model, dtype)
    asked = prompts_to_ask(tokenizer, model, system)
    prompts = [one.token_ids for one in asked]
    tuned, base = logits_in_fp32(model, prompts), None
    stops = set_stop_and_pad_ids(model, tokenizer)
    vectors = make_vectors(model, asked, tuned, stop_ids=stops, has_template=tokenizer.chat_template is not None)
    if run.is_full:
        cast_weights(model, target)
    else:
        with model.disable_adapter():
            base = logits_in_fp32(model, prompts)
        model = merge_adapter(model, target)
    model.generation_config._from_model_config = False  # or transformers would make it anew
    files = {**encode_full_model(model), **encode_tokenizer(tokenizer)}
    weights: Any = files.pop(_WEIGHTS)
    name, tied, num_bytes = str(target).removeprefix("torch."), is_tied(model), weights.num_bytes
    with new_folder(out, num_bytes) as writer:
        for file, content in [*files.items(), *_sharded(weights).items()]:
            writer.write(file, content)
        del model, weights, files, content  # the reload needs the memory
        report, logits = _reload(writer.path, asked)
        rendered = [[one.text, one.token_ids] for one in asked if one.turns is not None]
        _refuse_other(report, problems={}, dtypes=[name], is_tied=tied, stop_ids=stops, rendered=rendered)
        difference = compare_logits(logits, tuned, base)
        refuse_far(difference, name, most_difference)
        vectors = replace(
            vectors,
            stored_as=name,
            rounding=difference.most_relative,
            trained=digest_weight_files(run.weights),
            written=digest_weight_files(writer.path),
            files=digest_files(writer.path),
            system=None if adds_system else system,
        )
        merged = Merged(
            folder=out.expanduser().absolute(),
            num_bytes=num_bytes,
            dtype=name,
            is_tied=tied,
            stop_ids=stops,
            difference=difference,
            vectors_sha256=write_vectors(writer, vectors),
            system=system,
            adds_system=adds_system,
        )
        writer.write("README.md", [merged_card(run, merged).encode()])
    return merged


def load_tuned_model(run: FinishedRun) -> Any:
    """Load the base with the adapter on it, or the fully tuned model; on the CPU, in the type of its config.json.

    Raises:
        ModelError: the base cannot be loaded, or the adapter does not fit it.
    """
    model: Any = build_base_model(run.config.model, dtype="auto")
    return model if run.is_full else put_adapter_on(model, run)


def _type_to_store(model: Any, wish: torch.dtype | None) -> torch.dtype:
    """Return the type that was asked for, or the most frequent type of base weights; an adapter's may be wider."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in _bare(model).parameters():
        if parameter.is_floating_point() and not (has_adapter(model) and parameter.requires_grad):
            sizes[parameter.dtype] += parameter.numel()
    stored = sizes.most_common(1)[0][0]
    if wish is not None and torch.finfo(wish).eps > torch.finfo(stored).eps:
        _log.warning("the base is stored as %s; --dtype rounds it to %s", stored, wish)
    return wish or stored


def _refuse_foreign_code(model: Any) -> None:
    bare = _bare(model)
    if not type(bare).__module__.startswith("transformers."):
        raise ModelError(
            f"{type(bare).__name__} needs code of its own (model.trust_remote_code), which a folder for transformers "
            "alone cannot carry. Use a base with a class in transformers, or use the adapter as it is."
        )


def _bare(model: Any) -> Any:
    return model.get_base_model() if has_adapter(model) else model


def _sharded(weights: TensorFile) -> dict[str, Chunks]:
    """Split a large model into files with an index, as transformers does; a small model is one file."""
    split = split_state_dict_into_shards_factory(
        dict(weights.tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_BYTES,
    )
    files: dict[str, Chunks] = {
        file: TensorFile({name: weights.tensors[name] for name in names}, weights.metadata)
        for file, names in split.filename_to_tensors.items()
    }
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        files[f"{_WEIGHTS}.index.json"] = [json.dumps(index, indent=2).encode()]
    return files


def _reload(folder: Path, asked: Sequence[Vector]) -> tuple[dict[str, Any], torch.Tensor]:
    """Load the folder in another process, by transformers alone. Returns its report and its logits."""
    with tempfile.TemporaryDirectory() as scratch:
        request, report, logits = (Path(scratch, name) for name in ("request.json", "report.json", "logits"))
        wanted = {"folder": folder, "prompts": [one.token_ids for one in asked]}
        wanted |= {"turns": [one.turns for one in asked if one.turns is not None]}
        wanted |= {"logits_file": logits, "report_file": report}
        request.write_text(json.dumps(wanted, default=str))
        # -P: a folder that happens to be the current one must not supply modules.
        command = [sys.executable, "-P", str(plain_reload.__file__), str(request)]
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            reason = last_line(done.stderr) or f"exit code {done.returncode}"
            raise RunFailedError(
                f"the merged model was written, but transformers alone cannot load it: {reason}. It was removed again."
            )
        return json.loads(report.read_text()), read_tensors(logits)[0]["logits"]


def _refuse_other(report: Mapping[str, Any], **expected: Any) -> None:
    """Compare what the other process found with what was written."""
    wrong = [f"{name} is {report[name]}, expected {value}" for name, value in expected.items() if report[name] != value]
    if wrong:
        raise RunFailedError(
            f"the merged model does not load the way it was written: {'; '.join(wrong)}. It was removed again."
        )
