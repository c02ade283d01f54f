"""Encode an optimizer's state as one safetensors file, keyed by parameter names.

This works for every optimizer whose state is tensors, plain numbers, and dicts of these (bitsandbytes keeps its 8-bit
states in one). Hyper-parameters are not saved: they follow from the configuration and the step.
"""

from __future__ import annotations

import json

import torch

from finetune.errors import CheckpointError
from finetune.runs.durable import Chunks
from finetune.runs.tensors import TensorFile
from finetune.runs.verification import OPTIMIZER_FILE

RECORD_KEY = "finetune"
INSIDE = "."
"""Between the name of a dict in the state and the name of a value in it."""


def encode_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Chunks]:
    """Encode the state: tensors as `<state name>/<parameter name>`, numbers in the file's metadata.

    A value in a dict has the state name `<name of the dict>.<name in it>`.

    Raises:
        CheckpointError: a state is neither a tensor nor a number.
    """
    parameters = trained_by_name(model, optimizer)
    names = list(parameters)
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, float | None] = {}
    for index, states in optimizer.state_dict()["state"].items():
        flat = {
            f"{name}{INSIDE}{inner}" if isinstance(state, dict) else name: value
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
                    f"{optimizer_class_name(optimizer)} keeps {state_name} as {type(value).__name__}, and a "
                    f"checkpoint holds tensors and numbers only. Choose another optim.optimizer, for example "
                    f"torch.optim.AdamW."
                )
    record = {
        "numbers": numbers,
        "optimizer": optimizer_class_name(optimizer),
        "parameters": {name: list(parameter.shape) for name, parameter in parameters.items()},
    }
    return {OPTIMIZER_FILE: TensorFile(tensors, (RECORD_KEY, json.dumps(record, sort_keys=True)))}


def trained_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Return the optimizer's parameters in its own order, by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names[id(parameter)]: parameter for parameter in ordered}


def optimizer_class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the class name of the optimizer, or of `.optimizer` if it is a wrapper."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__
