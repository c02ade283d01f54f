"""The loss scale of a run in fp16."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from finetune.runs.state import TrainerState

if TYPE_CHECKING:
    from finetune.training.step import StepResult

_log = logging.getLogger(__name__)
_STEPS_UNTIL_GROWTH = 2000
_LARGEST_SCALE = 2**24


class LossScale(NamedTuple):
    """The factor of the loss in fp16, without which small gradients would become zero.

    It is doubled after 2,000 steps without an overflow, and halved when a gradient overflows. The step is then computed
    again, so that no batch is lost. Source: Micikevicius et al., 2018, arXiv:1710.03740, section 3.2; the numbers are
    the defaults of torch.amp.GradScaler.
    """

    value: int = 2**16
    """A power of two, so that it changes no bit of a gradient that does not overflow or underflow."""
    num_steps: int = 0
    """Steps since it last changed."""
    num_overflows: int = 0
    """How often a step of the run was computed in vain, because gradients overflowed."""

    @classmethod
    def of(cls, state: TrainerState) -> LossScale:
        """Return the scale with which training goes on from a state."""
        if state.loss_scale is None:
            return cls()._replace(num_overflows=state.num_overflows)
        return cls(state.loss_scale, state.steps_at_loss_scale, state.num_overflows)

    def take_step(self, take: Callable[[int], StepResult]) -> tuple[StepResult, LossScale]:
        """Take a step, and take it again with a smaller scale as long as gradients overflow.

        `take` gets the value of a scale. It must leave weights and optimizer unchanged when gradients overflow, as
        `train_step` does. Returns the last result, and the scale of the next step.
        """
        scale = self
        while True:
            result = take(scale.value)
            if scale.value == 1 or not (result.is_skipped and math.isfinite(result.loss)):
                return result, scale.after_step()
            scale = scale.after_overflow()
            _log.info("step %d overflows in fp16: computed again with loss scale %d", result.step, scale.value)

    def after_step(self) -> LossScale:
        """Return the scale after a step without an overflow."""
        if self.num_steps + 1 < _STEPS_UNTIL_GROWTH:
            return self._replace(num_steps=self.num_steps + 1)
        return self._replace(value=min(2 * self.value, _LARGEST_SCALE), num_steps=0)

    def after_overflow(self) -> LossScale:
        """Return the scale with which the step is computed again."""
        return LossScale(max(1, self.value // 2), num_overflows=self.num_overflows + 1)
