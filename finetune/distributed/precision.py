"""Which numbers a run computes in, and in which its weights are kept."""

from __future__ import annotations

from typing import Literal

import torch

Precision = Literal["fp32", "bf16"]


def choose_precision(wish: Literal["auto", "fp32", "bf16"], *, has_bf16: bool) -> Precision:
    """The precision that `training.precision` means on a device.

    Args:
        wish: as configured.
        has_bf16: whether the device is a GPU that computes in bf16.
    """
    if wish == "auto":
        return "bf16" if has_bf16 else "fp32"
    return wish


def convert_weights(model: torch.nn.Module, precision: Precision) -> None:
    """Give a model's weights their types: fp32 where they train, the run's precision where they are frozen."""
    frozen = torch.bfloat16 if precision == "bf16" else torch.float32
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
