"""Tolerances that follow from the rounding of a computation, not from what one machine showed.

Another CPU adds the terms of a product in another order, so its results differ by roundings. How much that is depends
on the model: a tiny random one can amplify a rounding a thousandfold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_DRAWS = 4
_SAFETY = 8
"""A computation rounds each weight's contribution a few times: in its product, its sum, and the layers that follow."""


def rounding_of(compute: Callable[[Any], torch.Tensor], model: Any) -> float:
    """Return by how much roundings may change an element of `compute(model)`.

    A product computed in floating point is the exact product of slightly changed factors (Higham, Accuracy and
    Stability of Numerical Algorithms, 2nd ed., section 3.1). So every weight is moved up or down by one rounding, at
    random. The largest change of a result over a few draws is what one rounding of each weight does to it.
    """
    weights = list(model.parameters())
    before = [weight.detach().clone() for weight in weights]  # a copy of the whole model takes longer than a gradient
    with torch.no_grad():
        exact = compute(model)
        changes = []
        for seed in range(_DRAWS):
            generator = torch.Generator().manual_seed(seed)
            for weight, old in zip(weights, before, strict=True):
                signs = 2 * torch.randint(0, 2, old.shape, generator=generator) - 1
                weight.copy_(old * (1 + signs * torch.finfo(old.dtype).eps))
            changes.append((compute(model) - exact).abs().max())
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
    return _SAFETY * float(torch.stack(changes).max())


def relative_difference(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> float:
    """Return ‖ours − theirs‖ / ‖theirs‖ over all tensors together, which promise 1 bounds by 1e-5."""
    one, other = (torch.cat([tensor.detach().double().flatten() for tensor in tensors]) for tensors in (ours, theirs))
    return float((one - other).norm() / other.norm())
