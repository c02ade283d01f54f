"""Encode a model as the files that PEFT and transformers read, and load them strictly."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.errors import CheckpointError
from finetune.runs.durable import Chunks
from finetune.runs.tensors import TensorFile, local_shard, read_tensors, shard_like
from finetune.runs.verification import TOKENIZER_FILES
from finetune.units import name_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_METADATA = ("format", "pt")
_log = logging.getLogger(__name__)


class LoadedRun(NamedTuple):
    """A run's model and tokenizer."""

    model: Any
    """A PeftModel, or a transformers model if every weight was trained."""
    tokenizer: PreTrainedTokenizerBase


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether a model is a PeftModel. Does not import peft, which full fine-tuning never needs."""
    return isinstance(getattr(model, "peft_config", None), Mapping)


def encode_model(model: torch.nn.Module, base: Path | None = None) -> dict[str, Chunks]:
    """Encode a model for a checkpoint, by file name: its one adapter if it has one, else all weights.

    An adapter names `base`, the folder of a base that was saved with the run, if there is one. Tensors are read from
    the model while the content is consumed.

    Raises:
        CheckpointError: the adapter's base has no name and was not saved, or there are several adapters.
    """
    if not has_adapter(model):
        return encode_full_model(model)
    return {
        "adapter_config.json": [_adapter_config(model, base)],
        "adapter_model.safetensors": TensorFile(_adapter_tensors(model), _METADATA),
        **_encode_generation_config(model),  # has the list of stop ids, which no other file of an adapter holds
    }


def load_model(model: torch.nn.Module, folder: Path, *, may_round: bool = False) -> int:
    """Load all weights of a checkpoint into a model of the same architecture, or into this rank's shards of it.

    With `may_round`, the model's types may be narrower than those of the checkpoint. Returns the number of tensors.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or did not arrive in the model.
    """
    file, saved = read_fitting_tensors(model, folder)
    is_adapter = has_adapter(model)
    read_model = _adapter_tensors if is_adapter else _full_tensors
    expected = read_model(model)
    if may_round:
        saved = {name: tensor.to(expected[name].dtype) for name, tensor in saved.items()}
    if is_adapter:
        from peft import set_peft_model_state_dict

        # A copy, because peft 0.20 renames keys of the mapping that it is given.
        set_peft_model_state_dict(model, dict(saved), adapter_name=_adapter_name(model))
    else:
        with torch.no_grad():
            for name, tensor in saved.items():
                local_shard(expected[name]).copy_(shard_like(tensor, expected[name]))
    # Read back: a library that drops or renames a key on the way must not go unnoticed.
    arrived = read_model(model)
    shards = {name: (shard_like(tensor, arrived[name]), local_shard(arrived[name])) for name, tensor in saved.items()}
    not_loaded = [name for name, (there, here) in shards.items() if not torch.equal(here.cpu().to(there.dtype), there)]
    if not_loaded:
        raise CheckpointError(
            f"{file}: {len(not_loaded)} tensors did not arrive in the model, the first is {not_loaded[0]}."
        )
    return len(saved)


def read_fitting_tensors(model: torch.nn.Module, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Read the weights of a checkpoint for a model, and return their file and the tensors by name.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape than the model's.
    """
    is_adapter = has_adapter(model)
    file = folder / ("adapter_model.safetensors" if is_adapter else "model.safetensors")
    if not file.is_file():
        trained = "an adapter" if is_adapter else "a full model"
        raise CheckpointError(
            f"{folder} holds no {file.name}, but {trained} is to be trained. "
            f"Go on with the training.method that wrote it."
        )
    saved, _ = read_tensors(file)
    expected = _adapter_tensors(model) if is_adapter else _full_tensors(model)
    refuse_other_tensors(file, saved=_shapes(saved), expected=_shapes(expected))
    return file, saved


def refuse_other_tensors(
    file: Path, *, saved: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a file in which names or shapes differ from those of the model or optimizer that loads it.

    Raises:
        CheckpointError: names the first differences of each kind.
    """
    reshaped = [
        f"{name} is {list(saved[name])} there, {list(expected[name])} here"
        for name in sorted(saved.keys() & expected.keys())
        if saved[name] != expected[name]
    ]
    differences = {
        "missing there": sorted(expected.keys() - saved.keys()),
        "unknown here": sorted(saved.keys() - expected.keys()),
        "of another shape": reshaped,
    }
    problems = [
        f"{len(names)} {difference} ({name_first(names, 3)})" for difference, names in differences.items() if names
    ]
    if problems:
        raise CheckpointError(
            f"{file} is of another model or configuration: {'; '.join(problems)}. Give the model and lora sections "
            "it was written with (config.yaml in the run's folder)."
        )


def encode_full_model(model: torch.nn.Module) -> dict[str, Chunks]:
    """Encode a whole transformers model as `from_pretrained` reads it; tied weights are written once."""
    # A copy, because saving must not change the model in training.
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    # Training switches the key-value cache off; generation needs it.
    config.use_cache = True
    return {
        "config.json": [config.to_json_string().encode()],
        **_encode_generation_config(model),
        "model.safetensors": TensorFile(_full_tensors(model), _METADATA),
    }


def encode_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, Chunks]:
    """Encode a tokenizer with its chat template, as `save_pretrained` writes it.

    The files are first written to the system's temporary folder: native code writes some of them, and does not report
    a full disk as such.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        contents = {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir()) if path.is_file()}
    unknown = sorted(contents.keys() - set(TOKENIZER_FILES))
    if unknown:
        _log.warning("the tokenizer's files %s are not kept with the checkpoint", ", ".join(unknown))
    return {name: [data] for name, data in contents.items() if name in TOKENIZER_FILES}


def _encode_generation_config(model: torch.nn.Module) -> dict[str, Chunks]:
    generation: Any = getattr(model, "generation_config", None)
    return {} if generation is None else {"generation_config.json": [generation.to_json_string().encode()]}


def _adapter_config(model: torch.nn.Module, base: Path | None) -> bytes:
    """Encode PEFT's configuration of the adapter. PEFT writes sets in random order; here they are sorted."""
    peft_config: Any = model.peft_config
    record = peft_config[_adapter_name(model)].to_dict()
    name = str(base.resolve()) if base else record.get("base_model_name_or_path")
    if not name:
        raise CheckpointError(
            "The base model has neither a hub id nor a folder, so the adapter has nothing to name. Save it with "
            "save_base first."
        )
    is_folder = Path(name).is_dir()
    record["base_model_name_or_path"] = str(Path(name).resolve()) if is_folder else name
    # The commit that was read is more exact than the branch that was asked for.
    commit = getattr(model.config, "_commit_hash", None)
    record["revision"] = None if is_folder else commit or record.get("revision")
    record["inference_mode"] = True
    return (json.dumps(record, indent=2, sort_keys=True, default=sorted) + "\n").encode()


def _adapter_name(model: torch.nn.Module) -> str:
    names = list(model.peft_config)  # type: ignore[arg-type]
    if len(names) != 1:
        raise CheckpointError(f"A checkpoint holds one adapter, the model carries {len(names)}: {names}.")
    return str(names[0])


def _adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from peft import get_peft_model_state_dict

    # Not "auto": it asks the hub whether the vocabulary was resized, and a save must not need the network.
    tensors: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, adapter_name=_adapter_name(model), save_embedding_layers=False
    )
    return tensors


def _full_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor of a model once. If names share memory, the first in the model's order counts."""
    tensors: dict[str, torch.Tensor] = {}
    known_memory = set()
    for name, tensor in model.state_dict().items():
        part = local_shard(tensor)  # a sharded tensor has no address of its own
        memory = (part.device, part.untyped_storage().data_ptr(), part.storage_offset(), tensor.shape, tensor.dtype)
        if tensor.numel() and memory in known_memory:
            continue
        known_memory.add(memory)
        tensors[name] = tensor
    return tensors


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
