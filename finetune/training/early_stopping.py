"""When the validation loss has stopped falling."""

from __future__ import annotations

import math
from dataclasses import replace

from finetune.runs.state import TrainerState


def after_validation(state: TrainerState, loss: float, *, min_delta: float) -> TrainerState:
    """The state after one more validation. A loss that is not finite is no improvement."""
    if math.isfinite(loss) and loss < (float("inf") if state.best_loss is None else state.best_loss - min_delta):
        return replace(state, best_loss=loss, best_step=state.step, validations_without_improvement=0)
    return replace(state, validations_without_improvement=state.validations_without_improvement + 1)


def is_patience_exhausted(state: TrainerState, patience: int | None) -> bool:
    """True when training should stop; never with a patience of None."""
    return patience is not None and state.validations_without_improvement >= patience
