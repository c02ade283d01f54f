"""The base class of objectives, which has all that they differ in, and the parts of a run that is ready to train."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from finetune.config.objectives import OBJECTIVES
from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples, EncodedSplits, filler_rows
from finetune.data.examples import load_examples
from finetune.engine.loss import Choices, LossFunction, cross_entropy_per_target
from finetune.errors import ConfigError
from finetune.inference.losses import SplitLosses
from finetune.runs.model_files import load_model
from finetune.training.reporting.run_warnings import RunWarnings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.data.preferences import EncodedLabelledSplits, EncodedPairSplits
    from finetune.distributed.runtime import Runtime
    from finetune.fallbacks import Fallbacks
    from finetune.runs.folder import RunFolder
    from finetune.runs.state import TrainerState
    from finetune.training.hooks import Hooks
    from finetune.training.memory.choice import MemoryChoice
    from finetune.training.reporting.journal import Journal

    AnySplits: TypeAlias = EncodedSplits | EncodedPairSplits | EncodedLabelledSplits

_ROWS_OF = {"preference": "pairs", "labelled": "labelled"}
"""The `ObjectiveFacts.rows` of encoded pairs and labelled rows, by their `row_type`."""


class Loaders(NamedTuple):
    """The loaders of one rank."""

    train: Any
    validation: EvaluationLoader | None
    test: EvaluationLoader | None


class Objective:
    """What a run minimises. There is one for each run; a subclass is named in the table `OBJECTIVES`.

    `finetune plan` calls some methods without a trainer. Each rank has one, and calls its methods in the same order.

    Args:
        config: the whole run.

    Attributes:
        facts: what is known about it without torch.
        metrics: the names of the metrics that a validation measures beside loss and `validation.metrics`.
        no_gradient: says why the gradient may be zero, and what to do. It ends without a full stop.
        may_lack_gradient: whether the first steps of a good run may have no gradient.
        fingerprints: digests of what the loss depends on beside tokens. A resumed run must have the same.
    """

    metrics: tuple[str, ...] = ()
    no_gradient = "Look for a layer, a hook or a script that detaches the loss from the trained weights"
    may_lack_gradient = False
    fingerprints: Mapping[str, str] = {}

    def __init__(self, config: Config) -> None:
        self.config = config
        self.facts = config.objective

    def loss(self, choices: Choices) -> LossFunction:
        """Return the function that sums the loss over a micro-batch's targets; a step minimises the mean."""
        raise NotImplementedError

    def evaluation(self, choices: Choices) -> Any:
        """Return the function that `measure` computes of each micro-batch: −log p of each target."""
        return partial(cross_entropy_per_target, choices=choices)

    def measure(self, setup: Setup, loader: EvaluationLoader) -> SplitLosses:
        """Measure this rank's validation rows; the sums are cut short if a rank was preempted. Collective."""
        raise NotImplementedError

    def encode(self, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_checked: bool) -> AnySplits:
        """Read and encode the rows of the run. See `encode_examples` for the arguments.

        Raises:
            DataError: a row cannot be used.
        """
        examples = load_examples(self.config.data, self.facts.reads)
        return encode_examples(examples, tokenizer, self.config.data, fallbacks=fallbacks, is_checked=is_checked)

    def check(self, *, rewards_answers: bool) -> None:
        """Refuse settings before anything slow. With `rewards_answers=False`, no reward function will be called."""

    def check_rows(self, splits: Any) -> None:
        """Refuse rows that are encoded for another objective."""
        encoded = _ROWS_OF.get(getattr(splits.train, "row_type", ""), "answers")
        wanted = self.facts.rows if self.facts.compares_answers else "answers"
        if encoded == wanted and (wanted != "answers" or isinstance(splits.train, EncodedExamples)):
            return
        encoded_for = " or ".join(name for name, other in OBJECTIVES.items() if other.rows == encoded)
        raise ConfigError(
            f"training.objective is {self.facts.name} ({self.config.origin('training.objective')}), but the rows are "
            f"encoded for {encoded_for}. Encode them with encode_for_objective, or set training.objective to the "
            "objective of these rows."
        )

    def prepare(self, model: Any, tokenizer: PreTrainedTokenizerBase, splits: Any) -> Any:
        """Check the rows before the run's folder is opened, and return the splits to train on and to measure."""
        del model, tokenizer
        return splits

    def collate(self, rows: Collate) -> Any:
        """Return the collate function for the loaders, given the one for plain rows."""
        return rows

    def longest_row(self, splits: Any) -> int:
        """Return the tokens of the longest row of a micro-batch."""
        return int(splits.train.lengths.max())

    def filler_rows(self, number: int, length: int) -> Any:
        """Make examples of this length to forecast memory with. Every token carries loss, and no two share a prefix."""
        return filler_rows(number, length)

    def loaders(self, setup: Setup, loaders: Loaders) -> Loaders:
        """Return the loaders to train with. `loaders` load the rows of the run; an objective may generate its own."""
        del setup
        return loaders

    def start(self, setup: Setup, train_loader: Any, state: TrainerState) -> None:
        """Do what is to be done when training starts or resumes at a state. Collective."""

    def after_training(self, setup: Setup, val_loader: EvaluationLoader, step: int) -> None:
        """Measure what belongs to the result of the run, after `adapter/` is published. Collective."""

    def warnings(self) -> RunWarnings:
        """Return what checks the events of the run for warnings."""
        return RunWarnings()


def objective_of(config: Config) -> Objective:
    """Return the objective of a run. Only its own modules are imported."""
    module, _, name = config.objective.computed_by.partition(":")
    objective: Objective = getattr(importlib.import_module(module), name)(config)
    return objective


def encode_for_objective(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_checked: bool = True
) -> AnySplits:
    """Read and encode the rows of a run: answers, pairs of answers or labelled answers, as its objective needs them.

    See `encode_examples` for the arguments after the config.

    Raises:
        DataError: a row cannot be used.
    """
    return objective_of(config).encode(tokenizer, fallbacks=fallbacks, is_checked=is_checked)


@dataclass(kw_only=True)
class Setup:
    """A run that is ready to train, on one rank.

    Attributes:
        runtime: this process's place in the world.
        config: the whole run, with what the world decides filled in.
        folder: the run's, found once: a script may change the current folder, to which `config.output_dir` is relative.
        model: on its device, sharded if the run shards.
        tokenizer: the model's.
        splits: encoded rows; those to train on end with the `base_answers`.
        base_answers: the rows of `data.keep`, if it is set.
        objective: what the run minimises.
        journal: the journal of the run on the main process; None on the others.
        metrics: `validation.metrics`, by name.
        collate: makes a micro-batch of rows.
        is_packed: whether micro-batches are packed for the engine.
        memory_twin: a model whose memory can be measured: a sharded one cannot be copied.
        memory: checkpointing and the size of micro-batches.
        hooks: the script's own code.
    """

    runtime: Runtime
    config: Config
    folder: RunFolder
    model: Any
    tokenizer: PreTrainedTokenizerBase
    splits: EncodedSplits
    base_answers: EncodedExamples | None
    objective: Objective
    journal: Journal | None
    metrics: Mapping[str, Any]
    collate: Collate
    is_packed: bool
    memory_twin: Any
    memory: MemoryChoice
    hooks: Hooks

    def loss(self, choices: Choices) -> LossFunction:
        """Return the function that sums the loss over a micro-batch's targets: the script's own, or the objective's.

        With a script's loss, validations still measure the cross-entropy.
        """
        if self.hooks.loss is None:
            return self.objective.loss(choices)
        from finetune.engine.given_loss import summed_given_loss

        return partial(summed_given_loss, function=self.hooks.loss, choices=choices)

    def load_published(self, *, on_all: bool = True) -> None:
        """Load the weights in `adapter/` on all ranks, or on rank 0 and where a model is sharded. Collective."""
        with self.runtime.collectives.failing_together("reading the published weights"):
            if on_all or self.journal is not None or self.runtime.placement.shard_size is not None:
                load_model(self.model, self.folder.adapter)

    def on_main(self, action: Callable[[Journal], object], during: str) -> None:
        """Call a function on the main process while the others wait, and raise its error on all ranks. Collective."""
        with self.runtime.collectives.failing_together(during):
            if self.journal is not None:
                action(self.journal)

    def record_memory(self, memory: MemoryChoice) -> None:
        """Make this the memory choice of the run, and record it in run.json. Collective."""
        self.memory = memory
        self.on_main(lambda journal: journal.record(memory=self.memory.as_record()), "recording the choice by memory")
