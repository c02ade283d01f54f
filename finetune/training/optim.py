"""Build optimizers from an allow-list of dotted names, and compute learning rates from the step."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.schema import ALLOWED_OBJECT_MODULES, SCRIPT_PREFIX, is_allowed_object
from finetune.errors import ConfigError
from finetune.model.base import is_half_frozen, train_first_half

if TYPE_CHECKING:
    from finetune.config.schema import Config, OptimSection


_log = logging.getLogger(__name__)
_RATIO = "ratio_to_learning_rate"
"""A key that is added to a parameter group. The optimizer keeps it and does not use it."""


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer averages weights beside those that it trains."""
    return "train_mode" in optimizer.param_groups[0]


def averaged_weights(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Put the averaged weights into the model in the block, to measure or save them. Other optimizers have none."""
    if not is_schedule_free(optimizer):
        return nullcontext()
    from finetune.training.schedule_free import mean_weights

    return mean_weights(optimizer)


def restore_trained_weights(optimizer: torch.optim.Optimizer) -> None:
    """Put the weights that are trained into the model: at the start, after `averaged_weights` and after loading."""
    if is_schedule_free(optimizer):
        from finetune.training.schedule_free import back_to_trained

        back_to_trained(optimizer)


def build_optimizer(model: torch.nn.Module, section: OptimSection) -> torch.optim.Optimizer:
    """Build the optimizer over the trained weights, or raise ConfigError; vectors (biases, norms) do not decay."""
    optimizer_class: Any = section.factory or resolve_optimizer(section.optimizer)
    if section.factory is not None:
        parameters = inspect.signature(section.factory).parameters
        if "lr" not in parameters and not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return _made_from_weights(model, section)
    if "weight_decay" in section.args:  # the decay of each group would win
        raise ConfigError("optim.args sets weight_decay. Set optim.weight_decay, which spares biases and norms.")
    groups = _groups(model, section)
    if section.factory is None and "weight_decay" not in inspect.signature(optimizer_class).parameters:
        if section.weight_decay:
            raise ConfigError(
                f"{section.optimizer} has no weight decay. Set optim.weight_decay=0, or choose torch.optim.AdamW."
            )
        for group in groups:
            del group["weight_decay"]
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in section.args.items()}
    try:
        optimizer: torch.optim.Optimizer = optimizer_class(groups, lr=section.learning_rate, **arguments)
    except (TypeError, ValueError) as error:
        if section.optimizer == "torch.optim.Muon" and any(weight.ndim != 2 for weight in trainable_parameters(model)):
            raise ConfigError(
                "optim.optimizer=torch.optim.Muon trains matrices only, and this run also trains norms or biases. Set "
                "optim.optimizer=adamw, or train an adapter (training.method=lora) without norms."
            ) from error
        given = f"with optim.args={section.args}, " if section.args else ""
        raise ConfigError(f"{given}optim.optimizer={section.optimizer} cannot be built: {error}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{section.optimizer} returned {type(optimizer).__name__}; expected a torch.optim.Optimizer.")
    if section.factory is not None:
        _follow_own_settings(optimizer, section, groups)
    if is_schedule_free(optimizer) and section.schedule != "constant":
        raise ConfigError(
            f"{section.optimizer} needs a learning rate that does not fall, and optim.schedule is {section.schedule}. "
            "Set optim.schedule=constant."
        )
    restore_trained_weights(optimizer)
    return optimizer


def check_optimizer(config: Config) -> None:
    """Raise the errors that `build_optimizer` would raise for this configuration, without the model.

    An optimizer that a script makes is not checked, nor one whose package is not installed on this machine.
    """
    section, is_lora = config.optim, config.training.method == "lora"
    is_named = section.factory is None and not section.optimizer.startswith(SCRIPT_PREFIX)
    if is_named and find_spec(section.optimizer.partition(".")[0]) is not None:
        weight = torch.nn.Parameter(torch.zeros(1, 1))  # not random: a draw would change the run's later ones
        if is_lora and config.lora.init != "default":
            train_first_half(weight, 1, dim=0)
        layer = torch.nn.ParameterDict({"weight": weight} if is_lora else {"weight": weight, "bias": torch.zeros(1)})
        model = torch.nn.ModuleDict({"layer": torch.nn.ModuleDict({"lora_B" if is_lora else "linear": layer})})
        build_optimizer(model, section)


def _made_from_weights(model: torch.nn.Module, section: OptimSection) -> torch.optim.Optimizer:
    """Return the optimizer of a script's function that takes no `lr`.

    The rate of each group keeps its ratio to `optim.learning_rate`, because the trainer sets the rate of each step.
    """
    from finetune.training.given_optimizer import optimizer_of_weights, own_ratios

    optimizer = optimizer_of_weights(section, trainable_parameters(model))
    if is_schedule_free(optimizer):
        raise ConfigError(f"{section.optimizer} is schedule-free. Name its class in optim.optimizer.")
    for group, ratio in zip(optimizer.param_groups, own_ratios(optimizer, section), strict=True):
        group[_RATIO] = ratio
    return optimizer


def _follow_own_settings(optimizer: torch.optim.Optimizer, section: OptimSection, groups: list[dict[str, Any]]) -> None:
    """Refuse settings of a script's function that differ from `optim.*`. Groups to which it gave a rate keep theirs."""
    from finetune.training.given_optimizer import own_ratios, refuse_other_settings

    refuse_other_settings(optimizer, section, groups)
    for group, ratio in zip(optimizer.param_groups, own_ratios(optimizer, section), strict=True):
        if float(group["lr"]) != section.learning_rate * group.get(_RATIO, 1.0):
            group[_RATIO] = ratio


def _groups(model: torch.nn.Module, section: OptimSection) -> list[dict[str, Any]]:
    """Group the weights by decay and rate; with LoRA+ the matrices B are a group of their own."""
    ratio, decay = section.lora_plus_ratio, section.weight_decay
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    second = [weight for name, weight in trained.items() if ".lora_B." in name] if ratio != 1 else []
    if ratio != 1 and not second:
        raise ConfigError(
            f"optim.lora_plus_ratio is {ratio:g}, but it applies to LoRA adapters only, and this run trains none. "
            "Remove it, or set training.method=lora."
        )
    if decay and any(is_half_frozen(weight) for weight in trained.values()):
        raise ConfigError(
            f"optim.weight_decay is {decay:g}, which would shrink what lora.init=pissa keeps of the base. "
            "Set optim.weight_decay=0, or lora.init=default."
        )
    faster = {id(weight) for weight in second}
    others = [weight for weight in trained.values() if id(weight) not in faster]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
        {"params": second, "weight_decay": decay, "lr": section.learning_rate * ratio, _RATIO: ratio},
    ]
    return [group for group in groups if group["params"]]


def resolve_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """Look up an optimizer class by its dotted name, or raise ConfigError. Only allowed modules are imported."""
    if name.startswith(SCRIPT_PREFIX):
        raise ConfigError(
            f"optim.optimizer is {name}: a script made this optimizer, and only that script can train with it. Run it, "
            "or set optim.optimizer to the dotted name of a class."
        )
    if not is_allowed_object(name):
        raise ConfigError(f"optim.optimizer is {name}; it must come from {', '.join(ALLOWED_OBJECT_MODULES)}.")
    module, _, attribute = name.rpartition(".")
    try:
        optimizer = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        install = f"Run pip install {module.partition('.')[0]}, or choose torch.optim.AdamW."
        raise ConfigError(f"optim.optimizer is {name}, but {module} is not installed ({error}). {install}") from error
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigError(f"optim.optimizer is {name}, but {module} has no such optimizer.")
    if optimizer in (torch.optim.LBFGS, torch.optim.SparseAdam) or name.endswith("Closure"):
        raise ConfigError(f"optim.optimizer={name} needs a closure or sparse gradients. Choose torch.optim.AdamW.")
    return optimizer


def learning_rate_at(step: int, num_steps: int, section: OptimSection) -> float:
    """Return the rate of a step, from 1 to `num_steps`. A pure function, so there is no scheduler state to save.

    After the warm-up, rate = height * learning_rate + (1 - height) * min_learning_rate. The height falls from 1
    as the progress through the falling steps goes from 0 to 1.
    """
    warmup_steps = section.warmup_in(num_steps)
    if step <= warmup_steps:
        return section.learning_rate * step / warmup_steps
    falling = num_steps - warmup_steps
    if section.schedule == "wsd":
        falling = min(falling, section.decay_steps or math.ceil(num_steps / 10))
    progress = max(0.0, (step - 1 - num_steps + falling) / max(1, falling))
    height = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "wsd": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[section.schedule]
    # Without a minimum, the rate has the same bits as in earlier versions.
    return section.learning_rate * height + section.min_learning_rate * (1.0 - height)


def describe_short_schedule(section: OptimSection, num_steps: int) -> str:
    """Say that the steps are too few for the warm-up, or one too few for a rate that should fall. Empty if not."""
    if (warmup := section.warmup_steps) > num_steps:
        rate = f"the learning rate never reaches {section.learning_rate:g}"
        return f"optim.warmup_steps is {warmup}, more than the steps of the run ({num_steps}): {rate}"
    if section.schedule == "wsd" and (section.decay_steps or num_steps / 10) <= 1 < num_steps - warmup:
        return "optim.schedule=wsd never falls in 1 step, which begins at the top; set optim.decay_steps=2"
    return ""


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group, times the group's ratio if it has one (`optim.lora_plus_ratio`)."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(_RATIO, 1.0)
        # A tensor rate (capturable optimizers) keeps its identity.
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def trainable_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained weights, in the model's own order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
