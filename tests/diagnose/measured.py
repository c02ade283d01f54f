"""The memory that training steps really take on the CPU, as torch's own allocator reports it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(step: Callable[[], None]) -> int:
    """Bytes that a step takes beyond what was allocated before it, at the highest moment. Every allocation counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    in_use = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            in_use += event.nbytes()
            highest = max(highest, in_use)
    return highest


def held_by(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, buffers and optimizer state."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors)
