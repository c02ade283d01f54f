"""End a run after its first steps if an adapter has not changed."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from finetune.errors import RunFailedError
from finetune.training.step import StepResult
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.config.schema import Config

NUM_STEPS = 3
"""The step of a run after which adapters are checked. B matrices have a gradient from the first step on."""
_MAX_SHOWN = 5
_EXPERT = re.compile(r"(.*experts?)\.[0-9]+(\..*)?")
"""A layer of one expert, as model classes name them: `model.layers.0.mlp.experts.3.up_proj`."""
_log = logging.getLogger(__name__)


class AdapterWatch:
    """Checks once, after step 3 of a run, that the B matrix of every adapter has changed.

    It looks at B because A has no gradient as long as B is zero. Weights are the same on all ranks, so all ranks find
    the same. Models without adapters are not checked. Weight decay also changes a B that did not start at zero.
    """

    def __init__(self, model: torch.nn.Module, config: Config) -> None:
        self._b_matrices = {
            name.removeprefix("base_model.model."): [part.weight for part in module.lora_B.values()]
            for name, module in model.named_modules()
            if any(part.weight.requires_grad for part in getattr(module, "lora_B", {}).values())
        }
        self._may_lack_gradient = config.training.objective == "grpo"
        self._highest_rate = 0.0
        starts_at_zero = config.lora.init == "default" and config.lora.start_from is None
        # On the CPU, so that memory on the device is as forecast.
        self._at_start = {
            name: [None if starts_at_zero else b.detach().cpu().clone() for b in of_layer]
            for name, of_layer in self._b_matrices.items()
        }

    def after_step(self, step: int, result: StepResult) -> None:
        """Look for adapters that do not train, after step 3 of the run.

        Steps without an update do not count. Nor do steps of GRPO in which no weight has a gradient because the answers
        of each group have equal rewards.

        Raises:
            RunFailedError: on all ranks; names the layers.
        """
        if not result.is_skipped and (result.grad_norm != 0 or not self._may_lack_gradient):
            self._highest_rate = max(self._highest_rate, result.learning_rate)
        if step < NUM_STEPS or not self._at_start:
            return
        if step == NUM_STEPS and self._highest_rate > 0:
            self._refuse_unchanged()
        self._at_start = {}

    def _refuse_unchanged(self) -> None:
        unchanged = [
            name
            for name, of_layer in self._b_matrices.items()
            if not any(map(_has_changed, of_layer, self._at_start[name]))
        ]
        idle_experts = [name for name in unchanged if self._is_idle_expert(name, unchanged)]
        if idle_experts:
            _log.warning(
                "no token has reached the adapters of %s until step %d: they are not trained yet",
                name_first(sorted(idle_experts), _MAX_SHOWN),
                NUM_STEPS,
            )
        untrained = [name for name in unchanged if name not in idle_experts]
        if untrained:
            raise RunFailedError(
                f"step {NUM_STEPS}: {len(untrained)} of {len(self._b_matrices)} adapters have not changed since the "
                f"start: {name_first(untrained, _MAX_SHOWN)}. Expected: each of them trains. Either the model's "
                "forward does not call these layers, or it detaches their results, or a hook or a script freezes them, "
                f"or the learning rate is too small (the highest so far was {self._highest_rate:g}). Correct that, or "
                "leave these layers out of lora.target_modules."
            )

    def _is_idle_expert(self, name: str, unchanged: Collection[str]) -> bool:
        """Return whether a layer belongs to an expert, and the same layer of another expert has changed."""
        match = _EXPERT.fullmatch(name)
        others = (_EXPERT.fullmatch(other) for other in self._b_matrices if other not in unchanged)
        return match is not None and any(other and other.groups() == match.groups() for other in others)


def _has_changed(matrix: torch.Tensor, at_start: torch.Tensor | None) -> bool:
    """Return whether a matrix differs from its values at the start; None: it was zero."""
    return bool(matrix.detach().any()) if at_start is None else not torch.equal(matrix.detach().cpu(), at_start)
