"""What training in fp16 needs: a scale of the loss, and a check of the activations. The largest fp16 value is 65504."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.data.batches import pad
from finetune.engine.decoder import bare_model
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import rows_of
from finetune.errors import ConfigError

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime
    from finetune.runs.state import TrainerState

_STEPS_UNTIL_GROWTH = 2000
_LARGEST = 2**24


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

    @classmethod
    def of(cls, state: TrainerState) -> LossScale:
        """Return the scale with which training goes on from a state."""
        return cls() if state.loss_scale is None else cls(state.loss_scale, state.steps_at_loss_scale)

    def after_step(self) -> LossScale:
        """Return the scale after a step without an overflow."""
        if self.num_steps + 1 < _STEPS_UNTIL_GROWTH:
            return self._replace(num_steps=self.num_steps + 1)
        return LossScale(min(2 * self.value, _LARGEST))

    def after_overflow(self) -> LossScale:
        """Return the scale with which the step is computed again."""
        return LossScale(max(1, self.value // 2))


@torch.no_grad()
def refuse_overflow(runtime: Runtime, model: Any, microbatch: Any, row: Any) -> None:
    """Check that the activations of a model fit into fp16. Those of phi-2 do not. Collective, if the model is sharded.

    Args:
        runtime: of a run in fp16.
        model: placed, or sharded.
        microbatch: the first row of the training split, as the run computes it.
        row: the row itself, or None if layers cannot be called one by one.

    Raises:
        ConfigError: on all ranks. It names the first module whose output overflows.
    """
    with runtime.collectives.failing_together("trying fp16"):
        rows = rows_of(microbatch)
        loss = runtime.placement.forward(summed_cross_entropy, model, rows)
        if loss.isfinite().all():
            return
        where = "its activations"
        if row is not None:
            with _first_overflow(bare_model(model)) as overflowed:
                runtime.placement.forward(summed_cross_entropy, model, pad([row]))
            where = f"the output of {overflowed[0]}" if overflowed else where
        raise ConfigError(
            f"training.precision={runtime.precision}: the loss of the first row is {float(loss.reshape(-1)[0])}, "
            f"because {where} is larger than 65504, the largest value of fp16. Set training.precision=fp32, or train "
            "on a GPU that computes in bf16."
        )


@contextmanager
def _first_overflow(model: torch.nn.Module) -> Iterator[list[str]]:
    """Within the block, collect the names of modules with an output that is not finite, in the order of their calls."""
    overflowed: list[str] = []

    def note(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.is_floating_point() and not first.isfinite().all():
            overflowed.append(name)

    handles = [
        module.register_forward_hook(lambda _module, _given, output, name=name: note(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield overflowed
    finally:
        for handle in handles:
            handle.remove()
