"""Merge a run's adapter, write the model to a temporary folder, compare it after a reload, and give it its name.

Each layer is merged in fp32, and rounded once to the type in which it is stored.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from finetune.config.hub import cached_file
from finetune.config.run_config import load_run_config
from finetune.engine.decoder import bare_model
from finetune.errors import LOST_IN_ROUNDING, ModelError, RunFailedError, last_line
from finetune.export import plain_reload
from finetune.export.model_card import Merged, fill_card, hub_base
from finetune.export.out_folder import folder_beside, new_folder
from finetune.export.plain_reload import logits_in_fp32
from finetune.export.system_turn import usual_system, with_default_system
from finetune.export.vectors import (
    MOST_DIFFERENCE,
    LogitDifference,
    Vector,
    compare_logits,
    digest_files,
    digest_weight_files,
    make_vectors,
    prompts_to_ask,
    write_vectors,
)
from finetune.inference.finished_run import FinishedRun, put_adapter_on
from finetune.model.base import build_base_model
from finetune.model.from_hub import locate, repository_of
from finetune.model.tokens import build_run_tokenizer, set_stop_and_pad_ids
from finetune.runs.durable import Chunks
from finetune.runs.model_files import encode_full_model, encode_tokenizer, has_adapter
from finetune.runs.tensors import TensorFile, read_tensors
from finetune.units import format_bytes

_MOST_LOST = 0.5
"""The largest part of the adapter's own effect that rounding may take away."""
MAX_SHARD_BYTES = 5 * 10**9
"""A larger model is written as several files, as transformers does."""
_WEIGHTS, SENTENCEPIECE = "model.safetensors", "tokenizer.model"
_log = logging.getLogger(__name__)


def write_merged(
    run: FinishedRun,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    most_difference: float | None = None,
    adds_system: bool = False,
    load: Callable[[FinishedRun], Any] | None = None,
    note: str = "",
) -> Merged:
    """Write a run's model for transformers alone, then load and compare it. If anything fails, `out` stays as it was.

    Args:
        run: of an adapter or of full fine-tuning.
        out: a folder that does not exist or is empty.
        dtype: the type to store weights in; None takes the base's.
        most_difference: the largest relative difference of logits; None: what fits the type of the weights.
        adds_system: let the chat template add the system turn of the training rows to conversations without one.
        load: loads base and adapter; None: `load_tuned_model`.
        note: a sentence about these weights for certificates, without a full stop.

    Raises:
        CheckpointError: the folder is taken.
        ConfigError: the training rows have no system turn to add.
        ModelError: transformers alone cannot load this model, or the adapter cannot be merged.
        RunFailedError: the disk has too little room or failed, or the merged model is not the tuned one.
    """
    tokenizer, system = build_run_tokenizer(run.config), usual_system(run)
    if adds_system:
        tokenizer.chat_template = with_default_system(tokenizer.chat_template, system)
    model = (load or load_tuned_model)(run)
    _refuse_foreign_code(model)
    target = _type_to_store(model, dtype)
    unanswered = prompts_to_ask(tokenizer, model, system)
    prompts = [vector.token_ids for vector in unanswered]
    tuned, base = logits_in_fp32(model, prompts), None
    stops = set_stop_and_pad_ids(model, tokenizer)
    vectors = make_vectors(model, unanswered, tuned, stop_ids=stops, has_template=tokenizer.chat_template is not None)
    if run.is_full:
        cast_weights(model, target)
    else:
        with model.disable_adapter():
            base = logits_in_fp32(model, prompts)
        model = merge_adapter(model, target)
    model.generation_config._from_model_config = False  # or transformers would make it anew
    files = {**encode_full_model(model), **encode_tokenizer(tokenizer), **_sentencepiece_of(run)}
    weights: Any = files.pop(_WEIGHTS)
    name, tied, num_bytes = str(target).removeprefix("torch."), is_tied(model), weights.num_bytes
    with new_folder(out, num_bytes) as writer:
        for file, content in [*files.items(), *sharded(weights).items()]:
            writer.write(file, content)
        del model, weights, files, content  # the reload needs the memory
        report, logits = reload_plainly(writer.path, unanswered)
        rendered = [[vector.text, vector.token_ids] for vector in unanswered if vector.turns is not None]
        refuse_other(report, problems={}, dtypes=[name], is_tied=tied, stop_ids=stops, rendered=rendered)
        difference = compare_logits(logits, tuned, base)
        refuse_far(difference, name, most_difference)
        digests: dict[str, Any] = {
            "trained": digest_weight_files(run.weights),
            "written": digest_weight_files(writer.path),
        }
        vectors = replace(vectors, stored_as=name, rounding=difference.most_relative, note=note, **digests)
        vectors = replace(vectors, files=digest_files(writer.path), system=None if adds_system else system)
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
        writer.write("README.md", [fill_card(run, hub_base(run), system=system, merged=merged).encode()])
    return merged


@contextmanager
def merged_beside(run: FinishedRun, out: Path) -> Iterator[Merged]:
    """Merge a run into a temporary folder on the disk of `out`, for a format that converts it; see `write_merged`."""
    with folder_beside(out) as aside:
        yield write_merged(run, aside / "merged")


def load_tuned_model(run: FinishedRun) -> Any:
    """Load the base with the adapter on it, or the fully tuned model; on the CPU, in the type of its config.json.

    Raises:
        ModelError: the base cannot be loaded, or the adapter does not fit it.
    """
    model: Any = build_base_model(run.config.model, dtype="auto")
    return model if run.is_full else put_adapter_on(model, run)


def merge_adapter(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Merge a PeftModel's adapter, layer by layer, with PEFT's own arithmetic on weights widened to fp32.

    The whole model is never copied: each layer is widened, merged and rounded back before the next one. PEFT's
    arithmetic covers LoRA, rsLoRA, DoRA and trained embeddings.

    Do not use the PeftModel, which is on the CPU, afterwards. All weights are stored as `dtype`; None keeps the type of
    each layer. If the adapter changed the input embeddings and the output head differently, they are no longer tied in
    the model that is returned, and its configuration says so.

    Raises:
        ModelError: PEFT cannot merge an adapter of this type.
        RunFailedError: a merged weight is not finite in the type it is stored in.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    was_tied = _untie_where_adapted(model.get_base_model())
    with warnings.catch_warnings():
        # Each layer is merged below, so PEFT finds nothing left to merge; ties are taken care of here.
        warnings.filterwarnings("ignore", message="All adapters are already merged")
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")
        warnings.filterwarnings("ignore", message="Model with `tie_word_embeddings=True`")
        try:
            for name, layer in list(model.named_modules()):
                if isinstance(layer, BaseTunerLayer):
                    _merge_layer(name, layer, dtype)
            merged = model.merge_and_unload(safe_merge=False)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            raise ModelError(f"the adapter cannot be merged: {error}. Use it as an adapter, through peft.") from error
    if was_tied:
        _tie_again(merged)
    if dtype is not None:
        cast_weights(merged, dtype)
    for name, parameter in merged.named_parameters():
        _refuse_not_finite(name, parameter)
    return merged


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Convert every weight to a type, in place, one at a time; tied weights stay tied.

    Raises:
        RunFailedError: a weight is out of the type's range.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            _refuse_not_finite(name, parameter)
    model.config.dtype = dtype


def is_tied(model: Any) -> bool:
    """Tell whether input embeddings and output head are one tensor."""
    head = model.get_output_embeddings()
    return head is not None and bool(head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr())


def _type_to_store(model: Any, wish: torch.dtype | None) -> torch.dtype:
    """Return the type that was asked for, or the most frequent type of base weights; an adapter's may be wider."""
    if wish is not None:
        return wish
    sizes: Counter[torch.dtype] = Counter()
    for parameter in bare_model(model).parameters():
        if parameter.is_floating_point() and not (has_adapter(model) and parameter.requires_grad):
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0]


def _sentencepiece_of(run: FinishedRun) -> dict[str, Chunks]:
    """Return the tokenizer.model of the base, if it is here. A run saves tokenizer.json alone, as transformers does."""
    configured = load_run_config(run.folder.path, loads_model=False).model.tokenizer
    section, file = run.base_model if run.is_full else run.config.model, None
    with suppress(ModelError):  # full fine-tuning has no need of the base any more
        where = locate(str(configured or section.path), "model.tokenizer")
        repository = repository_of(where, section.revision)
        file = Path(where, SENTENCEPIECE) if repository is None else cached_file(repository, SENTENCEPIECE)
    return {SENTENCEPIECE: [file.read_bytes()]} if file is not None and file.is_file() else {}


def _refuse_foreign_code(model: Any) -> None:
    bare = bare_model(model)
    if not type(bare).__module__.startswith("transformers."):
        raise ModelError(
            f"{type(bare).__name__} needs code of its own (model.trust_remote_code), which a folder for transformers "
            "alone cannot carry. Use a base with a class in transformers, or use the adapter as it is."
        )


def sharded(weights: TensorFile) -> dict[str, Chunks]:
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


def reload_plainly(
    folder: Path, unanswered: Sequence[Vector], model: str = "merged model"
) -> tuple[dict[str, Any], torch.Tensor]:
    """Load the folder in another process, by transformers alone. Returns its report and its logits.

    Raises:
        RunFailedError: it cannot be loaded. `model` names the model in the message.
    """
    with tempfile.TemporaryDirectory() as scratch:
        request, report, logits = (Path(scratch, name) for name in ("request.json", "report.json", "logits"))
        prompts = [vector.token_ids for vector in unanswered]
        turns = [vector.turns for vector in unanswered if vector.turns is not None]
        content = {"folder": folder, "prompts": prompts, "turns": turns, "logits_file": logits, "report_file": report}
        request.write_text(json.dumps(content, default=str))
        # -P: a folder that happens to be the current one must not supply modules.
        command = [sys.executable, "-P", str(plain_reload.__file__), str(request)]
        process = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
        if process.returncode != 0:
            reason = last_line(process.stderr) or f"exit code {process.returncode}"
            if os.strerror(errno.ENOSPC) in reason:
                raise RunFailedError(
                    f"the {model} could not be compared: {reason}. The logits are written to {scratch}, where "
                    f"{format_bytes(shutil.disk_usage(scratch).free)} are free. Make room there, or set TMPDIR to a "
                    "folder on another disk. It was removed again."
                )
            raise RunFailedError(
                f"the {model} was written, but transformers alone cannot load it: {reason}. It was removed again."
            )
        return json.loads(report.read_text()), read_tensors(logits)[0]["logits"]


def refuse_other(report: Mapping[str, Any], model: str = "merged model", /, **expected: Any) -> None:
    """Compare what the other process found with what was written.

    Raises:
        RunFailedError: they differ. `model` names the model in the message.
    """
    wrong = [f"{name} is {report[name]}, expected {value}" for name, value in expected.items() if report[name] != value]
    if wrong:
        raise RunFailedError(
            f"the {model} does not load the way it was written: {'; '.join(wrong)}. It was removed again."
        )


def refuse_far(difference: LogitDifference, dtype: str, most: float | None = None) -> None:
    """Refuse a merged model that is not the tuned one.

    The bound is `most`, a relative difference, or by default the bound of the type in which weights are stored.

    Raises:
        RunFailedError: the difference is above the bound, or rounding took away most of the adapter's effect.
    """
    bound = MOST_DIFFERENCE.get(dtype, 0.0) if most is None else most
    if not math.isfinite(difference.relative) or difference.relative > bound:
        raise RunFailedError(
            f"the merged model does not answer like base and adapter: {difference}; expected a relative difference of "
            f"at most {bound:.3g} for weights stored as {dtype}. Merge with --dtype float32, use the adapter as it is, "
            "or set another bound with --max-difference."
        )
    if difference.lost is not None and difference.lost > _MOST_LOST:
        raise RunFailedError(
            f"rounding to {dtype} {LOST_IN_ROUNDING}: {difference}; expected to lose at most "
            f"{_MOST_LOST:.0%} of its effect. Merge with --dtype float32, or use the adapter as it is."
        )


def _merge_layer(name: str, layer: Any, dtype: torch.dtype | None) -> None:
    """Merge in fp32, then round back: once, instead of once for the update and once for the sum."""
    base_layer = layer.get_base_layer()
    stored = {key: parameter.dtype for key, parameter in base_layer.named_parameters(recurse=False)}
    if not all(dtype.is_floating_point for dtype in stored.values()):
        raise ModelError(f"{name} is quantised ({stored}). Merge into the base in its own precision.")
    base_layer.to(torch.float32)
    layer.merge(safe_merge=True)
    for key, parameter in base_layer.named_parameters(recurse=False):
        parameter.data = parameter.data.to(dtype or stored[key])


def _untie_where_adapted(base: Any) -> bool:
    """Give tied embeddings a tensor each while an adapter on one of them is merged. Returns whether this was needed.

    Otherwise an update of one would change the other as well, and updates of both would be added twice.
    """
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    if None in ends:
        return False
    # The base's own layer inside an adapter's wrapper, or the layer itself.
    inner = [
        end.get_base_layer() if hasattr(end, "get_base_layer") else getattr(end, "original_module", end) for end in ends
    ]
    if inner[0].weight is not inner[1].weight or all(a is b for a, b in zip(ends, inner, strict=True)):
        return False
    inner[1].weight = torch.nn.Parameter(inner[1].weight.detach().clone(), requires_grad=False)
    return True


def _tie_again(model: Any) -> None:
    first, last = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if torch.equal(first, last):
        model.get_output_embeddings().weight = first
        model.config.tie_word_embeddings = True
        return
    model.config.tie_word_embeddings = False
    _log.warning(
        "the base ties its input embeddings and output head, but the adapter changed them differently: the merged "
        "model keeps both, and has %s more weights",
        f"{last.numel():,}",
    )


def _refuse_not_finite(name: str, parameter: torch.Tensor) -> None:
    if parameter.is_floating_point() and not bool(torch.isfinite(parameter).all()):
        raise RunFailedError(
            f"{name} is not finite as {str(parameter.dtype).removeprefix('torch.')} after the merge. Merge with "
            "--dtype float32, which has a wider range. If it is not finite there either, the run has diverged."
        )
