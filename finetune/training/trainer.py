"""The trainer: what a recipe calls to get from a model and rows to an adapter in a run's folder."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from finetune.config.compose import resolved_yaml
from finetune.data.batches import BatchPlan, EvaluationLoader, TrainLoader, pad
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.distributed.gradients import LossFunction
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.errors import ConfigError, DataError, FinetuneError, PreemptedError
from finetune.inference.compare import compare_models
from finetune.inference.evaluate import LossSums, sum_losses
from finetune.model.base import checkpoint_gradients, longrope_boundary, max_context
from finetune.model.embedding_noise import add_embedding_noise
from finetune.model.lora import without_adapter
from finetune.model.tokens import agree_on_tokens
from finetune.runs.checkpoint import (
    load_checkpoint,
    load_model,
    newest_valid,
    save_base,
    take_snapshot,
)
from finetune.runs.folder import RunFolder
from finetune.runs.state import Comparison, TrainerState
from finetune.signals import Terminated, leave_signals_to_parent, no_step_is_left, told_to_stop
from finetune.training.forward import choose_collation
from finetune.training.journal import Journal
from finetune.training.keeping import publish_best, say_what_disk_it_takes
from finetune.training.loop import Actions, Cadence, run_loop
from finetune.training.optim import build_optimizer, learning_rate_at
from finetune.training.progress import show_comparison
from finetune.training.resume import at_its_place
from finetune.training.step import StepResult, train_step

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config, LoaderKeys

_log = logging.getLogger(__name__)


class TrainingResults(NamedTuple):
    """Where training ended."""

    state: TrainerState
    loss: float
    """Of the last step that was not skipped, in nats per target token; nan where no step was left to do."""


class Trainer:
    """Trains one model in one run folder, as one process of a world.

    Collective: every rank makes one and calls the same methods in the same order.

    Args:
        runtime: this process's place in the world.
        config: the whole run.
        model: a PEFT model for `training.method=lora`, a transformers model for `full`; on the CPU.
        tokenizer: the model's.
        splits: encoded rows.

    Attributes:
        epoch: the epoch that is being trained, or was last, counted from 0.
        journal: on the main process, what the run writes about itself; None on the others.
        validation_figures: what the last validation measured beside the loss, by name.

    Raises:
        ConfigError: model, rows and configuration do not fit each other.
        CheckpointError: the run's folder cannot be used.
    """

    objective: ClassVar[Literal["sft", "dpo"]] = "sft"

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: EncodedSplits,
    ) -> None:
        self.runtime = runtime
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.splits = splits
        self.epoch = 0
        self.journal: Journal | None = None
        self._data_wait_seconds = 0.0
        self._last_loss = math.nan
        self._last_validation: LossSums | None = None
        self.validation_figures: dict[str, float] = {}
        self._check_objective(config)
        _check_fit(config, model, splits)
        agree_on_tokens(model, tokenizer)
        runtime.agree_set_up()
        rows = [split.fingerprint for _, split in _named(splits) if split is not None]
        runtime.refuse_differences("the data", "/".join(rows))
        self._on_main(self._open_journal, "opening the run's folder")
        if self._has_base_of_its_own and config.resume == "auto":
            self._read_base()
        runtime.place(model)
        if config.training.neftune_alpha:
            add_embedding_noise(model, config.training.neftune_alpha)
        self._collate = choose_collation(runtime, config.training, model)
        if config.training.gradient_checkpointing:
            checkpoint_gradients(model)

    @classmethod
    def _check_objective(cls, config: Config) -> None:
        if config.training.objective != cls.objective:
            raise ConfigError(
                f"training.objective is {config.training.objective} ({config.origin('training.objective')}), but "
                f"{cls.__name__} trains {cls.objective}. Use PreferenceTrainer (recipes/finetune_preferences.py) or "
                f"`finetune train`, or set training.objective={cls.objective}."
            )

    @property
    def global_batch_size(self) -> int:
        """Examples per optimizer step: as configured, else batch_size x the world size that was asked for."""
        asked = self.config.parallel.world_size or self.runtime.environment.world_size
        return self.config.training.global_batch_size or self.config.training.batch_size * asked

    def prepare_dataloaders(self) -> tuple[TrainLoader, EvaluationLoader | None, EvaluationLoader | None]:
        """Deal the rows to batches and ranks. Training and validation are shared out, testing is rank 0's alone.

        Raises:
            DataError: no full global batch, and `training.drop_last` leaves out the rest.
        """
        _log.info("Preparing data loaders...")
        config, runtime, splits = self.config, self.runtime, self.splits
        boundary = longrope_boundary(self.model)
        collate = self._collate
        plan = BatchPlan(
            lengths=splits.train.lengths.tolist(),
            global_batch_size=self.global_batch_size,
            batch_size=config.training.batch_size,
            max_tokens=config.training.max_tokens_per_microbatch,
            boundary=boundary,
            drop_last=config.training.drop_last,
            seed=config.seed,
            tokens=splits.train.tokens if collate is not pad and config.training.packing else None,
            share_prefixes=config.training.share_prefixes,
        )
        if plan.steps_per_epoch == 0:
            raise DataError(
                f"the training split has {len(plan.lengths)} rows, fewer than one global batch of "
                f"{plan.global_batch_size}, and training.drop_last leaves them out. "
                "Lower training.global_batch_size, or drop training.drop_last."
            )

        def evaluation(split: EncodedExamples | None, keys: LoaderKeys, rank: int, of: int) -> EvaluationLoader | None:
            if split is None:
                return None
            return EvaluationLoader(split, keys, boundary=boundary, rank=rank, world_size=of, collate=collate)

        rank, world_size = runtime.rank, runtime.world_size
        train_loader = TrainLoader(
            splits.train, plan, config.training, rank=rank, world_size=world_size, collate=collate
        )
        val_loader = evaluation(splits.validation, config.validation, rank, world_size)
        test_loader = evaluation(splits.test, config.testing, 0, 1)
        for loader in (train_loader, val_loader, test_loader):
            if loader is not None:
                loader.worker_init_fn = leave_signals_to_parent
        _log.info(
            "Training set size: %s, Validation set size: %s, Test set size: %s",
            *(f"{len(split or ()):,}" for split in (splits.train, splits.validation, splits.test)),
        )
        return train_loader, val_loader, test_loader

    def run_training(
        self, train_loader: TrainLoader, val_loader: EvaluationLoader | None = None
    ) -> tuple[TrainingResults, LossSums | None]:
        """Train to the end, from the newest valid checkpoint on if resumed, and publish the best weights in `adapter/`.

        Collective.

        Returns:
            Where training ended, and the last validation: None where nothing was validated.

        Raises:
            RunFailedError: a loss that is not finite, or a disk that refuses.
            PreemptedError: a rank was told to stop; all ranks have left after the same step and its checkpoint.
        """
        config = self.config
        plan = train_loader.plan
        cadence = Cadence(
            steps_per_epoch=plan.steps_per_epoch,
            num_steps=config.training.max_steps or config.training.num_epochs * plan.steps_per_epoch,
            validate_every=config.validation.validate_every,
            save_every=config.checkpoint.save_every,
            save_every_epochs=config.checkpoint.save_every_epochs,
        )
        self._log_batches(plan, cadence)
        optimizer = self.runtime.prepare_optimizer(build_optimizer(self.model, config.optim))
        state = at_its_place(self._resume(optimizer), plan.steps_per_epoch)

        def start(journal: Journal) -> None:
            fresh = self._fresh_state()
            snapshot = take_snapshot(journal.folder, 0, model=self.model, optimizer=optimizer, state=fresh)
            keep, has_best = config.checkpoint.save_total_limit, self.splits.validation is not None
            say_what_disk_it_takes(journal.folder, snapshot, optimizer, cadence, keep=keep, has_best=has_best)
            journal.start_training(state, cadence.num_steps)

        self._on_main(start, "starting the journal")

        _log.info("Starting distributed training..." if self.runtime.context.distributed else "Starting training...")
        self.model.train()
        state, is_told_to_stop = run_loop(
            state,
            cadence,
            Actions(
                batches=lambda epoch, first_step: self._begin_epoch(train_loader, epoch, first_step),
                train=lambda step, share: self._train_step(optimizer, cadence, step, share),
                validate=None if val_loader is None else lambda state: self._validate(val_loader, state),
                save=lambda state: self._save(state, optimizer),
                report=self._report,
                agree_to_stop=self.runtime.broadcast_from_main,
            ),
            patience=config.early_stopping.patience,
            min_delta=config.early_stopping.min_delta,
            max_skipped_steps=config.training.max_skipped_steps if config.training.on_nonfinite == "skip" else 0,
        )
        self.runtime.at("saving", state.step)
        self._on_main(lambda journal: journal.finish_saves(), f"saving step {state.step}")
        if is_told_to_stop:
            raise self._preempted(state)
        self._on_main(lambda journal: self._publish(journal, state, cadence), "publishing the adapter")
        no_step_is_left()
        self.runtime.at("after training", state.step, timed=False)  # what comes now is the script's own affair
        return TrainingResults(state, self._last_loss), self._last_validation

    def run_test(self, test_loader: EvaluationLoader | None) -> Comparison | None:
        """Measure the published weights, and the base, on the test split; print the table. Rank 0 alone.

        No collective inside: all ranks may call it, or rank 0 by itself; the others return None.

        Raises:
            PreemptedError: this process was told to stop; a resumed run measures again.
        """
        self.runtime.at("testing", timed=False)  # nobody waits for rank 0 here
        if self.journal is None or test_loader is None:
            return None
        try:
            if self.runtime.is_told_to_stop:  # in its very last step, and what comes now may take long
                raise Terminated
            return self._test(self.journal, test_loader)
        except (Exception, Terminated, KeyboardInterrupt) as error:
            # A library in the middle of a call can make an error of its own out of the signal's.
            if not (self.runtime.is_told_to_stop or isinstance(error, (Terminated, KeyboardInterrupt))):
                raise
            raise PreemptedError(
                f"stopped in the test phase as asked{_by_whom(self.runtime, alone=True)}; training is complete: "
                "resume=auto measures again"
            ) from error

    def _test(self, journal: Journal, test_loader: EvaluationLoader) -> Comparison:
        _log.info("Starting testing phase...")
        load_model(self.model, journal.folder.adapter)
        comparison = compare_models(self.runtime, self.model, self.tokenizer, test_loader, self.config.testing)
        if not journal.is_closed:  # a script may measure again after its run has ended
            journal.test(comparison)
        show_comparison(comparison)
        _log.info("Training and testing completed successfully!")
        return comparison

    @property
    def _has_base_of_its_own(self) -> bool:
        """An adapter must name its base, and random weights are nowhere else than in the run's folder."""
        return self.config.model.init == "random" and self.config.training.method == "lora"

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

    def _read_base(self) -> None:
        """A resumed run goes on with the random weights it began with, whatever its seed is now. Collective."""
        error: Exception | None = None
        try:
            load_model(without_adapter(self.model), RunFolder(self.config.output_dir).base)
        except Exception as caught:
            error = caught
        self.runtime.agree(error, "reading the base model")

    def _fingerprints(self) -> dict[str, str]:
        splits = {f"data.{name}": split.fingerprint for name, split in _named(self.splits) if split is not None}
        texts = {"config": resolved_yaml(self.config), "chat_template": str(self.tokenizer.chat_template)}
        return splits | {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}

    def _on_main(self, action: Callable[[Any], None], during: str) -> None:
        """Let the main process act while the others wait, and share its failure. Collective."""
        error: Exception | None = None
        if self.runtime.is_main_process:
            try:
                action(self.journal)
            except Exception as caught:
                error = caught
        self.runtime.agree(error, during)

    def _fresh_state(self) -> TrainerState:
        return TrainerState(world_size=self.runtime.world_size, global_batch_size=self.global_batch_size)

    def _resume(self, optimizer: torch.optim.Optimizer) -> TrainerState:
        """The state to start from: that of the newest valid checkpoint, loaded on every rank, or a new one."""
        found: list[str | None] = [None]

        def find(journal: Journal) -> None:
            path = newest_valid(journal.folder) if self.config.resume == "auto" else None
            found[0] = str(path) if path else None

        self._on_main(find, "looking for a checkpoint")
        path = self.runtime.broadcast_from_main(found[0])
        fresh = self._fresh_state()
        if path is None:
            return fresh
        error: Exception | None = None
        state = fresh
        try:
            state = load_checkpoint(Path(path), model=self.model, optimizer=optimizer)
            state = replace(state, world_size=self.runtime.world_size)  # of those that go on with it
        except Exception as caught:
            error = caught
        self.runtime.agree(error, "resuming")
        _log.info("resumed from step=%d", state.step)
        return state

    def _begin_epoch(self, loader: TrainLoader, epoch: int, first_step: int) -> Iterator[list[tuple[int, Microbatch]]]:
        self.epoch = epoch
        steps = loader.steps(epoch, first_step)
        for step in itertools.count(epoch * loader.plan.steps_per_epoch + first_step + 1):
            self.runtime.at("data", step)
            asked = time.monotonic()
            share = next(steps, None)
            self._data_wait_seconds = time.monotonic() - asked
            if share is None:
                return
            yield share

    def _train_step(
        self,
        optimizer: torch.optim.Optimizer,
        cadence: Cadence,
        step: int,
        share: list[tuple[int, Microbatch]],
    ) -> StepResult:
        self.runtime.at("training", step)
        if self.config.training.debug and step <= 2:
            self._log_share(step, share)
        return train_step(
            self.runtime,
            self.model,
            optimizer,
            share,
            step=step,
            learning_rate=learning_rate_at(step, cadence.num_steps, self.config.optim),
            max_grad_norm=self.config.optim.max_grad_norm,
            seed=self.config.seed,
            compute=self.loss_function,
        )

    @property
    def loss_function(self) -> LossFunction:
        """What is summed over a micro-batch's targets and minimised."""
        return summed_cross_entropy

    def measure(self, loader: EvaluationLoader) -> LossSums:
        """This rank's part of a validation; cut short where a rank was told to stop. Collective."""
        return sum_losses(self.runtime, self.model, loader, is_to_stop=self.runtime.is_anyone_told_to_stop)

    def _report(self, state: TrainerState, result: StepResult) -> None:
        if not result.is_skipped:
            self._last_loss = result.loss
        if self.journal is None:
            return
        self.journal.step(state, result, data_wait_seconds=self._data_wait_seconds, rank_seconds=result.rank_seconds)
        try:
            self.journal.settle_saves()
        except FinetuneError as error:
            self.runtime.fail_in_next_step(error, "saving in the background")

    def _validate(self, loader: EvaluationLoader, state: TrainerState) -> float | None:
        """The loss; None if a rank was told to stop meanwhile: what is not whole is not recorded. Collective."""
        runtime = self.runtime
        runtime.at("evaluation", state.step)
        sums = LossSums(*runtime.sum(self.measure(loader)))
        if sums.num_cut_short:
            return None
        self._last_validation = sums
        _log.info("Validation: loss=%.3f ± %.3f", sums.loss, sums.standard_error)
        if self.journal is not None:
            self.journal.validation(state, sums, figures=self.validation_figures)
        return sums.loss

    def _save(self, state: TrainerState, optimizer: torch.optim.Optimizer) -> None:
        self.runtime.at("saving", state.step)

        def save(journal: Journal) -> None:
            _log.info("Saving checkpoint %s at epoch %d", journal.folder.checkpoint(state.step).name, self.epoch)
            snapshot = take_snapshot(journal.folder, state.step, model=self.model, optimizer=optimizer, state=state)
            journal.save(snapshot, best=state.best_step)

        self._on_main(save, f"saving step {state.step}")

    def _preempted(self, state: TrainerState) -> PreemptedError:
        """The error to leave with. Collective."""
        by = _by_whom(self.runtime)
        error = PreemptedError(
            f"stopped at step {state.step} as asked{by}; checkpoint committed: go on with resume=auto"
        )
        error.is_said_by_another = not self.runtime.is_main_process
        return error

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
        if published is not None:
            journal.result |= {"step": state.step, "best_step": published, "best_loss": state.best_loss}

    def _log_batches(self, plan: BatchPlan, cadence: Cadence) -> None:
        shared = self.runtime.world_size
        given = "training.global_batch_size" if self.config.training.global_batch_size else "batch_size x world size"
        _log.info(
            "global batch of %d examples (%s): micro-batches of at most %d over %d process%s; "
            "%d steps an epoch, %d in all",
            plan.global_batch_size,
            given,
            plan.batch_size,
            shared,
            "" if shared == 1 else "es",
            cadence.steps_per_epoch,
            cadence.num_steps,
        )
        if self.config.optim.warmup_steps >= cadence.num_steps:
            _log.warning(
                "optim.warmup_steps is %d and the run has %d steps: the learning rate never reaches %g",
                self.config.optim.warmup_steps,
                cadence.num_steps,
                self.config.optim.learning_rate,
            )

    def _log_share(self, step: int, share: list[tuple[int, Microbatch]]) -> None:
        for index, microbatch in share:
            start = self.tokenizer.decode(microbatch.input_ids.flatten()[:40])
            _log.debug(
                "step %d micro-batch %d: %d rows, %d tokens of which %d are computed, %d targets, on %s; it begins: %r",
                step,
                index,
                microbatch.num_rows,
                microbatch.num_tokens,
                microbatch.num_computed,
                microbatch.num_targets,
                self.runtime.device,
                start,
            )


def _by_whom(runtime: Runtime, *, alone: bool = False) -> str:
    """What told which ranks to stop, in words. Collective, unless `alone`: then only this rank counts."""
    mine = float(told_to_stop() or 0)
    if alone or runtime.world_size == 1:
        numbers = {runtime.rank: mine}
    else:
        all_ranks = range(runtime.world_size)
        numbers = dict(enumerate(runtime.sum([mine if rank == runtime.rank else 0.0 for rank in all_ranks])))
    told = [(rank, Signals(int(number)).name) for rank, number in numbers.items() if number]
    if not told or runtime.world_size == 1:
        return "".join(f" by {name}" for _, name in told)
    ranks = ", ".join(str(rank) for rank, _ in told[:12])
    return f" by {told[0][1]} on rank{'s' if len(told) > 1 else ''} {ranks}"


def _named(splits: EncodedSplits) -> list[tuple[str, EncodedExamples | None]]:
    return [("train", splits.train), ("validation", splits.validation), ("test", splits.test)]


def _check_fit(config: Config, model: Any, splits: EncodedSplits) -> None:
    """Refuse what would train something else than what was asked for.

    Raises:
        ConfigError: names both sides.
    """
    has_adapter = hasattr(model, "peft_config")
    if has_adapter != (config.training.method == "lora"):
        raise ConfigError(
            f"training.method is {config.training.method} ({config.origin('training.method')}) but the model "
            f"that was built {'carries an adapter' if has_adapter else 'has no adapter'}. Use the recipe "
            f"for this method, or set training.method={'lora' if has_adapter else 'full'}."
        )
    build_optimizer(model, config.optim)  # refuses here what it would refuse after the folder was opened
    context = max_context(model)
    for name, split in _named(splits):
        longest = int(split.lengths.max()) if split is not None and len(split) else 0
        if context is not None and longest > context:
            raise ConfigError(
                f"the {name} split has a row of {longest} tokens, but the model's context ends at {context}. "
                f"Set data.max_length={context} (it is {config.data.max_length}, {config.origin('data.max_length')})."
            )
