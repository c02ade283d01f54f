"""The training loop: epochs, validations, checkpoints, early stopping, and agreement on a stop."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import Literal, NamedTuple

from finetune.errors import RunFailedError, ServerError
from finetune.runs.state import TrainerState
from finetune.training.cadence import Cadence, StopRules
from finetune.training.step import LossScale, StepResult
from finetune.training.training_run import TrainingRun
from finetune.training.validation import after_validation

Reason = Literal["complete", "no improvement", "preempted", "stopped"]


class LoopEnd(NamedTuple):
    """The end of training."""

    state: TrainerState
    reason: Reason
    """preempted: a signal ended training early, and the state is saved. stopped: a callback ended training."""


def run_loop(state: TrainerState, cadence: Cadence, run: TrainingRun, rules: StopRules) -> LoopEnd:
    """Train from `state` to the last step, to an agreed early stop, or to the step in which a rank was preempted.

    A preempted run saves and leaves the validation to the resumed run, because its time may be short.

    Collective: every rank, with equal arguments; every rank leaves at the same step.

    Raises:
        ServerError: on every rank, after saving: the server that answers prompts is gone, or its answer is wrong.
        RunFailedError: on every rank, before saving: more than `max_skipped_steps` steps of the run, over all its
            starts, were not finite, or a validation loss was not.
    """
    end: Reason | None = "no improvement" if is_patience_exhausted(state, rules.patience) else None
    end = "stopped" if state.is_stopped else end
    if run.validates and cadence.owes_validation(state):
        state, end = _after_step(state, cadence, run, rules)
    if cadence.is_last(state.step):
        end = end or "complete"
    first_step = state.step
    while end is None:
        try:
            # Closed on an error too: workers of the loader that outlive their iterator would keep Python from ending.
            with closing(run.batches(state.epoch, state.steps_in_epoch)) as batches:
                for microbatches in batches:
                    result = run.train(state.step + 1, microbatches)

                    state = _advanced(state, cadence, result, run.loss_scale)
                    if result.is_skipped:
                        _refuse_too_many(state, result, rules.max_skipped_steps)
                    run.report(state, result)
                    state, end = _after_step(state, cadence, run, rules, is_preempted=result.num_preempted > 0)
                    if end is not None:
                        break
        except ServerError as error:
            if state.step > first_step and not cadence.saves_after(state.step):
                run.save(state)
            if not error.is_preempted:
                raise
            end = "preempted"
    return LoopEnd(state, end)


def _after_step(
    state: TrainerState, cadence: Cadence, run: TrainingRun, rules: StopRules, *, is_preempted: bool = False
) -> tuple[TrainerState, Reason | None]:
    """Validate and save where due. Return the state, and why training ends here; None if it goes on."""
    is_last = cadence.is_last(state.step)
    end: Reason | None = "preempted" if is_preempted and not is_last else None
    if run.validates and cadence.validates_after(state.step) and end is None:
        validated = run.validate(state)
        if validated is None:
            end = "preempted"
        else:
            _refuse_not_finite(state, validated.loss)
            state = after_validation(state, validated, rules.criteria)
            if run.agree_to_stop(is_patience_exhausted(state, rules.patience)):
                end = "no improvement"
    if "stop" in run.callbacks.requests and end is None and not is_last:
        state, end = replace(state, is_stopped=True), "stopped"
    if cadence.saves_after(state.step) or end is not None or "save" in run.callbacks.requests:
        run.callbacks.requests.clear()
        run.save(state)
    return state, end or ("complete" if is_last else None)


def is_patience_exhausted(state: TrainerState, patience: int | None) -> bool:
    """Return whether training should stop early; never with a patience of None."""
    return patience is not None and state.validations_without_improvement >= patience


def _advanced(state: TrainerState, cadence: Cadence, result: StepResult, loss_scale: LossScale | None) -> TrainerState:
    epoch, steps_in_epoch = divmod(state.step + 1, cadence.steps_per_epoch)
    return replace(
        state,
        step=state.step + 1,
        epoch=epoch,
        steps_in_epoch=steps_in_epoch,
        num_targets=state.num_targets + (0 if result.is_skipped else result.num_targets),
        num_tokens=state.num_tokens + result.num_tokens,
        num_skipped_steps=state.num_skipped_steps + result.is_skipped,
        num_without_gradient=state.num_without_gradient + (result.grad_norm == 0),
        num_overflows=state.num_overflows if loss_scale is None else loss_scale.num_overflows,
        loss_scale=None if loss_scale is None else loss_scale.value,
        steps_at_loss_scale=0 if loss_scale is None else loss_scale.num_steps,
    )


def _refuse_too_many(state: TrainerState, result: StepResult, limit: int) -> None:
    if state.num_skipped_steps <= limit:
        return
    if limit:
        policy = f"training.max_skipped_steps is {limit}, and {state.num_skipped_steps - 1} were skipped before it"
        instead = "a higher training.max_skipped_steps allows more"
    else:
        policy = "training.on_nonfinite is stop"
        instead = "training.on_nonfinite=skip skips a bounded number of such steps"
    raise RunFailedError(
        f"step {state.step}: {result.not_finite}; {policy}. The weights were left as before the step. Look at the rows "
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
