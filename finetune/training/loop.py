"""Epochs, cadence, and the agreed stop. The loop counts and decides; it never sees a tensor, a file or a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from finetune.training.early_stopping import after_validation, is_patience_exhausted
from finetune.training.state import TrainerState
from finetune.training.step import StepResult


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """What happens after which step. Steps count from 1.

    Attributes:
        steps_per_epoch: optimizer steps of one pass over the rows.
        num_steps: after which the run is complete.
        validate_every: steps between validations, or None for the end of each epoch.
        save_every: steps between checkpoints, or None.
        save_every_epochs: epochs between checkpoints, or None.
    """

    steps_per_epoch: int
    num_steps: int
    validate_every: int | None = None
    save_every: int | None = None
    save_every_epochs: int | None = None

    def is_last(self, step: int) -> bool:
        """True when the run is complete after this step."""
        return step >= self.num_steps

    def validates_after(self, step: int) -> bool:
        """The last step always validates, so that the best adapter is known."""
        return step % (self.validate_every or self.steps_per_epoch) == 0 or self.is_last(step)

    def saves_after(self, step: int) -> bool:
        """The last step always saves."""
        epochs, within = divmod(step, self.steps_per_epoch)
        by_steps = self.save_every is not None and step % self.save_every == 0
        by_epochs = self.save_every_epochs is not None and within == 0 and epochs % self.save_every_epochs == 0
        return by_steps or by_epochs or self.is_last(step)


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What the loop calls. All are collective: every rank calls them in the same order.

    Attributes:
        batches: (epoch, first step) to this rank's share of each step from there on.
        train: (step, share) to the step's result.
        validate: (state) to the loss, or None where there is no validation split.
        save: commits a checkpoint of the state.
        report: told of every finished step.
        agree_to_stop: rank 0's answer, on every rank.
    """

    batches: Callable[[int, int], Iterable[Any]]
    train: Callable[[int, Any], StepResult]
    validate: Callable[[TrainerState], float] | None
    save: Callable[[TrainerState], None]
    report: Callable[[TrainerState, StepResult], None]
    agree_to_stop: Callable[[bool], bool]


def run_loop(
    state: TrainerState, cadence: Cadence, actions: Actions, *, patience: int | None, min_delta: float
) -> TrainerState:
    """Train from `state` to the end, which is the last step or an agreed early stop.

    Collective: every rank, with equal arguments; every rank leaves at the same step.
    """
    stops = is_patience_exhausted(state, patience)
    while not (stops or cadence.is_last(state.step)):
        for share in actions.batches(state.epoch, state.steps_in_epoch):
            result = actions.train(state.step + 1, share)

            state = _advanced(state, cadence, result)
            actions.report(state, result)
            if actions.validate is not None and cadence.validates_after(state.step):
                state = after_validation(state, actions.validate(state), min_delta=min_delta)
                stops = actions.agree_to_stop(is_patience_exhausted(state, patience))
            if cadence.saves_after(state.step) or stops:
                actions.save(state)
            if stops or cadence.is_last(state.step):
                break
    return state


def _advanced(state: TrainerState, cadence: Cadence, result: StepResult) -> TrainerState:
    epoch, steps_in_epoch = divmod(state.step + 1, cadence.steps_per_epoch)
    return replace(
        state,
        step=state.step + 1,
        epoch=epoch,
        steps_in_epoch=steps_in_epoch,
        num_targets=state.num_targets + result.num_targets,
        num_tokens=state.num_tokens + result.num_tokens,
    )
