"""End a run after its first steps if an adapter has received no gradient or has not changed."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import RunFailedError
from finetune.training.step import StepResult

if TYPE_CHECKING:
    from finetune.config.schema import Config

NUM_STEPS = 3
"""Steps of a run after which every adapter has had a gradient: A gets one from the second step on, B from the first."""
_MAX_SHOWN = 5
_EXPERT = re.compile(r"(.*experts?)\.[0-9]+(\..*)?")
"""A layer of one expert, as model classes name them: `model.layers.0.mlp.experts.3.up_proj`."""
_log = logging.getLogger(__name__)


class AdapterWatch:
    """Watches the B matrices of a model's adapters in the first steps of a run, on each rank.

    It looks at B because B is zero at the start and A has no gradient as long as B is zero. Gradients are looked at
    before each update, when they are summed over ranks, so all ranks find the same. The host waits for the device once,
    after the last of these steps. Nothing is watched of a model without adapters.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: Config) -> None:
        self._b_matrices = {
            name.removeprefix("base_model.model."): [part.weight for part in module.lora_B.values()]
            for name, module in model.named_modules()
            if _is_trained(module)
        }
        self._starts_at_zero = config.lora.init == "default" and config.lora.start_from is None
        self._may_lack_gradient = config.training.objective == "grpo"
        self._has_gradient: torch.Tensor | None = None
        self._num_counted = 0
        self._highest_rate = 0.0
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has no hooks
        self._hook = inner.register_step_pre_hook(self._look_at_gradients) if self._b_matrices else None

    def after_step(self, step: int, result: StepResult) -> None:
        """Look for adapters that do not train, after step 3 of the run, however often it was resumed.

        Steps without an update do not count. Nor do steps of GRPO in which no weight has a gradient because the answers
        of each group have equal rewards.

        Raises:
            RunFailedError: on all ranks; names the layers.
        """
        if self._hook is None:
            return
        if not result.is_skipped and (result.grad_norm != 0 or not self._may_lack_gradient):
            self._num_counted += 1
            self._highest_rate = max(self._highest_rate, result.learning_rate)
        if step < NUM_STEPS:
            return
        self._hook.remove()
        self._hook = None
        if self._num_counted and self._has_gradient is not None:
            self._refuse_untrained(step, self._has_gradient.tolist())

    def _refuse_untrained(self, step: int, has_gradient: list[bool]) -> None:
        effects = [torch.stack([b.detach().any() for b in of_layer]).any() for of_layer in self._b_matrices.values()]
        facts = list(zip(self._b_matrices, has_gradient, torch.stack(effects).tolist(), strict=True))
        # Started at zero, a B with values was trained in steps before this start.
        without = {name for name, trains, moved in facts if not trains and not (moved and self._starts_at_zero)}
        unmoved = [name for name, trains, moved in facts if trains and not moved and self._highest_rate > 0]
        idle_experts = {name for name in without if self._is_idle_expert(name, without)}
        if idle_experts:
            _log.warning(
                "no token has reached the adapters of %s until step %d: they are not trained yet",
                *(_name_some(sorted(idle_experts)), step),
            )
        untrained = [name for name in self._b_matrices if name in without - idle_experts]
        how_many = f"of {len(self._b_matrices)} adapters"
        if untrained:
            raise RunFailedError(
                f"step {step}: {len(untrained)} {how_many} received no gradient in any step of the run: "
                f"{_name_some(untrained)}. Expected: each of them trains. Either the model's forward does not call "
                "these layers, or it detaches their results, or a hook or a script freezes them. Correct that, or "
                "leave these layers out of lora.target_modules."
            )
        if unmoved:
            raise RunFailedError(
                f"step {step}: the B matrices of {len(unmoved)} {how_many} received gradients but are still zero: "
                f"{_name_some(unmoved)}. Expected: the optimizer has changed them. Check that optim.learning_rate is "
                f"not too small (the highest so far was {self._highest_rate:g}), that optim.optimizer updates these "
                "weights, and that no hook sets them back."
            )

    def _is_idle_expert(self, name: str, without: Collection[str]) -> bool:
        """Return whether a layer belongs to an expert, and other experts beside it were given tokens."""
        found = _EXPERT.fullmatch(name)
        if found is None:
            return False
        beside = (other for other in map(_EXPERT.fullmatch, self._b_matrices) if other is not None)
        return any(other.groups() == found.groups() and other.string not in without for other in beside)

    def _look_at_gradients(self, *_: Any) -> None:
        """Note which layers have a gradient. Does not wait for the device."""
        found = torch.stack([_any_gradient(of_layer) for of_layer in self._b_matrices.values()])
        self._has_gradient = found if self._has_gradient is None else self._has_gradient | found


def _is_trained(module: Any) -> bool:
    """Return whether a module has an adapter with a trained matrix."""
    parts = [*getattr(module, "lora_A", {}).values(), *getattr(module, "lora_B", {}).values()]
    return any(part.weight.requires_grad for part in parts)


def _any_gradient(matrices: list[torch.Tensor]) -> torch.Tensor:
    given = [b.new_zeros((), dtype=torch.bool) if b.grad is None else b.grad.any() for b in matrices]
    return torch.stack(given).any()


def _name_some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_SHOWN]) + (f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else "")
