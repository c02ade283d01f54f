"""Use an optimizer that a script makes of the trained weights by itself, or has made already: see `Hooks.optimizer`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.config.schema import OptimSection


def optimizer_of_weights(section: OptimSection, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that a script's function makes of the trained weights, with the function's own settings.

    Raises:
        ConfigError: the optimizer does not train exactly these weights, or `optim.*` says something else.
    """
    unused = {"weight_decay": 0.0, "lora_plus_ratio": 1.0, "args": {}}
    if ignored := [f"optim.{key}" for key, default in unused.items() if getattr(section, key) != default]:
        raise ConfigError(
            f"{ignored[0]} is set, but {section.optimizer} gets no parameter groups, to which it applies. Remove the "
            "key, or let the function take lr: optimizer=lambda groups, lr: torch.optim.AdamW(groups, lr=lr)."
        )
    assert section.factory is not None
    try:
        optimizer = section.factory(weights)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{section.optimizer} cannot be built of the trained weights: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{section.optimizer} returned {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    _refuse_other_weights(optimizer, weights)
    return optimizer


def own_ratios(optimizer: torch.optim.Optimizer, section: OptimSection) -> list[float]:
    """Return the ratio of each group's rate to `optim.learning_rate`.

    Raises:
        ConfigError: no group has the rate `optim.learning_rate`.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if section.learning_rate not in rates:
        raise ConfigError(
            f"{section.optimizer} has the learning rate {rates[0]:g}, but optim.learning_rate is "
            f"{section.learning_rate:g}, which the rate of each step follows. Set one of them to the other: "
            f'overrides={{"optim.learning_rate": {rates[0]:g}}}.'
        )
    return [rate / section.learning_rate if section.learning_rate else 1.0 for rate in rates]


def _refuse_other_weights(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if held != {id(weight) for weight in weights}:
        raise ConfigError(
            f"the given {type(optimizer).__name__} does not hold exactly the weights that this run trains: it holds "
            f"{len(held)} tensors, and the run trains {len(weights)}. A run that loads the model or adds "
            "the adapter itself has other weights. Give a function: optimizer=lambda weights: SGD(weights, lr=1e-4)."
        )


def same_optimizer(
    optimizer: torch.optim.Optimizer, trained: list[torch.nn.Parameter]
) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    """Return a function that makes the same optimizer, without a state, for copies or shards of the trained weights.

    Raises:
        ConfigError: the optimizer does not hold exactly the trained weights, or has made steps.
    """
    _refuse_other_weights(optimizer, trained)
    if optimizer.state:
        raise ConfigError(
            f"the given {type(optimizer).__name__} has made steps, which a run that starts again would not repeat. "
            "Give a new one."
        )
    place = {id(weight): number for number, weight in enumerate(trained)}
    groups = [(group, [place[id(weight)] for weight in group["params"]]) for group in optimizer.param_groups]

    def make(weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        # A scheduler of torch puts a `step` into the object that would step the given weights.
        vars(made).update({name: value for name, value in vars(optimizer).items() if name != "step"})
        made.state = defaultdict(dict)
        made.param_groups = [{**group, "params": [weights[each] for each in places]} for group, places in groups]
        return made

    return make
