"""Compute recorded steps of a run again, in one process and in a temporary folder, and compare their losses.

A replay starts from the weights at the start of the run or from a checkpoint that was kept. It can reach the steps of
one save interval from there.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.compose import load_run_config
from finetune.config.schema import ParallelSection
from finetune.config.yaml_reader import COMMAND_LINE
from finetune.data.batches import TrainLoader
from finetune.distributed.launch import launch
from finetune.errors import CheckpointError, ConfigError
from finetune.export.checks import loss_difference
from finetune.model.lora import without_adapter
from finetune.runs.checkpoints import load_checkpoint
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import load_model
from finetune.runs.record import read_run_record
from finetune.runs.recorded_run import RecordedRun, finite, text, whole
from finetune.runs.verification import whole_checkpoints
from finetune.training.cadence import Cadence
from finetune.training.checks import named_splits
from finetune.training.memory.choice import MemoryChoice, masks_follow_microbatches
from finetune.training.optim import build_optimizer
from finetune.training.rollouts import RolloutLoader
from finetune.training.schedule_free import go_on_training
from finetune.training.step import StepResult, StepSettings, train_step
from finetune.training.train import build_trainer
from finetune.training.trainer import Trainer
from finetune.training.validation import LOSS

if TYPE_CHECKING:
    from finetune.config.schema import Config

MOST_APART = {"fp32": 1e-6, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""The largest difference of two losses, over max(1, loss): promise 1, and for 16 bits one step of the type at 1."""


class Replayed(NamedTuple):
    """A step that was computed again. Losses are in nats per target token."""

    step: int
    recorded: float
    computed: float


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of a replay."""

    steps: tuple[Replayed, ...]
    """The chosen steps, ascending."""
    bound: float
    """The largest difference of two losses that counts as equal, see `MOST_APART`."""
    precision: str
    """The precision of both computations."""
    device: str
    """The type of the device that computed the steps again."""
    notes: tuple[str, ...]
    """Which steps cannot be replayed, and how this machine differs from the run's, one sentence each."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for certificate.json."""
        steps = [one._asdict() for one in self.steps]
        return {"steps": steps, "bound": self.bound, "precision": self.precision, "device": self.device}

    @property
    def mismatches(self) -> list[str]:
        """Return a sentence for each step whose loss differs by more than the bound."""
        return [
            f"step {one.step}: the loss is {one.computed!r} again, but {one.recorded!r} was recorded; expected a "
            f"difference of at most {self.bound:.3g} x max(1, loss)"
            for one in self.steps
            if not loss_difference(one.recorded, one.computed) <= self.bound
        ]


class Opened(NamedTuple):
    """A run that can compute its steps again."""

    trainer: Trainer
    loader: TrainLoader
    cadence: Cadence


def replay(path: Path, num_steps: int, overrides: Sequence[str] = ()) -> Replay:
    """Compute some recorded steps of a run again. Nothing in its folder is changed.

    `choose_steps` chooses the steps. The overrides, as `key=value`, change the configuration.

    Raises:
        CheckpointError: no step can be replayed, or the rows or the device are not those of the run.
        ConfigError: this machine cannot compute what the run did.
    """
    run = RecordedRun(path)
    config = replay_config(run, overrides)
    losses = dict(finite(run.points("step", "loss")))
    if not losses:
        raise CheckpointError(f"{path} has no recorded step to replay. Name the folder of a run that has trained.")
    with open_replay(run, config, run.folder.base) as opened:
        runtime = opened.trainer.runtime
        _refuse_other_rows(run, opened.trainer)
        chosen, notes = choose_steps(run, losses, opened.cadence, num_steps)
        results = dict(compute_steps(opened, run.folder, chosen))
        notes += _other_machine(run, runtime.device.type, runtime.precision)
    return Replay(
        steps=tuple(Replayed(step, losses[step], results[step].loss) for steps in chosen.values() for step in steps),
        bound=MOST_APART[runtime.precision],
        precision=runtime.precision,
        device=runtime.device.type,
        notes=tuple(notes),
    )


@contextmanager
def open_replay(run: RecordedRun, config: Config, base: Path | None) -> Iterator[Opened]:
    """Set up a run in one process and in a temporary folder, without training it.

    Args:
        run: supplies recorded answers to runs that learn from rewards, and the device that drew random masks.
        config: see `replay_config`.
        base: the folder of the random base that a run saved; None, or a folder that does not exist: the base is built
            as the configuration says.

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
                load_model(without_adapter(trainer.model), base)
            loader, *_ = trainer.prepare_dataloaders()
            if isinstance(loader, RolloutLoader):
                loader.recorded = run.folder
            yield Opened(trainer, loader, Cadence.of(config, loader.rule.steps_per_epoch))
            trainer.journal.abandon()


def replay_config(run: RecordedRun, overrides: Sequence[str] = ()) -> Config:
    """Return the run's configuration for one process, with the values that the run chose when it started.

    The overrides, as `key=value`, change it.

    Raises:
        CheckpointError: the folder is not a run, the run was resumed with another configuration, or see
            `read_run_record`.
        ConfigError: the overrides are wrong.
    """
    path = run.folder.path
    if not run.folder.config_file.is_file():
        raise CheckpointError(
            f"{path} is not the folder of a run: it has no config.yaml. Name one, like runs/quickstart."
        )
    if changes := run.entries("resume_changes"):
        keys = sorted({str(change.get("key")) for change in changes if isinstance(change, dict)})
        raise CheckpointError(
            f"{path} cannot be replayed: it was resumed with other values of {', '.join(keys)}, so that no one "
            "configuration describes all of its steps."
        )
    read_run_record(run.folder.record_file)  # refuses values of other types
    config = load_run_config(path, overrides)
    for address in config.data._refused:  # a replay reads all rows
        config.data.refuse_untrusted(address)
    memory = MemoryChoice.from_record(run.part("memory"), config)
    config = config if memory is None else memory.resolve(config)
    chosen: dict[str, object] = {
        "training.precision": text(run.record.get("precision")) or config.training.precision,
        "training.global_batch_size": _global_batch_size(run, config),
        "training.report_to": [],
        "training.profile": 0,
        "rollout.server": None,
        # A replay has no validation, and its metrics may be functions that only the command line allows.
        "validation.metrics": [],
        "checkpoint.best_metric": LOSS,
        "early_stopping.metric": LOSS,
        "training.num_workers": 0,
        "training.prefetch_factor": None,
    }
    values = {key: (value, "run.json") for key, value in chosen.items() if config.origin(key) != COMMAND_LINE}
    config = config.with_values(values)
    return config.model_copy(update={"parallel": ParallelSection(), "ddp": False, "resume": "never"})


def _global_batch_size(run: RecordedRun, config: Config) -> int | None:
    """Return the recorded size, unless the command line changes the batch size from which the global one follows."""
    recorded = run.part("global_batch")
    if config.origin("training.batch_size") == COMMAND_LINE and config.training.global_batch_size is None:
        return config.training.batch_size * (whole(recorded.get("world_size_asked")) or 1)
    return whole(recorded.get("global_batch_size")) or config.training.global_batch_size


def choose_steps(
    run: RecordedRun, recorded: Iterable[int], cadence: Cadence, num_steps: int
) -> tuple[dict[int, list[int]], list[str]]:
    """Choose recorded steps to compute again: those that one save interval reaches from the start or a kept checkpoint.

    The first step after each start is chosen first, then the second after each, and so on.

    Returns:
        The chosen steps by their start, and notes about the steps that cannot be replayed.

    Raises:
        CheckpointError: no recorded step is in reach.
    """
    starts = [0, *(int(path.name.removeprefix("step-")) for path in whole_checkpoints(run.folder))]
    by_epochs = cadence.save_every_epochs and cadence.save_every_epochs * cadence.steps_per_epoch
    save_interval = min(filter(None, (cadence.save_every, by_epochs)), default=cadence.num_steps)
    return _choose(sorted(recorded), sorted(starts), save_interval, num_steps)


def _choose(
    recorded: Sequence[int], starts: Sequence[int], reach: int, num_steps: int
) -> tuple[dict[int, list[int]], list[str]]:
    """Choose at most `num_steps` recorded steps that are at most `reach` after one of the starts; both ascend."""
    ends = [*starts[1:], math.inf]
    reachable = {
        start: [step for step in recorded if start < step <= min(start + reach, end)]
        for start, end in zip(starts, ends, strict=True)
    }
    in_turn = [step for steps in itertools.zip_longest(*reachable.values()) for step in steps if step is not None]
    if not in_turn:
        raise CheckpointError("no recorded step is within one save interval after the start or a kept checkpoint.")
    wanted = set(in_turn[:num_steps])
    notes = []
    if out_of_reach := sorted(set(recorded) - set(in_turn)):
        notes.append(
            f"steps {_ranges(out_of_reach)} cannot be replayed: the checkpoints before them were removed "
            "(checkpoint.save_total_limit)"
        )
    if len(wanted) < num_steps:
        notes.append(f"{num_steps} steps were asked for, but only {len(wanted)} can be replayed")
    chosen = {start: [step for step in steps if step in wanted] for start, steps in reachable.items()}
    return {start: steps for start, steps in chosen.items() if steps}, notes


def compute_steps(
    opened: Opened, folder: RunFolder, chosen: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, StepResult]]:
    """Train from each start up to its last chosen step, and yield all steps on the way with their results.

    `chosen` has steps in ascending order, by the step after which to start; 0 is the start of the run, and the others
    have a checkpoint in the folder.

    Raises:
        CheckpointError: a checkpoint does not fit the configuration.
    """
    trainer, loader, cadence = opened
    optimizer = trainer.runtime.prepare_optimizer(build_optimizer(trainer.model, trainer.config.optim))
    trainer.model.train()
    for start, steps in chosen.items():
        if start:
            load_checkpoint(folder.checkpoint(start), model=trainer.model, optimizer=optimizer)
            go_on_training(optimizer)
        for step in range(start + 1, steps[-1] + 1):
            microbatches = next(loader.steps(*divmod(step - 1, cadence.steps_per_epoch)))
            settings = StepSettings.of(trainer.config, step, cadence.num_steps)
            yield (
                step,
                train_step(
                    trainer.runtime, trainer.model, optimizer, microbatches, settings, compute=trainer.loss_function
                ),
            )


def _refuse_other_rows(run: RecordedRun, trainer: Trainer) -> None:
    recorded = run.part("fingerprints").get("data.train")
    found = named_splits(trainer.splits)["train"].fingerprint
    if recorded != found:
        raise CheckpointError(
            f"{run.folder.path} cannot be replayed: its training rows are not those that it was trained on (their "
            f"fingerprint is {found[:12]}, and run.json has {str(recorded)[:12]}). Restore the rows of the training."
        )


def _refuse_other_device(run: RecordedRun, config: Config, device_type: str) -> None:
    recorded = text(run.record.get("device"))
    if recorded is not None and recorded != device_type and masks_follow_microbatches(config):
        raise ConfigError(
            f"{run.folder.path} drops tokens by random masks, which {recorded} draws differently from {device_type}. "
            f"Replay it on a machine with {recorded}."
        )


def _other_machine(run: RecordedRun, device_type: str, precision: str) -> Iterator[str]:
    """Yield a note if the run computed on another type of device, or did not record its device."""
    device = text(run.record.get("device"))
    if device is None:
        yield f"run.json does not say on which device the run computed; here it is {device_type}, in {precision}"
    elif device != device_type:
        yield f"the run computed on {device}, and kernels of {device_type} may differ by more than the bound"


def _ranges(steps: Sequence[int]) -> str:
    """Write ascending numbers as ranges: `3-5, 8`."""
    parts: list[Any] = []
    for _, group in itertools.groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0]):
        numbers = [step for _, step in group]
        parts.append(f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]))
    return ", ".join(parts)
