"""`silu(gate) * up` of a projection with the gate in its left half of columns; parts of `mlp`."""

from __future__ import annotations

import torch
from torch.nn import functional


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """(rows, 2 * features) to (rows, features)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def gradient(gate_up: torch.Tensor, silu: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of `gate_up`, given silu(gate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = d_gate_up.chunk(2, dim=-1)
    torch.mul(dy, silu, out=d_up)
    torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
    return d_gate_up
