"""The trainer: from a model and encoded rows to trained weights in a run's folder."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.run_paths import recorded_paths
from finetune.data.batches import EvaluationLoader, TrainLoader
from finetune.data.examples import is_all_here, read_opening
from finetune.distributed.device import refuse_modes
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import BY_DEVICE, LossFunction
from finetune.errors import ConfigError, DataError
from finetune.inference.losses import LossSums, SplitLosses
from finetune.logs import speaks_to_a_person
from finetune.model.base import count_parameters, longrope_boundary
from finetune.runs.model_files import LoadedRun, load_model
from finetune.runs.state import TrainerState
from finetune.runs.verification import newest_valid
from finetune.signals import begin_steps
from finetune.training.cadence import Cadence, StopRules
from finetune.training.hooks import Hooks, refuse_ignored_methods
from finetune.training.loaders import build_loaders, describe_held_out, global_batch_size, log_batches
from finetune.training.loop import finish, run_loop
from finetune.training.objective import Loaders
from finetune.training.optim import build_optimizer, describe_short_schedule, restore_trained_weights
from finetune.training.preemption import preempted_in_test
from finetune.training.reporting.journal import Journal
from finetune.training.setup import CheckedConfig, check_config, set_up
from finetune.training.training_run import TrainingRun
from finetune.training.validation import Criteria

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.inference.scores import Evaluation
    from finetune.training.objective import AnySplits
    from finetune.training.profiling import StepProfiler

_log = logging.getLogger(__name__)


class TrainingResults(NamedTuple):
    """The end of training: its state and its last loss."""

    state: TrainerState
    loss: float
    """Loss of the last step that was not skipped, in nats per target token; nan if no step was left to do."""


class Trainer:
    """Train one model in one run folder, as one process of a world, by the run's `training.objective`.

    Collective: every rank makes one and calls the same methods in the same order.

    Args:
        runtime: this process's place in the world.
        config: the whole run.
        model: a PEFT model for `training.method=lora`, a transformers model for `full`; on the CPU.
        tokenizer: the model's.
        splits: rows that are encoded for the objective, see `encode_for_objective`.
        hooks: the script's own loss, metrics, optimizer and callbacks.
        checked: what `check_config` returned for this configuration, these hooks and this runtime. None: the trainer
            calls it.

    Attributes:
        epoch: the current or last epoch, counted from 0.
        folder: the run's.
        journal: the journal of the run on the main process; None on the others.

    Raises:
        ConfigError: model, rows and configuration do not fit each other.
        CheckpointError: the run's folder cannot be used.
        DataError: the rows do not suit the objective.
    """

    _run: TrainingRun | None = None

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: AnySplits,
        hooks: Hooks | None = None,
        checked: CheckedConfig | None = None,
    ) -> None:
        refuse_ignored_methods(self)
        self._begun = time.monotonic()
        hooks = Hooks() if hooks is None else hooks
        checked = checked or check_config(config, hooks, runtime=runtime)
        self._setup = set_up(runtime, checked, model, tokenizer, splits, hooks)
        self.runtime = runtime
        self.config = self._setup.config
        self.folder = self._setup.folder.path
        self.model = model
        self.tokenizer = tokenizer
        self.splits = self._setup.splits
        self.journal: Journal | None = self._setup.journal

    @property
    def epoch(self) -> int:
        """The current or last epoch, counted from 0."""
        return 0 if self._run is None else self._run.epoch

    @property
    def validation_metrics(self) -> Mapping[str, float]:
        """The metrics of the last validation beside the loss, by name."""
        return {} if self._run is None else self._run.last_metrics

    @property
    def loss_function(self) -> LossFunction:
        """The function that sums the loss over a micro-batch's targets; `train_step` minimises the mean."""
        return self._setup.loss(BY_DEVICE)

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step: as configured, else batch_size x the requested world size."""
        return global_batch_size(self.config, self.runtime.environment.world_size)

    def prepare_dataloaders(self) -> Loaders:
        """Build the loaders of this rank. Rank 0 has all test rows, unless the model is sharded.

        Raises:
            DataError: `drop_last` leaves nothing of a split.
        """
        _log.info("Preparing data loaders...")
        setup = self._setup
        loaders = build_loaders(
            self.runtime,
            setup.memory.resolve(self.config),
            self.splits,
            collate=setup.collate,
            is_packed=setup.is_packed,
            boundary=longrope_boundary(self.model),
        )
        return setup.objective.loaders(setup, Loaders(*loaders))

    def run_training(
        self, train_loader: TrainLoader, val_loader: EvaluationLoader | None = None
    ) -> tuple[TrainingResults, LossSums | None]:
        """Train to the end, from the newest valid checkpoint on if resumed, and publish the best weights in `adapter/`.

        Collective.

        Returns:
            The end of training, and the last validation or None.

        Raises:
            ConfigError: this trainer has trained before, or its run has ended.
            LaunchError: a mode of torch would change the numbers, for example `torch.autocast`.
            RunFailedError: a loss is not finite, the disk fails, or no step has updated the weights.
            PreemptedError: a rank was preempted; all ranks have left after the same step and its checkpoint.
        """
        self._refuse_second_training()
        config, runtime, setup = self.config, self.runtime, self._setup
        rule = train_loader.rule
        cadence = Cadence.of(config, rule.steps_per_epoch)
        log_batches(config, rule, num_steps=cadence.num_steps, world_size=runtime.world_size)
        if why := describe_short_schedule(config.optim, cadence.num_steps):
            _log.warning("%s", why)
        if config.early_stopping.patience is not None:
            from finetune.training.early_end import warn_of_unused_patience

            warn_of_unused_patience(config, cadence)
        optimizer = runtime.placement.prepare_optimizer(build_optimizer(self.model, config.optim))
        state = self._resume(optimizer).renumbered(cadence.steps_per_epoch)
        setup.objective.start(setup, train_loader, state)
        self._begin(train_loader, state, cadence)

        loss_scale = None
        if runtime.precision == "fp16":
            from finetune.training.loss_scale import LossScale

            loss_scale = LossScale.of(state)
        self.model.train()
        with self._profiler(state, cadence) as profilers:
            run = self._run = TrainingRun(
                setup,
                optimizer,
                cadence=cadence,
                train_loader=train_loader,
                val_loader=val_loader,
                step_callbacks=profilers,
                loss_scale=loss_scale,
            )
            begin_steps()
            end = run_loop(state, cadence, run, StopRules.of(config))

        finish(end, run, setup, val_loader)
        return TrainingResults(end.state, run.last_loss), run.last_validation

    def _refuse_second_training(self) -> None:
        """Refuse to train weights further that the steps of this run have changed, and a mode that changes steps."""
        if self._run is not None or self.runtime.is_closed:
            why = "its launch has ended" if self._run is None else "this trainer has trained it already"
            raise ConfigError(
                f"run_training was called, but the run in {self.folder} is over: {why}. A second training would begin "
                "at the weights of the first one and overwrite its record. Launch again and make another trainer, with "
                "resume=auto to continue the run or with another output_dir."
            )
        refuse_modes(trains=True, is_launched=True)

    def _profiler(self, state: TrainerState, cadence: Cadence) -> AbstractContextManager[Sequence[StepProfiler]]:
        num_profiled = self.config.training.profile
        if not num_profiled:
            return nullcontext(())
        from finetune.training.profiling import StepProfiler

        return StepProfiler(
            self.runtime,
            self._setup.folder,
            num_profiled=num_profiled,
            done=state.step,
            num_steps=cadence.num_steps,
            write=None if self.journal is None else self.journal.profile,
        )

    def _begin(self, train_loader: TrainLoader, state: TrainerState, cadence: Cadence) -> None:
        """Show what will be trained, and start the journal. Collective."""
        if self.runtime.is_main_process:
            self._say_what_is_trained(train_loader, state, cadence)
        self._setup.on_main(lambda journal: self._start_journal(journal, state, cadence), "starting the journal")
        if 0 < cadence.num_steps <= state.step:
            _log.info("the run is complete, with step %d of %d: nothing is trained", state.step, cadence.num_steps)
        else:
            _log.info("Starting %straining...", "distributed " * self.runtime.context.distributed)

    def _say_what_is_trained(self, train_loader: TrainLoader, state: TrainerState, cadence: Cadence) -> None:
        if speaks_to_a_person():
            from finetune.training.reporting.summary import show_summary

            counts = {"first_step": state.step, "num_steps": cadence.num_steps}
            show_summary(self.runtime, self.config, self.model, self.splits, train_loader.rule, **counts)
        elif held_out := describe_held_out(self.config, self.splits):
            _log.info("%s", held_out)

    def run_test(self, test_loader: EvaluationLoader | None) -> Evaluation | None:
        """Measure the published weights, and the base, on the rows of `rows_to_test`; print the table.

        Rank 0 measures alone, without a collective. All ranks may call this, or only rank 0; the others return None.
        If the weights are sharded, this is a collective: every rank computes, and rank 0 returns and writes the scores.

        Raises:
            PreemptedError: this process was preempted; a resumed run measures again.
            RunFailedError: the weights are sharded, and another rank has left or waits elsewhere.
        """
        is_alone = self.runtime.placement.shard_size is None
        # Alone, no rank waits for it.
        self.runtime.liveness.enter_phase("testing", timed=not is_alone and test_loader is not None)
        if test_loader is None or (is_alone and self.journal is None):
            return None
        self.runtime.collectives.synchronize("the test phase")
        with preempted_in_test(self.runtime):
            from finetune.inference.evaluation import run_test_phase  # no step needs these modules
            from finetune.inference.forgetting import measure_forgetting
            from finetune.inference.scores import show_evaluation

            _log.info("Starting testing phase...")
            if is_alone:
                load_model(self.model, self._setup.folder.adapter)
            else:
                self.load_published()
            evaluation = run_test_phase(
                self.runtime, self.model, self.tokenizer, test_loader, self.config.testing, self._setup.hooks.metrics
            )
            tested: object = test_loader.dataset
            if tested is self.splits.validation:
                evaluation = replace(evaluation, split="validation")
            self.runtime.liveness.enter_phase("after testing", timed=False)  # the script decides what comes next
            if self.journal is None:
                return None
            max_seconds = (time.monotonic() - self._begun) / 10
            forgetting = measure_forgetting(
                self.runtime,
                LoadedRun(self.model, self.tokenizer),
                # A callback may have changed the current folder.
                recorded_paths(self.folder).get("testing.general_prompts", self.config.testing.general_prompts),
                has_random_base=self.config.model.init == "random",
                max_seconds=max_seconds,
                is_alone=True,
            )
            evaluation = replace(evaluation, forgetting=forgetting)
            if not self.journal.is_closed:  # a script may measure again after its run has ended
                self.journal.test(evaluation)
            show_evaluation(evaluation)
            if self.config.lora.quantize != "none":
                from finetune.training.merging import say_what_merging_changes

                say_what_merging_changes(self._setup, test_loader, evaluation, max_seconds=max_seconds)
            _log.info("Training and testing completed successfully!")
            return evaluation

    def load_published(self) -> None:
        """Load the weights in `adapter/` on rank 0, and on all ranks if the model is sharded. Collective."""
        self._setup.load_published(on_all=False)

    def measure(self, loader: EvaluationLoader) -> SplitLosses:
        """Measure this rank's validation rows; cut short if a rank was preempted. Collective."""
        return self._setup.objective.measure(self._setup, loader)

    def _resume(self, optimizer: torch.optim.Optimizer) -> TrainerState:
        """Load the newest valid checkpoint on every rank and return its state, or a new state if there is none."""
        checkpoint: Path | None = None
        with self.runtime.collectives.failing_together("looking for a checkpoint"):
            if self.journal is not None and self.config.resume == "auto":
                checkpoint = newest_valid(self.journal.folder)
        path = self.runtime.collectives.broadcast_from_main(str(checkpoint) if checkpoint else None)
        if path is None:
            return TrainerState(world_size=self.runtime.world_size, global_batch_size=self.global_batch_size)
        from finetune.runs.checkpoint_loading import load_checkpoint
        from finetune.training.resume import without_other_criteria

        with self.runtime.collectives.failing_together("resuming"):
            state = load_checkpoint(Path(path), model=self.model, optimizer=optimizer)
            restore_trained_weights(optimizer)
        _log.info("resumed from step=%d", state.step)
        state = without_other_criteria(state, Criteria.of(self.config))
        return replace(state, world_size=self.runtime.world_size)  # the processes that continue it

    def _start_journal(self, journal: Journal, state: TrainerState, cadence: Cadence) -> None:
        opening = None
        with suppress(ConfigError, DataError):  # a script may train on rows that its configuration does not name
            reads = self.config.objective.reads
            opening = read_opening(self.config.data, reads) if is_all_here(self.config.data) else None
        if opening is not None:
            journal.record(opening=opening._asdict())
        trained, total = count_parameters(self.model)
        journal.record(parameters={"trained": trained, "all": total})
        journal.start_training(state, cadence.num_steps, owes_validation=cadence.owes_validation(state))
