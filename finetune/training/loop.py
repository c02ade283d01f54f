"""The training loop: epochs, validations, checkpoints, early stopping, agreement on a stop, and the end of a run."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.errors import FinetuneError, NoRowsError, RunFailedError
from finetune.runs.state import TrainerState
from finetune.signals import end_steps
from finetune.training.cadence import Cadence, StopRules
from finetune.training.checks import refuse_no_update
from finetune.training.hooks import EndResult
from finetune.training.preemption import preempted_in_training
from finetune.training.saver import publish_best
from finetune.training.step import StepResult
from finetune.training.training_run import TrainingRun
from finetune.training.validation import after_validation

if TYPE_CHECKING:
    from finetune.data.batches import EvaluationLoader
    from finetune.training.loss_scale import LossScale
    from finetune.training.objective import Setup
    from finetune.training.reporting.journal import Journal

Reason = Literal["complete", "no improvement", "forgot too much", "preempted", "stopped"]


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
        NoRowsError: on every rank, after saving: the rows of the next step cannot be had.
        DataError: on every rank, after saving: a metric or a reward function failed.
        RunFailedError: on every rank, before saving: more than `max_skipped_steps` steps of the run, over all its
            starts, were not finite, or a validation loss was not.
    """
    end = early_stop(state, rules) or ("stopped" if state.is_stopped else None)
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
                        from finetune.training.nonfinite import skip_or_refuse

                        result = skip_or_refuse(state, result, rules.max_skipped_steps, run.rows_of(state.step))
                    run.report(state, result)
                    state, end = _after_step(state, cadence, run, rules, is_preempted=result.num_preempted > 0)
                    if end is not None:
                        break
        except FinetuneError as error:
            if error.saves_first and state.step > first_step and not state.is_due:
                state = _saved(state, run)
            if not (isinstance(error, NoRowsError) and error.is_preempted):
                raise
            end = "preempted"
    return LoopEnd(state, end)


def finish(end: LoopEnd, run: TrainingRun, setup: Setup, val_loader: EvaluationLoader | None) -> None:
    """Finish the saves, publish the best weights, and call `on_end`. Collective.

    Raises:
        PreemptedError: the loop ended because a rank was preempted.
        RunFailedError: a save fails, or no step has updated the weights.
    """
    runtime, step = setup.runtime, end.state.step
    runtime.liveness.enter_phase("saving", step)
    setup.on_main(lambda journal: journal.finish_saves(is_last=True), f"saving step {step}")
    runtime.collectives.agree_on_failure_beside()  # of a save that was in the background in the last step
    if end.reason == "preempted":
        raise preempted_in_training(runtime, step)
    refuse_no_update(end.state, setup.config, setup.objective.no_gradient)
    if end.reason != "complete":
        from finetune.training.early_end import record_early_end

        how = end.reason, run.cadence.num_steps, not math.isnan(run.last_loss)
        setup.on_main(lambda journal: record_early_end(journal, setup.config, end.state, *how), "recording the end")
    setup.on_main(lambda journal: _publish(journal, end.state, run, setup), "publishing the adapter")
    if val_loader is not None:
        setup.objective.after_training(setup, val_loader, step)
    run.callbacks.call("on_end", EndResult(step, end.reason, run.last_loss, setup.folder.path))
    end_steps()
    # The script decides what comes next, and when.
    runtime.liveness.enter_phase("after training", step, timed=False)


def _publish(journal: Journal, state: TrainerState, run: TrainingRun, setup: Setup) -> None:
    journal.end_training()
    keep, has_trained = setup.config.checkpoint.save_total_limit, not math.isnan(run.last_loss)
    published = publish_best(journal.folder, state, setup.tokenizer, keep=keep, has_trained=has_trained)
    if published is None:
        return
    metric, last = setup.config.checkpoint.best_metric, run.last_validation
    loss, value = state.best_loss, state.best_value
    if published != state.best_step:  # the last step: it has metrics of its own if this start validated it
        loss = value = None
        if last is not None and state.validated_step == published:
            loss, value = last.loss, run.last_metrics.get(metric)
    journal.result |= {"step": state.step, "best_step": published, "best_loss": loss}
    if value is not None:
        journal.result |= {"best_metric": metric, "best_value": value}


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
            end = run.agree_to_stop(early_stop(state, rules))
    requests = run.callbacks.requests
    is_stopped = state.is_stopped or ("stop" in requests and not is_last)
    is_due = is_stopped or state.is_due or cadence.saves_after(state.step) or "save" in requests
    state = replace(state, is_stopped=is_stopped, is_due=is_due or end not in (None, "preempted"))
    if state.is_due or end is not None:
        state = _saved(state, run, is_last=is_last)
    return state, end or ("stopped" if state.is_stopped else "complete" if is_last else None)


def _saved(state: TrainerState, run: TrainingRun, *, is_last: bool = False) -> TrainerState:
    """Commit a checkpoint, and a second time if `on_save` asks to stop. Return the state that is in it."""
    run.save(state)
    if "stop" in run.callbacks.requests and not (state.is_stopped or is_last):
        state = replace(state, is_stopped=True)
        run.save(state)
    run.callbacks.requests.clear()
    return state


def early_stop(state: TrainerState, rules: StopRules) -> Reason | None:
    """Return why training should stop after the last validation; None if it goes on."""
    if rules.criteria.has_forgotten(state):
        return "forgot too much"
    is_exhausted = rules.patience is not None and state.validations_without_improvement >= rules.patience
    return "no improvement" if is_exhausted else None


def _advanced(state: TrainerState, cadence: Cadence, result: StepResult, loss_scale: LossScale | None) -> TrainerState:
    epoch, steps_in_epoch = divmod(state.step + 1, cadence.steps_per_epoch)
    return replace(
        state,
        step=state.step + 1,
        epoch=epoch,
        steps_in_epoch=steps_in_epoch,
        is_due=False,
        num_targets=state.num_targets + (0 if result.is_skipped else result.num_targets),
        num_tokens=state.num_tokens + result.num_tokens,
        num_skipped_steps=state.num_skipped_steps + result.is_skipped,
        num_without_gradient=state.num_without_gradient + (result.grad_norm == 0),
        num_overflows=state.num_overflows if loss_scale is None else loss_scale.num_overflows,
        loss_scale=None if loss_scale is None else loss_scale.value,
        steps_at_loss_scale=0 if loss_scale is None else loss_scale.num_steps,
    )


def _refuse_not_finite(state: TrainerState, loss: float) -> None:
    """Raise if the validation loss is not finite, so that no restart begins from these weights."""
    if not math.isfinite(loss):
        raise RunFailedError(
            f"the validation loss after step {state.step} is {loss}: these weights are not saved. Look at the rows of "
            "the validation split, or lower optim.learning_rate, and go on from the last checkpoint: resume=auto "
            "resume.allow=optim"
        )
