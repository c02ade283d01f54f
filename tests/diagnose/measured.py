"""The memory that training steps really take on the CPU, as torch's own allocator reports it."""

from __future__ import annotations

import torch

from finetune.diagnose.family import measure_peak

peak_of = measure_peak


def held_by(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, buffers and optimizer state."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors)
