"""Encode an optimizer's state as one safetensors file, keyed by parameter names, and load it strictly.

This works for every optimizer whose state is tensors, plain numbers, and dicts of these (bitsandbytes keeps its 8-bit
states in one). Hyper-parameters are not saved: they follow from the configuration and the step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from finetune.errors import CheckpointError
from finetune.runs.durable import Chunks
from finetune.runs.model_files import refuse_other_tensors
from finetune.runs.tensors import TensorFile, is_sharded, local_shard, read_tensors, shard_like
from finetune.runs.verification import OPTIMIZER_FILE

_METADATA_KEY = "finetune"
_INSIDE = "."
"""Between the name of a dict in the state and the name of a value in it."""


def encode_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Chunks]:
    """Encode the state: tensors as `<state name>/<parameter name>`, numbers in the file's metadata.

    A value in a dict has the state name `<name of the dict>.<name in it>`.

    Raises:
        CheckpointError: a state is neither a tensor nor a number.
    """
    parameters = _named_parameters(model, optimizer)
    names = list(parameters)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float | None] = {}
    for index, states in optimizer.state_dict()["state"].items():
        flat = {
            f"{name}{_INSIDE}{inner}" if isinstance(state, dict) else name: value
            for name, state in states.items()
            for inner, value in (state.items() if isinstance(state, dict) else [("", state)])
        }
        for state_name, value in flat.items():
            key = f"{state_name}/{names[index]}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            elif value is None or isinstance(value, (bool, int, float)):
                numbers[key] = value
            else:
                raise CheckpointError(
                    f"{_class_name(optimizer)} keeps {state_name} as {type(value).__name__}, and a "
                    f"checkpoint holds tensors and numbers only. Choose another optim.optimizer, for example "
                    f"torch.optim.AdamW."
                )
    record = {
        "numbers": numbers,
        "optimizer": _class_name(optimizer),
        "parameters": {name: list(parameter.shape) for name, parameter in parameters.items()},
    }
    return {OPTIMIZER_FILE: TensorFile(tensors, (_METADATA_KEY, json.dumps(record, sort_keys=True)))}


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load a saved state into an optimizer over the same parameters. Its hyper-parameters do not change.

    Raises:
        CheckpointError: the file is damaged, of another optimizer, or of other parameters.
    """
    file = folder / OPTIMIZER_FILE
    tensors, metadata = read_tensors(file)
    record = _read_record(file, metadata)
    if record["optimizer"] != _class_name(optimizer):
        raise CheckpointError(
            f"{file} is the state of {record['optimizer']}, but the run uses {_class_name(optimizer)}. "
            f"Resume with the optim.optimizer it was written with."
        )
    parameters = _named_parameters(model, optimizer)
    refuse_other_tensors(
        file,
        saved={name: tuple(shape) for name, shape in record["parameters"].items()},
        expected={name: tuple(parameter.shape) for name, parameter in parameters.items()},
    )
    states: dict[str, dict[str, Any]] = {}
    for key, value in {**tensors, **record["numbers"]}.items():
        state_name, _, name = key.partition("/")
        if name not in parameters:
            raise CheckpointError(f"{file} holds {key}, which belongs to no trained parameter.")
        outer, _, inner = state_name.rpartition(_INSIDE)
        holder = states.setdefault(name, {})
        (holder.setdefault(outer, {}) if outer else holder)[inner] = value
    _set_states(optimizer, parameters, states)


def _set_states(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], states: dict[str, dict[str, Any]]
) -> None:
    for name, saved in states.items():
        states[name] = {key: _sharded_like(parameters[name], value) for key, value in saved.items()}
    by_index = {index: states[name] for index, name in enumerate(parameters) if name in states}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": by_index})
    # torch moves each state to the device and the dtype of its parameter. The dtype loses bits if a
    # low-precision weight has a state in fp32.
    for name, saved in states.items():
        loaded = optimizer.state[parameters[name]]
        for state_name, value in saved.items():
            if isinstance(value, torch.Tensor) and loaded[state_name].dtype != value.dtype:
                loaded[state_name] = value.to(loaded[state_name].device)


def _sharded_like(parameter: torch.nn.Parameter, value: Any) -> Any:
    """Return a state sharded like its parameter. States of another shape are not sharded."""
    if not is_sharded(parameter) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    state = torch.zeros_like(parameter, dtype=value.dtype, requires_grad=False)
    local_shard(state).copy_(shard_like(value, parameter))
    return state


def _named_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters in its own order, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(parameter)]: parameter for parameter in ordered}


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of the optimizer, or of `.optimizer` if it is a wrapper."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def _read_record(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        record = json.loads(metadata[_METADATA_KEY])
        is_well_formed = (
            isinstance(record["optimizer"], str)
            and all(isinstance(shape, list) for shape in record["parameters"].values())
            and all(value is None or type(value) in (bool, int, float) for value in record["numbers"].values())
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} does not name its optimizer: its metadata is damaged.") from error
    if not is_well_formed:
        raise CheckpointError(f"{file} does not name its optimizer: its metadata is malformed.")
    return dict(record)
