"""The parts of a run that is ready to train, and the functions in which objectives differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from finetune.data.batches import Collate, EvaluationLoader
from finetune.distributed.gradients import LossFunction
from finetune.engine.loss import Choices
from finetune.inference.losses import SplitLosses
from finetune.training.reporting.run_warnings import RunWarnings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.data.encoded import EncodedSplits
    from finetune.distributed.runtime import Runtime
    from finetune.engine.loss import GivenLoss
    from finetune.runs.folder import RunFolder
    from finetune.runs.state import TrainerState
    from finetune.training.hooks import Hooks
    from finetune.training.memory.choice import MemoryChoice
    from finetune.training.reporting.journal import Journal


class Prepared(NamedTuple):
    """The rows of a run, checked for its objective."""

    splits: Any
    prompts: Any = None
    """The prompts of an objective that generates its answers."""


class Loaders(NamedTuple):
    """The loaders of one rank."""

    train: Any
    validation: EvaluationLoader | None
    test: EvaluationLoader | None


_Prepare: TypeAlias = "Callable[[Config, Any, PreTrainedTokenizerBase, Any], Prepared]"


@dataclass(frozen=True, kw_only=True)
class TrainingObjective:
    """The functions in which objectives differ. `finetune plan` calls some of them without a trainer.

    Attributes:
        loss: returns the function that sums the loss over a micro-batch's targets; a step minimises the mean.
        evaluation: returns the function that `measure` computes of each micro-batch.
        measure: measures this rank's validation rows; the sums are cut short if a rank was preempted. Collective.
            `Prepared.prompts` is the third argument.
        metrics: the names of the metrics that a validation measures beside loss and `validation.metrics`.
        check: refuses settings before anything slow; with False, no reward function will be called.
        prepare: checks the rows before the run's folder is opened.
        collate: returns the collate function for the loaders, given the one for plain rows.
        longest_row: returns the tokens of the longest row of a micro-batch, given the splits.
        loaders: replaces loaders. `Prepared.prompts` is the second argument.
        start: called on every rank when training starts or resumes at a state. Collective.
        warnings: makes what checks the events of a run for warnings.
        no_gradient: says why the gradient may be zero, and what to do. It ends without a full stop.
    """

    loss: Callable[[Config, Choices], LossFunction]
    evaluation: Callable[[Config, Choices], Any]
    measure: Callable[[Setup, EvaluationLoader, Any], SplitLosses]
    metrics: tuple[str, ...] = ()
    check: Callable[[Config, bool], None] = lambda _config, _rewards_answers: None
    prepare: _Prepare = lambda _config, _model, _tokenizer, rows: Prepared(rows)
    collate: Callable[[Config, Collate], Any] = lambda _config, collate: collate
    longest_row: Callable[[Config, Any], int] = lambda _config, splits: int(splits.train.lengths.max())
    loaders: Callable[[Setup, Any, Loaders], Loaders] = lambda _setup, _prompts, loaders: loaders
    start: Callable[[Setup, Any, TrainerState], None] = lambda _setup, _train_loader, _state: None
    warnings: Callable[[], RunWarnings] = RunWarnings
    no_gradient: str = "Look for a layer, a hook or a script that detaches the loss from the trained weights"

    def with_loss(self, function: GivenLoss | None) -> TrainingObjective:
        """Return the objective with a script's loss, if there is one. Validations still measure the cross-entropy."""
        if function is None:
            return self
        from finetune.engine.loss import summed_given_loss

        loss = partial(summed_given_loss, function=function)
        return replace(self, loss=lambda _config, choices: partial(loss, choices=choices))


@dataclass(kw_only=True)
class Setup:
    """A run that is ready to train, on one rank.

    Attributes:
        runtime: this process's place in the world.
        config: the whole run, with what the world decides filled in.
        folder: the run's, found once: a script may change the current folder, to which `config.output_dir` is relative.
        model: on its device, sharded if the run shards.
        tokenizer: the model's.
        splits: encoded rows.
        objective: what the run minimises.
        prompts: see `Prepared`.
        journal: the journal of the run on the main process; None on the others.
        metrics: `validation.metrics`, by name.
        collate: makes a micro-batch of rows.
        is_packed: whether micro-batches are packed for the engine.
        measured: a model that can be copied to measure memory, because a sharded model cannot be copied.
        memory: checkpointing and the size of micro-batches.
        hooks: the script's own code.
    """

    runtime: Runtime
    config: Config
    folder: RunFolder
    model: Any
    tokenizer: PreTrainedTokenizerBase
    splits: EncodedSplits
    objective: TrainingObjective
    prompts: Any
    journal: Journal | None
    metrics: Mapping[str, Any]
    collate: Collate
    is_packed: bool
    measured: Any
    memory: MemoryChoice
    hooks: Hooks

    def on_main(self, action: Callable[[Journal], None], during: str) -> None:
        """Call a function on the main process while the others wait, and raise its error on all ranks. Collective."""
        with self.runtime.collectives.failing_together(during):
            if self.journal is not None:
                action(self.journal)

    def record_memory(self) -> None:
        """Record the memory choice in run.json. Collective."""
        self.on_main(lambda journal: journal.record(memory=self.memory.as_record()), "recording the choice by memory")
