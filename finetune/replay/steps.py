"""Compute recorded steps of a run again, in one process and in a temporary folder.

A replay starts at the start of the run or at a checkpoint that was kept.
"""

from __future__ import annotations

import shlex
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from finetune.config.run_config import load_run_config
from finetune.config.schema import Config, ParallelSection
from finetune.config.yaml_reader import COMMAND_LINE
from finetune.data.batches import TrainLoader
from finetune.distributed.launch import launch
from finetune.errors import CheckpointError, ConfigError
from finetune.model.lora import without_adapter
from finetune.runs.checkpoint_loading import load_checkpoint
from finetune.runs.comparison import loss_difference
from finetune.runs.model_files import load_model
from finetune.runs.record import read_run_record
from finetune.runs.recorded_run import RecordedRun, finite, whole
from finetune.runs.state import TrainerState
from finetune.runs.verification import whole_checkpoints
from finetune.training.cadence import Cadence
from finetune.training.loss_scale import LossScale
from finetune.training.memory.choice import MemoryChoice
from finetune.training.optim import build_optimizer, restore_trained_weights
from finetune.training.rewards.rollouts import RolloutLoader
from finetune.training.step import StepResult, StepSettings, train_step
from finetune.training.train import build_trainer
from finetune.training.trainer import Trainer
from finetune.training.validation import LOSS
from finetune.units import counted

LOSS_BOUNDS = {"fp32": 1e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""The largest `loss_difference` of equal losses: promise 1, and for 16 bits the spacing of the type's numbers at 1."""
_NOT_IN_CONFIG = {"loss", "optimizer", "adapter"}
"""Parts of a run that a script may give and that decide what a step computes."""
_ON_RECORD = ("reward.functions", "rollout.tools", "rollout.environment")
"""Keys that name functions. A run records their results, so a replay does not call them."""
_NOT_IN_STEPS = ("validation.", "early_stopping.", "checkpoint.best_metric")
"""How the keys begin that no replayed step reads."""
StepPlan = Mapping[int, Sequence[int]]
"""Steps in ascending order, by the step after which to start; 0 is the start of the run."""


class ReplayedStep(NamedTuple):
    """A step that was computed again. Losses are in nats per target token."""

    step: int
    recorded: float
    computed: float


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of `replay_losses`."""

    steps: tuple[ReplayedStep, ...]
    """The chosen steps, ascending."""
    bound: float
    """The largest difference of two losses that counts as equal, see `LOSS_BOUNDS`."""
    precision: str
    """The precision of both computations."""
    device: str
    """The type of the device that computed the steps again."""
    notes: tuple[str, ...]
    """How the replay differs from what was asked for, and this machine from the run's, one sentence each."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for certificate.json."""
        steps = [step._asdict() for step in self.steps]
        return {"steps": steps, "bound": self.bound, "precision": self.precision, "device": self.device}

    @property
    def mismatches(self) -> list[str]:
        """Return a sentence for each step in which the losses differ by more than the bound."""
        return [
            f"step {step}: the loss is {computed!r} again, but {recorded!r} was recorded; expected a difference of at "
            f"most {self.bound:.3g} x max(1, loss)"
            for step, recorded, computed in self.steps
            if not loss_difference(recorded, computed) <= self.bound  # true if the loss is NaN
        ]


@dataclass(frozen=True)
class OpenReplay:
    """A run that is set up to compute its steps again."""

    run: RecordedRun
    trainer: Trainer
    loader: TrainLoader

    def choose_steps(self, recorded: Iterable[int], num_steps: int, *, first_start: int = 0) -> StepPlan:
        """Choose at most `num_steps` recorded steps: the first after each start, then the second after each, and so on.

        A start is the start of the run or a kept checkpoint. Those before step `first_start` are passed over.
        """
        kept = (int(path.name.removeprefix("step-")) for path in whole_checkpoints(self.run.folder))
        starts = [start for start in sorted([0, *kept]) if start >= first_start]
        after_start: dict[int, list[int]] = {start: [] for start in starts}
        for step in sorted(step for step in recorded if starts and step > starts[0]):
            after_start[starts[bisect_left(starts, step) - 1]].append(step)
        in_turn = [step for steps in zip_longest(*after_start.values()) for step in steps if step is not None]
        chosen = set(in_turn[:num_steps])
        plan = {start: [step for step in steps if step in chosen] for start, steps in after_start.items()}
        return {start: steps for start, steps in plan.items() if steps}

    def compute(self, plan: StepPlan) -> Iterator[tuple[int, StepResult]]:
        """Train from each start up to its last step in the plan. Yield every step on the way with its result.

        Raises:
            CheckpointError: a start has no checkpoint, or the checkpoint does not fit the configuration.
        """
        trainer = self.trainer
        optimizer = trainer.runtime.placement.prepare_optimizer(build_optimizer(trainer.model, trainer.config.optim))
        trainer.model.train()
        for start, steps in plan.items():
            state = TrainerState()
            if start:
                state = load_checkpoint(self.run.folder.checkpoint(start), model=trainer.model, optimizer=optimizer)
                restore_trained_weights(optimizer)
            loss_scale = LossScale.of(state)
            for step in range(start + 1, steps[-1] + 1):
                take = self._prepare_step(step, optimizer)
                if trainer.runtime.precision == "fp16":
                    result, loss_scale = loss_scale.take_step(take)
                else:
                    result = take(1)
                yield step, result

    def _prepare_step(self, step: int, optimizer: torch.optim.Optimizer) -> Callable[[int], StepResult]:
        """Read the micro-batches of a step. Return a function that takes the step, given the loss scale."""
        trainer = self.trainer
        cadence = Cadence.of(trainer.config, self.loader.rule.steps_per_epoch)
        microbatches = next(self.loader.steps(*divmod(step - 1, cadence.steps_per_epoch)))

        def take(loss_scale: int) -> StepResult:
            settings = StepSettings.of(trainer.config, step, cadence.num_steps, loss_scale=loss_scale)
            return train_step(
                trainer.runtime, trainer.model, optimizer, microbatches, settings, compute=trainer.loss_function
            )

        return take


def replay_losses(path: Path, num_steps: int, overrides: Sequence[str] = ()) -> Replay:
    """Compute some recorded steps of a run again. Nothing in the run's folder is changed.

    The overrides, as `key=value`, change the configuration.

    Raises:
        CheckpointError: no step can be computed again, or the run has other rows or another device.
        ConfigError: this machine cannot compute what the run did.
    """
    run, config, losses = steps_to_replay(path, overrides)
    change = _last_change(run)
    with open_replay(run, config, run.folder.base) as replay:
        _refuse_other_rows(run, replay.trainer)
        plan = replay.choose_steps(losses, num_steps, first_start=change.step or 0)
        if not plan:
            raise CheckpointError(
                f"{path} cannot be replayed: it {change}, so that its configuration describes only later steps. No "
                "checkpoint is kept from which one of them could be computed. Train with a higher "
                "checkpoint.save_total_limit to keep one."
            )
        results = dict(replay.compute(plan))
        runtime = replay.trainer.runtime
        device, precision = runtime.device.type, runtime.precision
    chosen = list(chain(*plan.values()))
    notes = [f"it {change}: only later steps can be computed again, from a kept checkpoint on"] if change.keys else []
    if len(chosen) < num_steps:
        which = "can be computed" if change.keys else "are recorded"
        notes.append(f"{counted(num_steps, 'step')} asked for, but only {len(chosen)} {which}")
    recorded_device = run.record.get("device")
    if recorded_device != device:
        other = recorded_device or "a device that run.json does not name"
        notes.append(f"the run computed on {other}, and kernels of {device} may differ by more than the bound")
    return Replay(
        steps=tuple(ReplayedStep(step, losses[step], results[step].loss) for step in chosen),
        bound=LOSS_BOUNDS[precision],
        precision=precision,
        device=device,
        notes=tuple(notes),
    )


def steps_to_replay(path: Path, overrides: Sequence[str] = ()) -> tuple[RecordedRun, Config, dict[int, float]]:
    """Return a run, its configuration and its recorded losses by step, for `replay_losses`, which says what it raises.

    Nothing is computed.
    """
    run = RecordedRun(path)
    config = replay_config(run, overrides, is_partial=True)
    losses = dict(finite(run.points("step", "loss")))
    if not losses:
        raise CheckpointError(f"{path} has no recorded step to replay. Name the folder of a run that has trained.")
    return run, config, losses


@contextmanager
def open_replay(run: RecordedRun, config: Config, base: Path | None) -> Iterator[OpenReplay]:
    """Set up a run in one process and in a temporary folder, without training it.

    The configuration is from `replay_config`. `base` is the folder of the random base that a run saved. If it is None
    or does not exist, the base is built as the configuration says.

    Raises:
        ConfigError: this machine cannot compute what the run did.
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = config.model_copy(update={"output_dir": str(Path(scratch, "run"))})
        with launch(config, trains=False) as runtime:
            _refuse_other_device(run, config, runtime.device.type)
            trainer = build_trainer(runtime, config, rewards_answers=False)
            assert trainer.journal is not None  # one process is the main one
            if base is not None and base.is_dir():
                load_model(without_adapter(trainer.model), base, may_round=True)
            loader, *_ = trainer.prepare_dataloaders()
            if isinstance(loader, RolloutLoader):
                loader.recorded = run.folder
            yield OpenReplay(run, trainer, loader)
            trainer.journal.abandon()


def replay_config(run: RecordedRun, overrides: Sequence[str] = (), *, is_partial: bool = False) -> Config:
    """Return the run's configuration for one process, with the values that the run chose when it started.

    The overrides, as `key=value`, change it. It describes all steps; with `is_partial`, those after the last change.

    Raises:
        CheckpointError: the folder is not a run, the configuration does not describe these steps, or see
            `read_run_record`.
        ConfigError: the overrides are wrong.
    """
    path = run.folder.path
    run.folder.refuse_irregular_files()
    if not run.folder.config_file.is_file():
        raise CheckpointError(
            f"{path} is not the folder of a run: it has no config.yaml. Name one, like runs/quickstart."
        )
    change = _last_change(run)
    if change.keys and (change.step is None or not is_partial):
        then = ", and run.json does not say after which step"
        if change.step is not None:
            then = f". finetune verify {shlex.quote(str(path))} --replay N computes later steps"
        raise CheckpointError(
            f"{path} cannot be replayed: it {change}, so that no one configuration describes all of its steps{then}."
        )
    read_run_record(run.folder.record_file)  # refuses values of other types
    if script_parts := _NOT_IN_CONFIG & run.part("script").keys():
        raise CheckpointError(
            f"{path} cannot be replayed: a script gave its {' and '.join(sorted(script_parts))}, which the "
            "configuration does not describe."
        )
    config = load_run_config(path, overrides)
    config.data.refuse_untrusted()  # a replay reads all rows
    if (memory := MemoryChoice.from_record(run.part("memory"), config)) is not None:
        config = memory.resolve(config)
    chosen: dict[str, object] = {
        "training.precision": run.record.get("precision") or config.training.precision,
        "training.global_batch_size": _global_batch_size(run, config),
        "training.report_to": [],
        "training.profile": 0,
        "rollout.server": None,
        # A replay has no validation, and its metrics may be functions that only the command line allows.
        "validation.metrics": [],
        "checkpoint.best_metric": LOSS,
        "early_stopping.metric": LOSS,
        "early_stopping.max_forgotten": None,
        "training.num_workers": 0,
        "training.prefetch_factor": None,
    }
    if config.data.keep is not None:
        chosen["data.keep_prompts"] = str(run.folder.base_answers)  # recorded, so that nothing is generated again
    values = {key: (value, "run.json") for key, value in chosen.items() if config.origin(key) != COMMAND_LINE}
    config = config.with_values(values)
    return config.model_copy(update={"parallel": ParallelSection(), "ddp": False, "resume": "never"})


class _LastChange(NamedTuple):
    """The last start with other values of keys that a replayed step reads."""

    keys: list[str]
    """All keys that were changed since the first start. Empty if none was."""
    step: int | None
    """The run resumed after this step or an earlier one. None if an earlier version recorded the change."""

    def __str__(self) -> str:
        after = "" if self.step is None else f" after step {self.step}"
        return f"was resumed{after} with other values of {', '.join(self.keys)}"


def _last_change(run: RecordedRun) -> _LastChange:
    changes = [change for change in run.entries("resume_changes") if _is_computed(change)]
    steps = [whole(change.get("step")) for change in changes]
    return _LastChange(sorted({str(change.get("key")) for change in changes}), steps[-1] if steps else None)


def _is_computed(change: Mapping[str, Any]) -> bool:
    """Return whether a replayed step depends on a change. The code of functions is a name and a digest, not a list."""
    key, before, now = (str(change.get(name)) for name in ("key", "before", "now"))
    is_code = key in _ON_RECORD and not before.startswith("[") and not now.startswith("[")
    return not (is_code or key.startswith(_NOT_IN_STEPS))


def _global_batch_size(run: RecordedRun, config: Config) -> int | None:
    """Return the recorded size, unless the command line changes the batch size from which the global one follows."""
    recorded = run.part("global_batch")
    if config.origin("training.batch_size") == COMMAND_LINE and config.training.global_batch_size is None:
        return config.training.batch_size * (whole(recorded.get("world_size_asked")) or 1)
    return whole(recorded.get("global_batch_size")) or config.training.global_batch_size


def _refuse_other_rows(run: RecordedRun, trainer: Trainer) -> None:
    recorded = run.part("fingerprints").get("data.train")
    fingerprint = RecordedRun(trainer.folder).part("fingerprints")["data.train"]  # without the rows of data.keep
    if recorded != fingerprint:
        raise CheckpointError(
            f"{run.folder.path} cannot be replayed: its training rows are not those that it was trained on (their "
            f"fingerprint is {fingerprint[:12]}, and run.json has {str(recorded)[:12]}). Restore the rows of the "
            "training."
        )


def _refuse_other_device(run: RecordedRun, config: Config, device_type: str) -> None:
    recorded = run.record.get("device")
    if recorded is not None and recorded != device_type and config.masks_follow_microbatches:
        raise ConfigError(
            f"{run.folder.path} drops tokens by random masks, which {recorded} draws differently from {device_type}. "
            f"Replay it on a machine with {recorded}."
        )
