"""A frozen linear layer that keeps its weight in fp8."""

from __future__ import annotations

import torch

from finetune.engine.quantized import rounded_to_fp8
from finetune.engine.linear import Linear, linear


class Fp8Linear(torch.nn.Module):
    """A linear layer with the weight of another one, rounded to fp8 with a scale for each output.

    Args:
        layer: frozen; on any device, also on the meta device.

    Attributes:
        weight: (out_features, in_features), e4m3.
        row_scale: (out_features,), fp32.
        bias: the layer's, or None.
    """

    row_scale: torch.Tensor

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        values, scale = rounded_to_fp8(layer.weight.detach(), None)
        self.weight = torch.nn.Parameter(values, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("row_scale", scale[:, 0], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer, as transformers' own forward does when it generates: (..., in_features)."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            y = linear(x.flatten(0, -2), Linear(self.weight, self.bias, row_scale=self.row_scale))
        return y.view(*x.shape[:-1], self.out_features)
