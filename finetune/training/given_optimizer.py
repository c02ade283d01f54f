"""Use an optimizer that comes from a script, as an object or as a function that makes it: see `Hooks.optimizer`."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import ConfigError
from finetune.model.base import is_half_frozen

if TYPE_CHECKING:
    from finetune.config.schema import OptimSection

_SAME = 1e-6
"""The relative difference of two learning rates that count as equal."""


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
    _refuse_decay_of_start(optimizer, section)
    return optimizer


def refuse_other_settings(
    optimizer: torch.optim.Optimizer, section: OptimSection, groups: Sequence[dict[str, Any]]
) -> None:
    """Refuse an optimizer that a script's function made of these groups, if `optim.*` has replaced its own settings.

    A value in a group wins over the argument of the same name. So without this check, the function's own weight decay
    would have no effect.

    Raises:
        ConfigError: the function sets another rate or weight decay than `optim.*`, or makes groups that ignore a key.
    """
    code: Any = section.factory
    fixed: dict[str, Any] = {}
    while isinstance(code, partial):
        code, fixed = code.func, {**code.keywords, **fixed}
    for name, value in {"lr": section.learning_rate, **section.args}.items():
        value = tuple(value) if isinstance(value, list) else value
        if name in fixed and fixed[name] != value:
            key = "optim.learning_rate" if name == "lr" else f"optim.args.{name}"
            raise _contradiction(section, f"{name}={fixed[name]}", key, value, fixed[name])
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]
    if len(rates) < len(optimizer.param_groups):
        raise ConfigError(
            f"{section.optimizer} has parameter groups without a learning rate, but the rate of each step follows "
            "optim.learning_rate. Let the function give lr to the optimizer."
        )
    ratio = section.lora_plus_ratio
    if not any(math.isclose(rate, section.learning_rate * ratio, rel_tol=_SAME) for rate in rates) and ratio != 1:
        raise ConfigError(
            f"optim.lora_plus_ratio is {ratio:g}, but {section.optimizer} makes parameter groups without it. Give the "
            "groups to the optimizer as they are, or remove the key."
        )
    decay, own_decay = section.weight_decay, getattr(optimizer, "defaults", {}).get("weight_decay")
    given, used = ({group.get("weight_decay") for group in each} for each in (groups, optimizer.param_groups))
    if decay and own_decay is None:
        raise ConfigError(f"{section.optimizer} has no weight decay. Set optim.weight_decay=0.")
    is_ignored = decay in given - used and decay != 0
    is_replaced = used <= given and own_decay not in (None, decay)
    if is_ignored or (is_replaced and ("weight_decay" in fixed or _sets_decay(code, optimizer))):
        raise _contradiction(section, f"the weight decay {own_decay:g}", "optim.weight_decay", decay, own_decay)
    _refuse_decay_of_start(optimizer, section)


def own_ratios(optimizer: torch.optim.Optimizer, section: OptimSection) -> list[float]:
    """Return the ratio of each group's rate to `optim.learning_rate`.

    Raises:
        ConfigError: no group has the rate `optim.learning_rate`.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    # A rate that is a tensor has been rounded to fp32.
    is_same = [math.isclose(rate, section.learning_rate, rel_tol=_SAME) for rate in rates]
    if not any(is_same):
        raise ConfigError(
            f"{section.optimizer} has the learning rate {rates[0]:g}, but optim.learning_rate is "
            f"{section.learning_rate:g}, which the rate of each step follows. Set one of them to the other: "
            f'overrides={{"optim.learning_rate": {rates[0]:g}}}.'
        )
    return [
        1.0 if same or not section.learning_rate else rate / section.learning_rate
        for rate, same in zip(rates, is_same, strict=True)
    ]


def _contradiction(section: OptimSection, own: str, key: str, value: object, own_value: object) -> ConfigError:
    return ConfigError(
        f"{section.optimizer} sets {own}, but {key} is {value}, which would replace it. Set one of them to the other: "
        f'overrides={{"{key}": {own_value}}}.'
    )


def _sets_decay(code: object, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a function sets the weight decay of its optimizer. The default of a class does not count."""
    classes = [each for each in type(optimizer).__mro__ if issubclass(each, torch.optim.Optimizer)]
    parameters = [inspect.signature(each).parameters.get("weight_decay") for each in classes]
    defaults = [parameter.default for parameter in parameters if parameter is not None]
    return optimizer.defaults["weight_decay"] not in defaults or (
        inspect.isfunction(code) and "weight_decay" in _constants(code.__code__)
    )


def _constants(code: CodeType) -> Iterator[object]:
    """Yield the constants of a function's code, among them the names of the keyword arguments that it gives."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        elif isinstance(constant, tuple):
            yield from constant
        else:
            yield constant


def _refuse_decay_of_start(optimizer: torch.optim.Optimizer, section: OptimSection) -> None:
    for group in optimizer.param_groups:
        if group.get("weight_decay") and any(is_half_frozen(weight) for weight in group["params"]):
            raise ConfigError(
                f"{section.optimizer} has a weight decay of {group['weight_decay']:g}, which would shrink what "
                "lora.init=pissa keeps of the base. Set weight_decay=0 in it, or lora.init=default."
            )


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
