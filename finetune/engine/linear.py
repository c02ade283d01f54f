"""Linear layers with LoRA, as one autograd function that keeps nothing but its input.

It computes `y = x Wᵀ + bias + scale · ((x ∘ keep) Aᵀ) Bᵀ`, with each part trained or frozen, for several layers of one
input side by side. Separate operations would make six tensors as large as x or y, and autograd would keep half of them.
Where it is exact and less work, the adapter is first added to the weight; then it costs only its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from finetune.engine import norm
from finetune.engine.products import add_product, product, wide_type

ALL_ROWS = slice(None)


class Linear(NamedTuple):
    """The tensors of one linear layer.

    Attributes:
        weight: (out_features, in_features).
        bias: (out_features,), or None.
        lora_a: (r, in_features), or None where the layer has no adapter.
        lora_b: (out_features, r), or None.
        keep: bool (rows, in_features), False where the adapter's dropout removes an element of its input, or None.
        scale: the factor of the adapter's part; with `keep` it includes 1 / (1 - p).
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None
    keep: torch.Tensor | None = None
    scale: float = 1.0

    def folded(self, x: torch.Tensor) -> Linear:
        """Return the layer with the adapter added to the weight if that is exact and less work, else the layer itself.

        It is not exact with dropout, nor if the sum would be rounded to 16 bits.
        """
        if self.lora_a is None or self.lora_b is None or self.keep is not None:
            return self
        is_exact = x.dtype == self.weight.dtype == self.lora_a.dtype and x.element_size() >= 4
        width, features = self.weight.shape
        is_less_work = 2 * width * features <= len(x) * (width + 2 * features)  # over both passes, times the rank
        if not (is_exact and is_less_work):
            return self
        return Linear(torch.addmm(self.weight, self.lora_b, self.lora_a, alpha=self.scale), self.bias)

    @property
    def width(self) -> int:
        """The number of output columns."""
        return self.weight.shape[0]

    def columns(self, start: int, stop: int) -> Linear:
        """Return the layer with only these output columns."""
        bias = None if self.bias is None else self.bias[start:stop]
        lora_b = None if self.lora_b is None else self.lora_b[start:stop]
        return self._replace(weight=self.weight[start:stop], bias=bias, lora_b=lora_b)

    def at_rows(self, rows: slice | torch.Tensor) -> Linear:
        """Return the layer for only these rows of its input."""
        return self if self.keep is None else self._replace(keep=self.keep[rows])


PARTS = len(Linear._fields)


def draw_keep(like: torch.Tensor, features: int, p: float) -> torch.Tensor:
    """Draw a dropout mask (rows of `like`, features) from torch's global generator, as `functional.dropout` does."""
    return like.new_empty(len(like), features).bernoulli_(1 - p).bool()


def linear(x: torch.Tensor, *layers: Linear, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Apply layers to one input, their outputs side by side, and add a residual.

    Args:
        x: (rows, in_features).
        *layers: one or more.
        residual: (rows, sum of out_features), or None.

    Returns:
        (rows, sum of out_features)
    """
    result: torch.Tensor = _Linears.apply(x, residual, *flatten(layers))  # type: ignore[no-untyped-call]
    return result


def normed_linear(h: torch.Tensor, *layers: Linear, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `linear(rms_norm(h, weight, eps), *layers)`, keeping only h, since a norm is cheaper to recompute."""
    result: torch.Tensor = _NormedLinears.apply(h, weight, eps, *flatten(layers))  # type: ignore[no-untyped-call]
    return result


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, *parts: Any) -> torch.Tensor:
        layers = unflatten(parts)
        save_for_backward(ctx, layers, x if any(ctx.needs_input_grad[2:]) else None)
        return apply_linears(x, [layer.folded(x) for layer in layers], residual=residual)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        layers, (x,) = saved(ctx)
        gradients = LinearGradients(layers, ctx.needs_input_grad[2:], dy)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gradients.propagate(dy, x)
        else:
            gradients.add(dy, x)
        return dx, dy if ctx.needs_input_grad[1] else None, *gradients.flatten()


class _NormedLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, eps: float, *parts: Any) -> torch.Tensor:
        layers = unflatten(parts)
        inverse_rms = norm.inverse_root_mean_square(h, eps)
        save_for_backward(ctx, layers, h, weight, inverse_rms)
        return apply_linears(norm.normalized(h, weight, inverse_rms), [layer.folded(h) for layer in layers])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        layers, (h, weight, inverse_rms) = saved(ctx)
        wants_h, wants_weight, _, *wanted = ctx.needs_input_grad
        gradients = LinearGradients(layers, wanted, dy)
        x = norm.normalized(h, weight, inverse_rms)
        if not (wants_h or wants_weight):
            gradients.add(dy, x)
            return None, None, None, *gradients.flatten()
        dx = gradients.propagate(dy, x)
        dh = norm.input_gradient(dx, h, weight, inverse_rms) if wants_h else None
        dweight = norm.weight_gradient(dx, h, inverse_rms).to(weight.dtype) if wants_weight else None
        return dh, dweight, None, *gradients.flatten()


def apply_linears(
    x: torch.Tensor, layers: Sequence[Linear], rows: slice = ALL_ROWS, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the forward pass for some rows of the input."""
    outputs, start = [], 0
    for layer in layers:
        own_residual = None if residual is None else residual[:, start : start + layer.width]
        outputs.append(_apply(x, layer.at_rows(rows), own_residual))
        start += layer.width
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _apply(x: torch.Tensor, layer: Linear, residual: torch.Tensor | None) -> torch.Tensor:
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    y = product(x, layer.weight.to(x.dtype), bias, residual)
    if layer.lora_a is not None and layer.lora_b is not None:
        dropped = x if layer.keep is None else x * layer.keep
        y.addmm_(product(dropped, layer.lora_a.to(x.dtype)), layer.lora_b.to(x.dtype).t(), alpha=layer.scale)
    return y


class LinearGradients:
    """Gradients of layers with one input, summed over chunks of its rows in fp32 or better.

    Args:
        layers: one or more.
        wanted: whether each part of each layer needs a gradient, in the order of `flatten`.
        like: a tensor with the rows and the type of the whole input.
    """

    def __init__(self, layers: Sequence[Linear], wanted: Sequence[bool], like: torch.Tensor) -> None:
        self._layers = [
            _LayerGradients(layer, wanted[index * PARTS : (index + 1) * PARTS], like)
            for index, layer in enumerate(layers)
        ]

    def propagate(self, dy: torch.Tensor, x: torch.Tensor | None, rows: slice = ALL_ROWS) -> torch.Tensor:
        """Add the gradients of some rows, and return the gradient of their input, (rows, in_features).

        Args:
            dy: (rows, sum of out_features).
            x: (rows, in_features), or None if only the gradient of the input is needed.
            rows: the indices of these rows in the whole input.
        """
        dx = self._add(dy, x, rows, wants_input=True)
        assert dx is not None
        return dx

    def add(self, dy: torch.Tensor, x: torch.Tensor | None, rows: slice = ALL_ROWS) -> None:
        """Add the gradients of some rows, without that of the input, which is at least half of the work."""
        self._add(dy, x, rows, wants_input=False)

    def _add(self, dy: torch.Tensor, x: torch.Tensor | None, rows: slice, *, wants_input: bool) -> torch.Tensor | None:
        dx, start = None, 0
        for gradients in self._layers:
            own = dy[:, start : start + gradients.layer.width]
            dx = gradients.add(own, x, dx, rows, wants_input=wants_input)
            start += gradients.layer.width
        return dx

    def flatten(self) -> list[torch.Tensor | None]:
        """Return the gradients in the order of `flatten`, each in its parameter's own type."""
        return [gradient for layer in self._layers for gradient in layer.finish()]


class _LayerGradients:
    """The gradients of one layer."""

    def __init__(self, layer: Linear, wanted: Sequence[bool], like: torch.Tensor) -> None:
        self.layer = layer
        self._folded = layer.folded(like)
        weight, bias, a, b, *_ = wanted
        self._weight = _zeros(layer.weight) if weight else None
        self._bias = _zeros(layer.bias) if bias and layer.bias is not None else None
        self._a = _zeros(layer.lora_a) if a and layer.lora_a is not None else None
        # (r, out_features), since (r, rows) times (rows, out_features) is faster than its transpose.
        self._b_transposed = _zeros(layer.lora_b.t()) if b and layer.lora_b is not None else None

    def add(
        self, dy: torch.Tensor, x: torch.Tensor | None, dx: torch.Tensor | None, rows: slice, *, wants_input: bool
    ) -> torch.Tensor | None:
        """Add to the sums, and return dx with this layer's part."""
        if wants_input:
            dx = product(dy, self._folded.weight.to(dy.dtype).t(), residual=dx)
        if x is not None and self._weight is not None:
            add_product(self._weight, dy.t(), x)
        if x is not None and self._bias is not None:
            self._bias.add_(dy.sum(0, dtype=self._bias.dtype))
        if self.layer.lora_a is not None and self.layer.lora_b is not None:
            self._add_adapter(dy, x, None if self._folded.lora_a is None else dx, self.layer.at_rows(rows))
        return dx

    def _add_adapter(self, dy: torch.Tensor, x: torch.Tensor | None, dx: torch.Tensor | None, layer: Linear) -> None:
        assert layer.lora_a is not None
        assert layer.lora_b is not None
        a, b, keep = layer.lora_a.to(dy.dtype), layer.lora_b.to(dy.dtype), layer.keep
        d_low_rank = product(dy, b.t()).mul_(layer.scale)  # (rows, r)
        if dx is not None:
            if keep is None:
                dx.addmm_(d_low_rank, a)
            else:
                dx.add_((d_low_rank @ a).mul_(keep))
        if x is None:
            return
        dropped = x if keep is None else x * keep
        if self._a is not None:
            add_product(self._a, d_low_rank.t(), dropped)
        if self._b_transposed is not None:
            low_rank = product(dropped, a).mul_(layer.scale)
            self._b_transposed.add_(product(low_rank.t(), dy.t()))

    def finish(self) -> tuple[torch.Tensor | None, ...]:
        b = None if self._b_transposed is None else self._b_transposed.t()
        parts = zip(self.layer[:4], (self._weight, self._bias, self._a, b), strict=True)
        made = (None if part is None or sums is None else sums.to(part.dtype) for part, sums in parts)
        return *made, None, None  # a mask and a scale have no gradient


def flatten(layers: Sequence[Linear]) -> list[Any]:
    """Return the parts of all layers as a flat list, for the arguments and results of autograd functions."""
    return [part for layer in layers for part in layer]


def unflatten(parts: Sequence[Any]) -> list[Linear]:
    """Return the layers for a list made by `flatten`."""
    return [Linear(*parts[start : start + PARTS]) for start in range(0, len(parts), PARTS)]


def save_for_backward(ctx: Any, layers: Sequence[Linear], *others: torch.Tensor | None) -> None:
    """Keep layers and other tensors for `saved`."""
    ctx.scales = [layer.scale for layer in layers]
    ctx.save_for_backward(*others, *(part for layer in layers for part in layer[:-1]))


def saved(ctx: Any) -> tuple[list[Linear], Sequence[Any]]:
    """Return the layers and other tensors that `save_for_backward` kept."""
    tensors = ctx.saved_tensors  # checkpointing allows only one access
    per_layer = PARTS - 1
    first = len(tensors) - per_layer * len(ctx.scales)
    layers = [
        Linear._make([*tensors[start : start + per_layer], scale])
        for start, scale in zip(range(first, len(tensors), per_layer), ctx.scales, strict=True)
    ]
    return layers, tensors[:first]


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(like.shape, dtype=wide_type(like), device=like.device)
