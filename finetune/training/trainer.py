"""The trainer: from a model and encoded rows to trained weights in a run's folder."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from finetune.config.compose import resolved_yaml
from finetune.data.batches import Collate, EvaluationLoader, TrainLoader
from finetune.data.encoded import EncodedSplits
from finetune.data.shares import shuffled
from finetune.distributed.gradients import LossFunction
from finetune.distributed.precision import convert_weights
from finetune.distributed.runtime import Runtime
from finetune.engine.fused import is_fused
from finetune.engine.loss import BY_DEVICE, Choices, summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.errors import FinetuneError, RunFailedError
from finetune.fallbacks import Fallback
from finetune.inference.evaluation import Dialogues, measure_answers, run_test_phase
from finetune.inference.losses import LossSums, sum_losses
from finetune.inference.scores import Comparison, show_comparison
from finetune.model.base import checkpoint_gradients, longrope_boundary
from finetune.model.lora import without_adapter
from finetune.model.tokens import set_stop_and_pad_ids
from finetune.model.training_mode import add_embedding_noise
from finetune.runs.checkpoints import load_checkpoint, save_base, take_snapshot
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import load_model
from finetune.runs.state import TrainerState
from finetune.runs.verification import newest_valid
from finetune.signals import no_step_is_left
from finetune.training.fit import check_fit, named_splits
from finetune.training.forward import agree_on_forward
from finetune.training.journal import Journal
from finetune.training.keeping import log_disk_need, publish_best
from finetune.training.loaders import (
    build_loaders,
    global_batch_size,
    log_batches,
    log_cut_examples,
    log_share,
    log_traffic,
)
from finetune.training.loop import Actions, Cadence, run_loop
from finetune.training.memory_choice import MemoryChoice, agree_on_memory, choose, masks_follow_the_cut, shards_of
from finetune.training.memory_need import copy_without_data
from finetune.training.optim import build_optimizer, learning_rate_at, warn_of_long_warmup
from finetune.training.preemption import preempted_in_test, preempted_in_training
from finetune.training.profiling import StepProfiler
from finetune.training.resume import at_its_place
from finetune.training.step import StepResult, StepTooLargeError, train_step
from finetune.training.summary import show_summary
from finetune.training.validating import Criteria, Validated, check_metrics, refuse_rows_without_answers, under_criteria

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_log = logging.getLogger(__name__)
_NOT_IN_BACKGROUND = Fallback(
    what="checkpoint.background",
    wanted="written in the background",
    used="written while training waits",
    why="all ranks gather the sharded weights, tensor by tensor, for rank 0 to write",
)


class TrainingResults(NamedTuple):
    """The end of training: its state and its last loss."""

    state: TrainerState
    loss: float
    """Loss of the last step that was not skipped, in nats per target token; nan if no step was left to do."""


class Trainer:
    """Train one model in one run folder, as one process of a world.

    Collective: every rank makes one and calls the same methods in the same order.

    Args:
        runtime: this process's place in the world.
        config: the whole run.
        model: a PEFT model for `training.method=lora`, a transformers model for `full`; on the CPU.
        tokenizer: the model's.
        splits: encoded rows.

    Attributes:
        epoch: the current or last epoch, counted from 0.
        journal: the journal of the run on the main process; None on the others.
        validation_figures: figures of the last validation beside the loss, by name.

    Raises:
        ConfigError: model, rows and configuration do not fit each other.
        CheckpointError: the run's folder cannot be used.
    """

    objectives: ClassVar[tuple[str, ...]] = ("sft",)

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: EncodedSplits,
    ) -> None:
        self.runtime = runtime
        self.config = config = runtime.settle(config)
        self.model = model
        self.tokenizer = tokenizer
        self.splits = splits
        self.epoch = 0
        self.journal: Journal | None = None
        self.validation_figures: dict[str, float] = {}
        self._is_memory_tried = False
        self._data_wait_seconds = 0.0
        self._last_loss = math.nan
        self._last_validation: LossSums | None = None
        check_fit(config, model, splits, trainer=type(self).__name__, objectives=self.objectives)
        self._metrics = check_metrics(config, self.figures_of(config))
        if splits.validation is not None:
            refuse_rows_without_answers(config, splits.validation.kind)
        set_stop_and_pad_ids(model, tokenizer)
        runtime.agree_set_up()
        runtime.refuse_differences("the data", "/".join(split.fingerprint for split in named_splits(splits).values()))
        runtime.fit_threads(model)
        if runtime.shards_trained and config.checkpoint.background:
            if config.origin("checkpoint.background") == "default":
                _log.info("checkpoints are %s: %s", _NOT_IN_BACKGROUND.used, _NOT_IN_BACKGROUND.why)
            else:
                runtime.fallbacks.take(_NOT_IN_BACKGROUND)
        self._on_main(self._open_journal, "opening the run's folder")
        if self._has_base_of_its_own and config.resume == "auto":
            # A resumed run keeps the random weights it began with, whatever its seed is now.
            with runtime.failing_together("reading the base model"):
                load_model(without_adapter(model), RunFolder(config.output_dir).base)
        if runtime.shard_size is None:
            runtime.place(model)
        if config.training.neftune_alpha:
            add_embedding_noise(model, config.training.neftune_alpha)
        forward = agree_on_forward(runtime, config.training, model)
        self._is_packed = forward.why_not_engine is None
        self._collate = self.collation_of(config, forward.collate)
        self._measured = model
        """The model whose memory is measured, on copies of it: a sharded one cannot be copied."""
        if runtime.shard_size is not None:
            self._measured = copy_without_data(model)
            convert_weights(self._measured, runtime.precision)
            runtime.shard(model)
        recorded = None if self.journal is None else self.journal.recorded_memory()
        self._memory = agree_on_memory(runtime, config, recorded, self._choose_by_memory)
        if self._memory.gradient_checkpointing:
            checkpoint_gradients(model)
        self._on_main(lambda journal: journal.record_memory(self._memory), "recording the choice by memory")

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step: as configured, else batch_size x the requested world size."""
        return global_batch_size(self.config, self.runtime.environment.world_size)

    @property
    def loss_function(self) -> LossFunction:
        """The sum of the loss over a micro-batch's targets; `train_step` minimises the mean."""
        return self.loss_of(self.config)

    @staticmethod
    def loss_of(config: Config, choices: Choices = BY_DEVICE) -> LossFunction:
        """Make the `loss_function` of a configuration, for `finetune plan` too.

        Args:
            config: the whole run.
            choices: how packed rows are computed.
        """
        del config  # this loss has no settings
        return partial(summed_cross_entropy, choices=choices)

    @staticmethod
    def figures_of(config: Config) -> tuple[str, ...]:
        """Return the names of the figures that a validation measures beside loss and `validation.metrics`."""
        del config  # this loss has none
        return ()

    @staticmethod
    def collation_of(config: Config, collate: Collate) -> Any:
        """Return the collate function for the loaders, given the one for plain rows."""
        del config  # rows are plain here
        return collate

    def prepare_dataloaders(self) -> tuple[TrainLoader, EvaluationLoader | None, EvaluationLoader | None]:
        """Build the loaders. The rows are shared among the ranks; but rank 0 has all test rows unless it has shards.

        Raises:
            DataError: `drop_last` leaves nothing of a split.
        """
        _log.info("Preparing data loaders...")
        boundary = longrope_boundary(self.model)
        settled = self._memory.settle(self.config)
        return build_loaders(
            self.runtime,
            settled,
            self.splits,
            collate=self._collate,
            is_packed=self._is_packed,
            boundary=boundary,
        )

    def run_training(
        self, train_loader: TrainLoader, val_loader: EvaluationLoader | None = None
    ) -> tuple[TrainingResults, LossSums | None]:
        """Train to the end, from the newest valid checkpoint on if resumed, and publish the best weights in `adapter/`.

        Collective.

        Returns:
            The end of training, and the last validation or None.

        Raises:
            RunFailedError: a loss is not finite, or the disk fails.
            PreemptedError: a rank was told to stop; all ranks have left after the same step and its checkpoint.
        """
        config, runtime = self.config, self.runtime
        cadence = Cadence.of(config, train_loader.rule.steps_per_epoch)
        log_batches(config, train_loader.rule, num_steps=cadence.num_steps, world_size=runtime.world_size)
        if runtime.received_bytes:
            log_traffic(train_loader.rule, received_bytes=runtime.received_bytes, world_size=runtime.world_size)
        warn_of_long_warmup(config.optim, cadence.num_steps)
        optimizer = runtime.prepare_optimizer(build_optimizer(self.model, config.optim))
        state = at_its_place(self._resume(optimizer), cadence.steps_per_epoch)
        if runtime.is_main_process:
            counts = {"first_step": state.step, "num_steps": cadence.num_steps}
            show_summary(runtime, config, self.model, self.splits, train_loader.rule, **counts)
        self._on_main(lambda journal: self._start_journal(journal, state, cadence, optimizer), "starting the journal")

        _log.info("Starting distributed training..." if runtime.context.distributed else "Starting training...")
        self.model.train()
        wanted, folder = config.training.profile, RunFolder(config.output_dir)
        with StepProfiler(runtime, folder, wanted=wanted, done=state.step, num_steps=cadence.num_steps) as profiler:
            end = run_loop(
                state,
                cadence,
                Actions(
                    batches=lambda epoch, first_step: self._begin_epoch(train_loader, profiler, epoch, first_step),
                    train=lambda step, share: self._train_step(optimizer, cadence, train_loader, step, share),
                    validate=None if val_loader is None else lambda state: self._validate(val_loader, state),
                    save=lambda state: self._save(state, optimizer),
                    report=lambda state, result: self._report(profiler, state, result),
                    agree_to_stop=runtime.broadcast_from_main,
                ),
                patience=config.early_stopping.patience,
                criteria=Criteria.of(config),
                max_skipped_steps=config.training.max_skipped_steps if config.training.on_nonfinite == "skip" else 0,
            )
        runtime.at("saving", end.state.step)
        self._on_main(lambda journal: journal.finish_saves(), f"saving step {end.state.step}")
        runtime.agree_on_failure_beside()  # of a save that was in the background in the last step
        if end.is_told_to_stop:
            raise preempted_in_training(runtime, end.state.step)
        self._on_main(lambda journal: self._publish(journal, end.state, cadence), "publishing the adapter")
        no_step_is_left()
        runtime.at("after training", end.state.step, timed=False)  # the script decides what comes next
        return TrainingResults(end.state, self._last_loss), self._last_validation

    def run_test(self, test_loader: EvaluationLoader | None) -> Comparison | None:
        """Measure the published weights, and the base, on the test split; print the table.

        Rank 0 measures alone, without a collective: all ranks may call it, or rank 0 by itself; the others return None.
        Collective if the weights are sharded: every rank; rank 0 returns and writes the figures.

        Raises:
            PreemptedError: this process was told to stop; a resumed run measures again.
            RunFailedError: the weights are sharded, and another rank has left or waits elsewhere.
        """
        is_alone = self.runtime.shard_size is None
        self.runtime.at("testing", timed=not is_alone and test_loader is not None)  # alone, no rank waits for it
        if test_loader is None or (is_alone and self.journal is None):
            return None
        self.runtime.meet("the test phase")
        with preempted_in_test(self.runtime):
            _log.info("Starting testing phase...")
            with nullcontext() if is_alone else self.runtime.failing_together("reading the published weights"):
                load_model(self.model, RunFolder(self.config.output_dir).adapter)
            comparison = run_test_phase(self.runtime, self.model, self.tokenizer, test_loader, self.config.testing)
            self.runtime.at("after testing", timed=False)  # the script decides what comes next
            if self.journal is None:
                return None
            if not self.journal.is_closed:  # a script may measure again after its run has ended
                self.journal.test(comparison)
            show_comparison(comparison)
            _log.info("Training and testing completed successfully!")
            return comparison

    def measure(self, loader: EvaluationLoader) -> LossSums:
        """Measure this rank's rows of the validation split; cut short if a rank was told to stop. Collective."""
        return sum_losses(self.runtime, self.model, loader, is_to_stop=self.runtime.is_anyone_told_to_stop)

    @property
    def _has_base_of_its_own(self) -> bool:
        """True if the base is random, so that the run's folder must hold it for the adapter."""
        return self.config.model.init == "random" and self.config.training.method == "lora"

    def _choose_by_memory(self, room: int, is_cut_settled: bool) -> MemoryChoice:
        return choose(
            self.config,
            self._measured,
            longest=int(self.splits.train.lengths.max()),
            collate=self._collate,
            loss_of=partial(self.loss_of, self.config),
            kind=self.runtime.device.type,
            is_bf16=self.runtime.precision == "bf16",
            is_fused=is_fused(),
            world_size=self.runtime.world_size,
            room=room,
            shards=shards_of(self.config.parallel, self.runtime.world_size),
            is_cut_settled=is_cut_settled,
        )

    def _on_main(self, action: Callable[[Any], None], during: str) -> None:
        """Let the main process act while the others wait, and share its failure. Collective."""
        with self.runtime.failing_together(during):
            if self.runtime.is_main_process:
                action(self.journal)

    def _open_journal(self, _: None) -> None:
        environment = self.runtime.environment
        self.journal = Journal(
            self.config,
            self.runtime.fallbacks,
            world={
                "world_size": self.runtime.world_size,
                "processes_started": environment.world_size,
                "launcher": environment.launcher,
                "backend": self.runtime.backend,
                "threads": self.runtime.threads,
                "sharding": "none" if self.runtime.shard_size is None else self.config.parallel.sharding,
                "shard_size": self.runtime.shard_size,
                "device": self.runtime.device.type,
                "precision": self.runtime.precision,
            },
            global_batch={
                "global_batch_size": self.global_batch_size,
                "batch_size": self.config.training.batch_size,
                "world_size_asked": self.config.parallel.world_size or environment.world_size,
            },
            fingerprints=self._fingerprints(),
        )
        self.runtime.on_close(self.journal.close)
        if self._has_base_of_its_own:
            save_base(self.journal.folder, without_adapter(self.model), self.tokenizer)

    def _fingerprints(self) -> dict[str, str]:
        rows = {f"data.{name}": split.fingerprint for name, split in named_splits(self.splits).items()}
        texts = {"config": resolved_yaml(self.config), "chat_template": str(self.tokenizer.chat_template)}
        return rows | {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}

    def _fresh_state(self) -> TrainerState:
        return TrainerState(world_size=self.runtime.world_size, global_batch_size=self.global_batch_size)

    def _resume(self, optimizer: torch.optim.Optimizer) -> TrainerState:
        """Load the newest valid checkpoint on every rank and return its state, or a new state if there is none."""
        found: Path | None = None
        with self.runtime.failing_together("looking for a checkpoint"):
            if self.journal is not None and self.config.resume == "auto":
                found = newest_valid(self.journal.folder)
        path = self.runtime.broadcast_from_main(str(found) if found else None)
        state = self._fresh_state()
        if path is None:
            return state
        with self.runtime.failing_together("resuming"):
            state = load_checkpoint(Path(path), model=self.model, optimizer=optimizer)
        _log.info("resumed from step=%d", state.step)
        state = under_criteria(state, Criteria.of(self.config))
        return replace(state, world_size=self.runtime.world_size)  # the processes that continue it

    def _start_journal(
        self, journal: Journal, state: TrainerState, cadence: Cadence, optimizer: torch.optim.Optimizer
    ) -> None:
        snapshot = take_snapshot(journal.folder, 0, model=self.model, optimizer=optimizer, state=self._fresh_state())
        keep, has_best = self.config.checkpoint.save_total_limit, self.splits.validation is not None
        log_disk_need(journal.folder, snapshot, optimizer, cadence, keep=keep, has_best=has_best)
        journal.start_training(state, cadence.num_steps)

    def _begin_epoch(
        self, loader: TrainLoader, profiler: StepProfiler, epoch: int, first_step: int
    ) -> Iterator[list[tuple[int, Microbatch]]]:
        self.epoch = epoch
        self._shares = loader.steps(epoch, first_step)
        try:
            for step in itertools.count(epoch * loader.rule.steps_per_epoch + first_step + 1):
                profiler.before(step)
                self.runtime.at("data", step)
                asked = time.monotonic()
                share = next(self._shares, None)
                self._data_wait_seconds = time.monotonic() - asked
                if share is None:
                    return
                yield share
        finally:
            self._shares = iter(())  # the workers of a loader end with its iterator

    def _train_step(
        self,
        optimizer: torch.optim.Optimizer,
        cadence: Cadence,
        loader: TrainLoader,
        step: int,
        share: list[tuple[int, Microbatch]],
    ) -> StepResult:
        self.runtime.at("training", step)
        if self.config.training.debug and step <= 2:
            log_share(step, share, self.tokenizer, self.runtime.device)
        take = partial(
            train_step,
            self.runtime,
            self.model,
            optimizer,
            step=step,
            learning_rate=learning_rate_at(step, cadence.num_steps, self.config.optim),
            max_grad_norm=self.config.optim.max_grad_norm,
            seed=self.config.seed,
            compute=self.loss_function,
        )
        while not (self._is_memory_tried or self.runtime.needs_even_shares):
            try:
                result = take(share, may_be_too_large=True)
            except StepTooLargeError as too_large:
                error = too_large.error
            else:
                self._is_memory_tried = True
                return result
            share = self._cut_smaller(loader, step, error)
        return take(share)

    def _cut_smaller(
        self, loader: TrainLoader, step: int, error: RunFailedError | None
    ) -> list[tuple[int, Microbatch]]:
        """Halve the micro-batches of the run, beginning with this step, and return this rank's share of it. Collective.

        Raises:
            ConfigError: the size of micro-batches is part of the recipe, and the run is strict.
            RunFailedError: the rank's own error, where micro-batches cannot be smaller.
        """
        epoch, place = divmod(step - 1, loader.rule.steps_per_epoch)
        smaller = loader.rule.halved(epoch, place)
        if smaller is None or smaller.max_tokens is None:
            self.runtime.agree(error, f"training, step {step}")
            raise AssertionError("a rank ran out of memory")
        self._memory = self._memory.after_out_of_memory(smaller.max_tokens, step)
        if masks_follow_the_cut(self.config):
            used = f"at most {smaller.max_tokens} tokens, so that other tokens are dropped"
            why = f"memory ran out in step {step}"
            fallback = Fallback(what="training.max_tokens_per_microbatch", wanted="larger", used=used, why=why)
            self.runtime.fallbacks.take(fallback)
        else:
            _log.warning("out of memory in step %d, which is tried again: %s", step, self._memory)
        self._on_main(lambda journal: journal.record_memory(self._memory), "recording the choice by memory")
        log_cut_examples(smaller)
        loader.rule = smaller
        self._shares = loader.steps(epoch, place)
        return next(self._shares)

    def _report(self, profiler: StepProfiler, state: TrainerState, result: StepResult) -> None:
        if not result.is_skipped:
            self._last_loss = result.loss
        if self.journal is not None:
            waits, ranks = self._data_wait_seconds, result.rank_seconds
            self.journal.step(state, result, data_wait_seconds=waits, rank_seconds=ranks)
            try:
                self.journal.settle_saves()
            except FinetuneError as error:
                self.runtime.fail_in_next_step(error, "saving in the background")
        # A run that is told to stop has no time to write a profile; the resumed run makes one of its own.
        profile = None if result.num_told_to_stop else profiler.after(state.step)
        if profile is not None and self.journal is not None:
            self.journal.profile(profile)

    def _validate(self, loader: EvaluationLoader, state: TrainerState) -> Validated | None:
        """Validate and return the figures; None, and nothing is recorded, if a rank was told to stop. Collective."""
        self.runtime.at("evaluation", state.step)
        sums = LossSums(*self.runtime.sum(self.measure(loader)))
        if sums.num_cut_short:
            return None
        self._last_validation = sums
        _log.info("Validation: loss=%.3f ± %.3f", sums.loss, sums.standard_error)
        if self._metrics and not self._measure_answers(state):
            return None
        if self.journal is not None:
            self.journal.validation(state, sums, figures=self.validation_figures)
        return Validated(sums.loss, self.validation_figures)

    def _measure_answers(self, state: TrainerState) -> bool:
        """Measure generated answers on the sample of the validation split; False if told to stop. Collective."""
        self.runtime.at("evaluation", state.step)  # begins the time limit anew
        section = self.config.validation
        found = measure_answers(
            self.runtime,
            self.model,
            self.tokenizer,
            self._sample,
            metrics=self._metrics,
            max_new_tokens=section.max_new_tokens,
            batch_size=section.batch_size,
        )
        if found is None:
            return False
        self.validation_figures = found
        _log.info("Validation: %s", ", ".join(f"{name}={mean:.3f}" for name, mean in found.items()))
        return True

    @cached_property
    def _sample(self) -> Dialogues:
        """The rows that validations answer: a function of the split and its seed alone."""
        rows, config = self.splits.validation, self.config
        assert rows is not None
        answered = rows.has_answer.nonzero()[:, 0]
        chosen = sorted(shuffled(len(answered), config.data.split_seed)[: config.validation.num_samples])
        return Dialogues(rows.select(answered[chosen]), self.tokenizer)

    def _save(self, state: TrainerState, optimizer: torch.optim.Optimizer) -> None:
        runtime, folder = self.runtime, RunFolder(self.config.output_dir)
        runtime.at("saving", state.step)
        _log.info("Saving checkpoint %s at epoch %d", folder.checkpoint(state.step).name, self.epoch)
        take = partial(take_snapshot, folder, state.step, model=self.model, optimizer=optimizer, state=state)
        during = f"saving step {state.step}"
        if not runtime.shards_trained:
            self._on_main(lambda journal: journal.save(take(), best=state.best_step), during)
            return
        with runtime.failing_together(during):
            snapshot = take()
            snapshot.refuse_not_finite()
        with runtime.failing_together(during), runtime.gathering(snapshot.tensors) as whole:
            if self.journal is not None:
                self.journal.save(snapshot.read_by(whole), best=state.best_step)

    def _publish(self, journal: Journal, state: TrainerState, cadence: Cadence) -> None:
        journal.end_training()
        published = publish_best(
            journal.folder,
            state,
            cadence,
            self.tokenizer,
            keep=self.config.checkpoint.save_total_limit,
            has_trained=not math.isnan(self._last_loss),
        )
        if published is None:
            return
        metric, last = self.config.checkpoint.best_metric, self._last_validation
        loss, value = state.best_loss, state.best_value
        if published != state.best_step:  # the last step: it has figures of its own if this start validated it
            loss = value = None
            if last is not None and state.validated_step == published:
                loss, value = last.loss, self.validation_figures.get(metric)
        journal.result |= {"step": state.step, "best_step": published, "best_loss": loss}
        if value is not None:
            journal.result |= {"best_metric": metric, "best_value": value}
