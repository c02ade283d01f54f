"""Load a checkpoint into a model and an optimizer, strictly, for a run that resumes or is computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from finetune.errors import CheckpointError
from finetune.runs.model_files import load_model, read_fitting_tensors, refuse_other_tensors
from finetune.runs.optimizer_file import INSIDE, RECORD_KEY, optimizer_class_name, trained_by_name
from finetune.runs.state import TrainerState, read_state
from finetune.runs.tensors import is_sharded, local_shard, read_tensors, shard_like
from finetune.runs.verification import OPTIMIZER_FILE


def load_checkpoint(path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> TrainerState:
    """Load a checkpoint into a bare model and an optimizer of the same types, on any device.

    Every rank may call it. All names and shapes are checked. The digests are not: `newest_valid` or `verify` has
    checked them.

    Raises:
        CheckpointError: it does not fit the model or the optimizer, or a file cannot be read.
    """
    state = read_state(path)
    load_model(model, path)
    load_optimizer(model, optimizer, path)
    return state


def refuse_misfit(path: Path, *, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise the CheckpointError of `load_checkpoint` for a checkpoint of another model or optimizer. Load nothing."""
    read_fitting_tensors(model, path)
    _read_fitting_state(model, optimizer, path)


def load_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load a saved state into an optimizer over the same parameters. Its hyper-parameters do not change.

    Raises:
        CheckpointError: the file is damaged, of another optimizer, or of other parameters.
    """
    states = _read_fitting_state(model, optimizer, folder)
    _set_states(optimizer, trained_by_name(model, optimizer), states)


def _read_fitting_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> dict[str, dict[str, Any]]:
    """Read the state of each parameter by name, for an optimizer of the same class over the same parameters."""
    file = folder / OPTIMIZER_FILE
    tensors, metadata = read_tensors(file)
    record = _read_record(file, metadata)
    if record["optimizer"] != optimizer_class_name(optimizer):
        raise CheckpointError(
            f"{file} is the state of {record['optimizer']}, but the run uses {optimizer_class_name(optimizer)}. "
            f"Resume with the optim.optimizer it was written with."
        )
    parameters = trained_by_name(model, optimizer)
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
        outer, _, inner = state_name.rpartition(INSIDE)
        holder = states.setdefault(name, {})
        (holder.setdefault(outer, {}) if outer else holder)[inner] = value
    return states


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


def _read_record(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        record = json.loads(metadata[RECORD_KEY])
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
