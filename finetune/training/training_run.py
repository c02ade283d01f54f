"""The methods that the training loop calls, with the model, the loaders and the journal of one rank."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from finetune.data.batches import EvaluationLoader
from finetune.engine.loss import BY_DEVICE
from finetune.engine.microbatch import Microbatch
from finetune.errors import FinetuneError
from finetune.inference.losses import LossSums
from finetune.logs import waiting
from finetune.runs.checkpoints import Snapshot, take_snapshot
from finetune.runs.state import TrainerState
from finetune.training.cadence import Cadence
from finetune.training.checks import UpdateWatch
from finetune.training.hooks import Callbacks, SaveResult, ValidationResult
from finetune.training.loaders import TrainRows, log_microbatches
from finetune.training.memory.choice import FirstStep
from finetune.training.objective import Setup
from finetune.training.optim import averaged_weights
from finetune.training.saver import log_disk_need
from finetune.training.step import StepResult, StepSettings, train_step
from finetune.training.validation import Validated, answered_rows

if TYPE_CHECKING:
    import torch

    from finetune.distributed.collectives import Value
    from finetune.inference.evaluation import Dialogues
    from finetune.training.keeping import Keeper
    from finetune.training.loss_scale import LossScale
    from finetune.training.nonfinite import StepRows
    from finetune.training.profiling import StepProfiler
    from finetune.training.reporting.journal import Journal

_log = logging.getLogger(__name__)


class TrainingRun:
    """What a run does in its loop: train, validate, save and report.

    Collective: every rank makes one, and the loop calls its methods in the same order on every rank.

    Attributes:
        cadence: when the run validates, saves and ends.
        epoch: the current or last epoch, counted from 0.
        loss_scale: for the next step, in fp16; None in other precisions.
        last_loss: of the last step that was not skipped, in nats per target token; nan before it.
        last_validation: of this start; None before it.
        last_metrics: the metrics of that validation beside the loss, by name.
        callbacks: those of the script.
    """

    def __init__(
        self,
        setup: Setup,
        optimizer: torch.optim.Optimizer,
        *,
        cadence: Cadence,
        train_loader: TrainRows,
        val_loader: EvaluationLoader | None,
        step_callbacks: Sequence[StepProfiler],
        loss_scale: LossScale | None,
    ) -> None:
        self.callbacks = Callbacks(setup.runtime, setup.hooks.callbacks, setup.model)
        self.cadence = cadence
        self.epoch = 0
        self.loss_scale = loss_scale
        self.last_loss = math.nan
        self.last_validation: LossSums | None = None
        self.last_metrics: Mapping[str, float] = {}
        self._setup = setup
        self._runtime = setup.runtime
        self._config = setup.config
        self._compute = setup.loss(BY_DEVICE)
        self._optimizer = optimizer
        self._train_loader = train_loader
        self._val_loader = val_loader
        self._step_callbacks = step_callbacks
        watched = setup.model, setup.config, setup.runtime.fallbacks, setup.objective.no_gradient
        self._update_watch = UpdateWatch(*watched, may_lack_gradient=setup.objective.may_lack_gradient)
        self._graphs = None
        if setup.config.training.graphs is True:
            from finetune.training.captures import captured_microbatches

            self._graphs = captured_microbatches(setup)
        self._first_step: FirstStep | None = None
        if not setup.runtime.placement.needs_equal_microbatches:
            self._first_step = FirstStep(
                runtime=setup.runtime,
                config=setup.config,
                memory=setup.memory,
                loader=train_loader,
                take_step=self._take_step,
                read_again=self._read_again,
                record=setup.record_memory,
            )
        self._data_wait_seconds: float | None = None

    @property
    def validates(self) -> bool:
        """Whether there is a validation split."""
        return self._val_loader is not None

    def batches(self, epoch: int, first_step: int) -> Generator[list[tuple[int, Microbatch]]]:
        """Yield this rank's micro-batches of each step of an epoch, from a step of the epoch on."""
        self.epoch = epoch
        self._batches = self._train_loader.steps(epoch, first_step)
        try:
            for step in itertools.count(epoch * self._train_loader.rule.steps_per_epoch + first_step + 1):
                for callback in self._step_callbacks:
                    callback.before_step(step)
                self._runtime.liveness.enter_phase("data", step)
                started = time.monotonic()
                microbatches = next(self._batches, None)
                waited = time.monotonic() - started
                self._data_wait_seconds = None if self._train_loader.generates_rows else waited
                if microbatches is None:
                    return
                yield microbatches
        finally:
            self._batches = iter(())  # the workers of a loader end with its iterator

    def train(self, step: int, microbatches: list[tuple[int, Microbatch]]) -> StepResult:
        """Train one step."""
        self._runtime.liveness.enter_phase("training", step)
        if self._config.training.debug and step <= 2:
            log_microbatches(step, microbatches, self._setup.tokenizer, self._runtime.device)
        take_step = self._take_step if self._first_step is None else self._first_step.take
        result = take_step(step, microbatches)
        self._first_step = None
        return result._replace(metrics=self._train_loader.metrics_of(result.metrics))

    def rows_of(self, step: int) -> StepRows:
        """Return the rows of a step that is not finite, which can be named."""
        from finetune.training.nonfinite import StepRows

        return StepRows(self._setup, self._train_loader, self._compute, step)

    def validate(self, state: TrainerState) -> Validated | None:
        """Validate and return the metrics. If the run is preempted meanwhile, record nothing and return None."""
        with averaged_weights(self._optimizer), waiting("validation"):
            return self._validate(state)

    def _validate(self, state: TrainerState) -> Validated | None:
        assert self._val_loader is not None
        self._runtime.liveness.enter_phase("evaluation", state.step)
        setup = self._setup
        measured = setup.objective.measure(setup, self._val_loader)
        if self._keeper is not None:
            measured = self._keeper.measure(measured)
        measured = measured.over_ranks(self._runtime)
        sums, metrics = measured.whole, measured.metrics
        if sums.num_cut_short:
            return None
        spread = f" ± {sums.standard_error:.3f}" if sums.num_examples > 1 else " (1 row)"
        _log.info("Validation: loss=%.3f%s", sums.loss, spread)
        if setup.metrics:
            from finetune.inference.validation_answers import measure_answers

            self._runtime.liveness.enter_phase("evaluation", state.step)  # begins the time limit anew
            of_answers = measure_answers(
                self._runtime,
                setup.model,
                setup.tokenizer,
                self._sample,
                metrics=setup.metrics,
                max_new_tokens=self._config.validation.max_new_tokens,
                batch_size=self._config.validation.batch_size,
            )
            if of_answers is None:
                return None
            metrics = {**metrics, **of_answers}
        if metrics:
            _log.info("Validation: %s", ", ".join(f"{name}={mean:.3f}" for name, mean in metrics.items()))
        if measured.subsets:
            losses = (f"loss/{name}={subset.loss:.3f}" for name, subset in measured.subsets.items())
            _log.info("Validation: %s", ", ".join(losses))
            metrics = {**metrics, **measured.subset_metrics()}
        self.last_validation, self.last_metrics = sums, metrics
        if setup.journal is not None:
            setup.journal.validation(state, sums, metrics=metrics)
        self.callbacks.call("on_validation", ValidationResult(state.step, sums.loss, MappingProxyType(dict(metrics))))
        return Validated(sums.loss, metrics)

    def save(self, state: TrainerState) -> None:
        """Commit a checkpoint of the state. `on_save` is called when it is on the disk."""
        with averaged_weights(self._optimizer):
            self._save(state)
        if self.callbacks.listen_to("on_save"):
            journal, collectives = self._setup.journal, self._runtime.collectives
            with collectives.failing_together(f"saving step {state.step}"):
                is_saved = journal is not None and journal.finish_saves(is_last=False)
            if collectives.broadcast_from_main(is_saved):
                self.callbacks.call("on_save", SaveResult(state.step, self._setup.folder.checkpoint(state.step)))

    def _save(self, state: TrainerState) -> None:
        runtime, folder = self._runtime, self._setup.folder
        runtime.liveness.enter_phase("saving", state.step)
        _log.info("Saving checkpoint %s at epoch %d", folder.checkpoint(state.step).name, self.epoch)
        during = f"saving step {state.step}"
        if not runtime.placement.shards_trained:
            self._setup.on_main(lambda journal: journal.save(self._snapshot(state), best=state.best_step), during)
            return
        with runtime.collectives.failing_together(during):
            snapshot = self._snapshot(state)
            snapshot.refuse_not_finite()
        with (
            runtime.collectives.failing_together(during),
            runtime.placement.full_tensors(snapshot.tensors) as read_full,
        ):
            if self._setup.journal is not None:
                self._setup.journal.save(snapshot.read_by(read_full), best=state.best_step)

    def _snapshot(self, state: TrainerState) -> Snapshot:
        setup = self._setup
        return take_snapshot(setup.folder, model=setup.model, optimizer=self._optimizer, state=state)

    def report(self, state: TrainerState, result: StepResult) -> None:
        """Record the step, refuse weights that do not train, and call the callbacks."""
        if not result.is_skipped:
            if math.isnan(self.last_loss):  # the optimizer has its state from now on
                self._setup.on_main(partial(self._log_disk_need, state), "predicting the size of checkpoints")
            self.last_loss = result.loss
        journal = self._setup.journal
        if journal is not None:
            journal.step(state, result, data_wait_seconds=self._data_wait_seconds)
            try:
                journal.collect_saves()
            except FinetuneError as error:
                self._runtime.collectives.fail_in_next_step(error, "saving in the background")
        # Schedule-free RAdam takes steps of rate 0 at first.
        is_silent = all(group.get("scheduled_lr") == 0 for group in self._optimizer.param_groups)
        self._update_watch.after_step(state, result, is_silent=is_silent)
        for callback in self._step_callbacks:
            callback.on_step(result)
        self.callbacks.call("on_step", result._replace(metrics=MappingProxyType(dict(result.metrics))))

    def _log_disk_need(self, state: TrainerState, journal: Journal) -> None:
        keep, has_best = self._config.checkpoint.save_total_limit, self._setup.splits.validation is not None
        log_disk_need(journal.folder, self._snapshot(state), self.cadence, keep=keep, has_best=has_best)

    def agree_to_stop(self, reason: Value) -> Value:
        """Return rank 0's argument on every rank."""
        return self._runtime.collectives.broadcast_from_main(reason)

    def _take_step(
        self, step: int, microbatches: list[tuple[int, Microbatch]], *, may_be_too_large: bool = False
    ) -> StepResult:
        """Take a step, in fp16 with the loss scale."""

        def take(loss_scale: int) -> StepResult:
            return train_step(
                self._runtime,
                self._setup.model,
                self._optimizer,
                microbatches,
                StepSettings.of(self._config, step, self.cadence.num_steps, loss_scale=loss_scale),
                compute=self._compute,
                may_be_too_large=may_be_too_large,
                graphs=self._graphs,
            )

        if self.loss_scale is None:
            return take(1)
        result, self.loss_scale = self.loss_scale.take_step(take)
        return result

    def _read_again(self, epoch: int, place: int) -> list[tuple[int, Microbatch]]:
        """Read an epoch again from a step whose micro-batches were halved. Return the micro-batches of this step."""
        self._batches = self._train_loader.steps(epoch, place)
        return next(self._batches)

    @cached_property
    def _keeper(self) -> Keeper | None:
        """Measures what is left of the base in each validation, if a key asks for it."""
        if self._setup.base_answers is None and self._config.early_stopping.max_forgotten is None:
            return None
        from finetune.training.keeping import Keeper

        return Keeper(self._setup)

    @cached_property
    def _sample(self) -> Dialogues:
        """The rows that validations answer."""
        from finetune.inference.evaluation import Dialogues

        assert self._setup.splits.validation is not None
        return Dialogues(answered_rows(self._config, self._setup.splits.validation), self._setup.tokenizer)
