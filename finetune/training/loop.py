"""The training loop: epochs, cadence, early stopping and agreement on a stop. It sees no tensor and no file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from finetune.errors import RunFailedError, ServerError
from finetune.runs.state import TrainerState
from finetune.training.step import StepResult
from finetune.training.validation import Criteria, Validated, after_validation

if TYPE_CHECKING:
    from finetune.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """The steps after which a run validates, saves and ends. Steps count from 1.

    Attributes:
        steps_per_epoch: optimizer steps of one pass over the rows.
        num_steps: optimizer steps of the whole run.
        validate_every: steps between validations, or None for the end of each epoch.
        save_every: steps between checkpoints, or None.
        save_every_epochs: epochs between checkpoints, or None.
    """

    steps_per_epoch: int
    num_steps: int
    validate_every: int | None = None
    save_every: int | None = None
    save_every_epochs: int | None = None

    @classmethod
    def of(cls, config: Config, steps_per_epoch: int) -> Cadence:
        """Make the cadence of a configuration."""
        return cls(
            steps_per_epoch=steps_per_epoch,
            num_steps=config.training.max_steps or config.training.num_epochs * steps_per_epoch,
            validate_every=config.validation.validate_every,
            save_every=config.checkpoint.save_every,
            save_every_epochs=config.checkpoint.save_every_epochs,
        )

    def is_last(self, step: int) -> bool:
        """Return whether the run is complete after this step."""
        return step >= self.num_steps

    def validates_after(self, step: int) -> bool:
        """Return whether a step validates. The last one always does, so that the best adapter is known."""
        return step % (self.validate_every or self.steps_per_epoch) == 0 or self.is_last(step)

    def saves_after(self, step: int) -> bool:
        """Return whether a step saves. The last one always does."""
        epochs, within = divmod(step, self.steps_per_epoch)
        by_steps = self.save_every is not None and step % self.save_every == 0
        by_epochs = self.save_every_epochs is not None and within == 0 and epochs % self.save_every_epochs == 0
        return by_steps or by_epochs or self.is_last(step)

    def most_checkpoints(self, *, keep: int, has_best: bool) -> int:
        """Return the most checkpoints on the disk at once: `keep` of them stay, and the best with `has_best`."""
        num_saves = sum(map(self.saves_after, range(1, self.num_steps + 1)))
        return min(num_saves, keep + has_best + 1)  # one is being written

    def owes_validation(self, state: TrainerState) -> bool:
        """Return whether the run was preempted before the validation that was due after its last step."""
        step, done = state.step, state.validations_without_improvement
        if state.validated_step is not None:
            return self.validates_after(step) and state.validated_step != step
        if step == 0 or step == state.best_step or not self.validates_after(step):
            return False
        return done < sum(map(self.validates_after, range((state.best_step or 0) + 1, step + 1)))


class LoopActions(Protocol):
    """The methods of a run that the loop calls. All are collective: every rank calls them in the same order.

    `finetune.training.training_run.TrainingRun` implements them.
    """

    @property
    def validates(self) -> bool:
        """Whether there is a validation split."""

    def batches(self, epoch: int, first_step: int) -> Iterable[Any]:
        """Yield this rank's micro-batches of each step of an epoch, from `first_step` of the epoch on."""

    def train(self, step: int, microbatches: Any) -> StepResult:
        """Train one step."""

    def validate(self, state: TrainerState) -> Validated | None:
        """Return the metrics of a validation; None if the run was preempted meanwhile."""

    def save(self, state: TrainerState) -> None:
        """Commit a checkpoint of the state."""

    def report(self, state: TrainerState, result: StepResult) -> None:
        """Record a step. The loop calls it after every step."""

    def agree_to_stop(self, is_exhausted: bool) -> bool:
        """Return rank 0's argument on every rank."""


class StopRules(NamedTuple):
    """The rules by which the loop ends a run early."""

    patience: int | None = None
    """Validations without improvement after which the run stops; None: it never stops early."""
    criteria: Criteria = Criteria()
    """Which metric counts."""
    max_skipped_steps: int = 0
    """Steps of the run, over all its starts, that may be skipped because they were not finite."""

    @classmethod
    def of(cls, config: Config) -> StopRules:
        """Make the rules of a configuration."""
        training = config.training
        skips = training.max_skipped_steps if training.on_nonfinite == "skip" else 0
        return cls(config.early_stopping.patience, Criteria.of(config), skips)


class LoopEnd(NamedTuple):
    """The end of training."""

    state: TrainerState
    is_preempted: bool
    """True if a signal ended training early; the state is saved."""


def run_loop(state: TrainerState, cadence: Cadence, actions: LoopActions, rules: StopRules) -> LoopEnd:
    """Train from `state` to the last step, to an agreed early stop, or to the step in which a rank was preempted.

    A preempted run saves and leaves the validation to the resumed run, because its time may be short.

    Collective: every rank, with equal arguments; every rank leaves at the same step.

    Raises:
        ServerError: on every rank, after saving: the server that answers prompts is gone, or its answer is wrong.
        RunFailedError: on every rank, before saving: more than `max_skipped_steps` steps of the run, over all its
            starts, were not finite, or a validation loss was not.
    """
    stops = is_patience_exhausted(state, rules.patience)
    is_preempted = False
    if actions.validates and cadence.owes_validation(state):
        state, stops, is_preempted = _after_step(state, is_preempted, cadence, actions, rules)
    first_step = state.step
    while not (stops or is_preempted or cadence.is_last(state.step)):
        try:
            for microbatches in actions.batches(state.epoch, state.steps_in_epoch):
                result = actions.train(state.step + 1, microbatches)

                state = _advanced(state, cadence, result)
                if result.is_skipped:
                    _refuse_too_many(state, result, rules.max_skipped_steps)
                actions.report(state, result)
                is_preempted = result.num_preempted > 0 and not cadence.is_last(state.step)
                state, stops, is_preempted = _after_step(state, is_preempted, cadence, actions, rules)
                if stops or is_preempted or cadence.is_last(state.step):
                    break
        except ServerError as error:
            if state.step > first_step and not cadence.saves_after(state.step):
                actions.save(state)
            if not error.is_preempted:
                raise
            is_preempted = True
    return LoopEnd(state, is_preempted)


def _after_step(
    state: TrainerState, is_preempted: bool, cadence: Cadence, actions: LoopActions, rules: StopRules
) -> tuple[TrainerState, bool, bool]:
    """Validate and save where due; return the state, whether to stop early, and whether a rank was preempted."""
    stops = False
    if actions.validates and cadence.validates_after(state.step) and not is_preempted:
        found = actions.validate(state)
        is_preempted = found is None
        if found is not None:
            _refuse_not_finite(state, found.loss)
            state = after_validation(state, found, rules.criteria)
            stops = actions.agree_to_stop(is_patience_exhausted(state, rules.patience))
    if cadence.saves_after(state.step) or stops or is_preempted:
        actions.save(state)
    return state, stops, is_preempted


def is_patience_exhausted(state: TrainerState, patience: int | None) -> bool:
    """Return whether training should stop early; never with a patience of None."""
    return patience is not None and state.validations_without_improvement >= patience


def _advanced(state: TrainerState, cadence: Cadence, result: StepResult) -> TrainerState:
    epoch, steps_in_epoch = divmod(state.step + 1, cadence.steps_per_epoch)
    return replace(
        state,
        step=state.step + 1,
        epoch=epoch,
        steps_in_epoch=steps_in_epoch,
        num_targets=state.num_targets + (0 if result.is_skipped else result.num_targets),
        num_tokens=state.num_tokens + result.num_tokens,
        num_skipped_steps=state.num_skipped_steps + result.is_skipped,
        num_overflows=state.num_overflows + result.num_overflows,
        loss_scale=None if result.loss_scale is None else result.loss_scale.value,
        steps_at_loss_scale=0 if result.loss_scale is None else result.loss_scale.num_steps,
    )


def _refuse_too_many(state: TrainerState, result: StepResult, limit: int) -> None:
    if state.num_skipped_steps <= limit:
        return
    if limit:
        which = f"training.max_skipped_steps is {limit}, and {state.num_skipped_steps - 1} were skipped before it"
        instead = "a higher training.max_skipped_steps allows more"
    else:
        which = "training.on_nonfinite is stop"
        instead = "training.on_nonfinite=skip skips a bounded number of such steps"
    raise RunFailedError(
        f"step {state.step}: {result.not_finite}; {which}. The weights were left as before the step. Look at the rows "
        f"of this step, lower optim.learning_rate or add optim.warmup_steps; {instead}. Then go on with resume=auto."
    )


def _refuse_not_finite(state: TrainerState, loss: float) -> None:
    """Raise if the validation loss is not finite, so that no restart begins from these weights."""
    if not math.isfinite(loss):
        raise RunFailedError(
            f"the validation loss after step {state.step} is {loss}: these weights are not saved. Look at the rows of "
            "the validation split, lower optim.learning_rate or add optim.warmup_steps, and go on from the last "
            "checkpoint: resume=auto resume.allow=optim"
        )
