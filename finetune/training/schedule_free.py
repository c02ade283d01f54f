"""Switch between the two sets of weights of a schedule-free optimizer (Defazio et al., 2024, arXiv:2405.15682).

It trains one set, y, and answers with another, x, a mean of earlier weights. The model holds y; while it is measured or
saved, it holds x. A checkpoint has x as its adapter, so that every reader of an adapter gets the weights to answer
with, and y in the optimizer's state, so that a resumed run goes on with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_log = logging.getLogger(__name__)
_TRAINED = "y"
_OF_GROUP = ("k", "weight_sum", "lr_max")
"""What the optimizer counts for each group of weights. A checkpoint holds states of weights only."""


@contextmanager
def mean_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the averaged weights into the model in the block."""
    for group, weight, state in _weights_with_state(optimizer):
        # A copy, because the way from y to x and back would round.
        state |= {_TRAINED: weight.detach().clone(), **{name: group[name] for name in _OF_GROUP}}
    counted = [group["weight_sum"] for group in optimizer.param_groups if "weight_sum" in group]
    if counted and not any(counted) and any(_weights_with_state(optimizer)):
        _log.warning(
            "%s has not updated the weights yet, so the weights of the start are measured or saved now. "
            "RAdamScheduleFree makes its first update in step 5.",
            type(_inner(optimizer)).__name__,
        )
    _inner(optimizer).eval()
    try:
        yield
    finally:
        back_to_trained(optimizer)


def back_to_trained(optimizer: torch.optim.Optimizer) -> None:
    """Put the weights that are trained into the model."""
    for group, weight, state in _weights_with_state(optimizer):
        if _TRAINED in state:
            with torch.no_grad():
                weight.copy_(state.pop(_TRAINED))
            group |= {name: state.pop(name) for name in _OF_GROUP}
    for group in optimizer.param_groups:
        group["train_mode"] = True


def _weights_with_state(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[dict[str, Any], torch.Tensor, dict[str, Any]]]:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if "z" in (state := _inner(optimizer).state[weight]):
                yield group, weight, state


def _inner(optimizer: torch.optim.Optimizer) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
