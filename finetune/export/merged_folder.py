"""A run's weights as a model folder of their own: merged, written aside, reloaded by others, compared, put in place."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from finetune.errors import ModelError, RunFailedError
from finetune.export import plain_reload
from finetune.export.comparison import PROBE_TEXTS, Merged, compare_logits, probe_prompts, refuse_far
from finetune.export.merge import convert_weights, is_tied, merge_adapter
from finetune.export.model_card import merged_card
from finetune.export.out_folder import refuse_small_disk, refuse_taken
from finetune.export.plain_reload import logits_in_fp32, prompt_ids
from finetune.export.run_to_ship import RunToShip, load_tokenizer, load_tuned_model
from finetune.model.tokens import agree_on_tokens
from finetune.runs.durable import Chunks, committed_folder, disk_failures_end_the_run
from finetune.runs.model_files import encode_full_model, encode_tokenizer
from finetune.runs.tensors import TensorFile, read_tensors

MAX_SHARD_BYTES = 5 * 10**9
"""A larger model is written as several files, as transformers does."""
_WEIGHTS = "model.safetensors"
_log = logging.getLogger(__name__)


def write_merged(
    run: RunToShip, out: Path, *, dtype: torch.dtype | None = None, most_difference: float | None = None
) -> Merged:
    """Write a run's model so that transformers alone loads it; on return it was loaded and compared.

    Args:
        run: a finished one, of an adapter or of full fine-tuning.
        out: a folder that is not there or is empty. If anything fails, it is as it was.
        dtype: the type to store weights in; None: the base's.
        most_difference: see `refuse_far`.

    Raises:
        CheckpointError: the folder is taken.
        ModelError: the model cannot be loaded by transformers alone, or the adapter cannot be merged.
        RunFailedError: the disk is too small or failed, or the merged model is not the tuned one.
    """
    out = refuse_taken(out)
    tokenizer = load_tokenizer(run)
    model = load_tuned_model(run)
    _refuse_foreign_code(model)
    target = _type_to_store(model, dtype)
    prompts = probe_prompts(tokenizer, model.get_input_embeddings().weight.shape[0])
    tuned, base = logits_in_fp32(model, prompts), None
    if run.is_full:
        convert_weights(model, target)
    else:
        with model.disable_adapter():
            base = logits_in_fp32(model, prompts)
        model = merge_adapter(model, target)
    stops = agree_on_tokens(model, tokenizer)
    model.generation_config._from_model_config = False  # or transformers would make it anew
    files = {**encode_full_model(model), **encode_tokenizer(tokenizer)}
    weights = files.pop(_WEIGHTS)
    assert isinstance(weights, TensorFile)
    refuse_small_disk(out, weights.num_bytes)
    name, tied, num_bytes = str(target).removeprefix("torch."), is_tied(model), weights.num_bytes
    with disk_failures_end_the_run("Writing", out), committed_folder(out) as writer:
        for file, content in [*files.items(), *_sharded(weights).items()]:
            writer.write(file, content)
        del model, weights, files, content  # the reload needs the memory
        report, logits = _reload(writer.path, tokenizer, prompts)
        _refuse_other(report, tied=tied, dtype=name, stops=stops, texts=[prompt_ids(tokenizer, t) for t in PROBE_TEXTS])
        difference = compare_logits(logits, tuned, base)
        refuse_far(difference, [name], most_difference)
        merged = Merged(
            folder=out, num_bytes=num_bytes, dtype=name, is_tied=tied, stop_ids=stops, difference=difference
        )
        writer.write("README.md", [merged_card(run, merged).encode()])
    return merged


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _type_to_store(model: Any, wish: torch.dtype | None) -> torch.dtype:
    """What is asked for, or the type that most of the base's weights have; an adapter's own are wider."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in _bare(model).parameters():
        if parameter.is_floating_point() and not (hasattr(model, "peft_config") and parameter.requires_grad):
            sizes[parameter.dtype] += parameter.numel()
    stored = sizes.most_common(1)[0][0]
    if wish is not None and torch.finfo(wish).eps > torch.finfo(stored).eps:
        _log.warning("the base is stored as %s, and is rounded to %s as it was asked for", stored, wish)
    return wish or stored


def _refuse_foreign_code(model: Any) -> None:
    bare = _bare(model)
    if not type(bare).__module__.startswith("transformers."):
        raise ModelError(
            f"{type(bare).__name__} comes with code of its own (model.trust_remote_code), which a merged folder for "
            "transformers alone cannot carry. Use a base with a native class, or the adapter as it is."
        )


def _sharded(weights: TensorFile) -> dict[str, Chunks]:
    """One file, or several with an index, as transformers lays out a large model."""
    if weights.num_bytes <= MAX_SHARD_BYTES:
        return {_WEIGHTS: weights}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in weights.tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + num_bytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    index = {"metadata": {"total_size": weights.num_bytes}, "weight_map": dict(sorted(places.items()))}
    files: dict[str, Chunks] = {
        name: TensorFile(shard, weights.metadata) for name, shard in zip(names, shards, strict=True)
    }
    return {**files, f"{_WEIGHTS}.index.json": [json.dumps(index, indent=2).encode()]}


def _reload(folder: Path, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], torch.Tensor]:
    """Load the folder in a process of its own, by transformers alone. Returns its report and its logits.

    Raises:
        RunFailedError: it cannot be loaded; repeats the last line of the reason.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request, report, logits = (Path(scratch, name) for name in ("request.json", "report.json", "logits"))
        request.write_text(
            json.dumps(
                {
                    "folder": str(folder),
                    "prompts": prompts,
                    "texts": PROBE_TEXTS,
                    "logits_file": str(logits),
                    "report_file": str(report),
                }
            )
        )
        # -P: a folder that happens to be the current one must not supply modules.
        command = [sys.executable, "-P", str(plain_reload.__file__), str(request)]
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RunFailedError(
                f"the merged model was written, but transformers alone cannot load it: {reason}. It was removed again."
            )
        return json.loads(report.read_text()), read_tensors(logits)[0]["logits"]


def _refuse_other(
    report: Mapping[str, Any], *, tied: bool, dtype: str, stops: list[int], texts: list[list[int]]
) -> None:
    """Compare what the other process found with what was meant.

    Raises:
        RunFailedError: lists every difference.
    """
    expected = {"problems": {}, "dtypes": [dtype], "is_tied": tied, "stop_ids": stops, "texts": texts}
    wrong = [f"{name} is {report[name]}, expected {value}" for name, value in expected.items() if report[name] != value]
    if wrong:
        raise RunFailedError(
            f"the merged model is not read back as it was written: {'; '.join(wrong)}. It was removed."
        )
