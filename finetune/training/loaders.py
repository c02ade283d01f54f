"""Plan the global batches of a run and build the data loaders of this rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from finetune.data.batches import BatchRule, Collate, EvaluationLoader, TrainLoader, evaluation_batches, loader_keys_on
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import holds_out_by_default
from finetune.errors import ConfigError, DataError
from finetune.signals import leave_signals_to_parent
from finetune.units import counted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config, LoaderKeys
    from finetune.distributed.runtime import Runtime
    from finetune.engine.microbatch import Microbatch

_log = logging.getLogger(__name__)


class TrainRows(Protocol):
    """What training takes its micro-batches from: `TrainLoader`, or a loader that generates its rows.

    Attributes:
        rule: assigns the rows of the training split to steps.
        generates_rows: the model makes the rows of a step when it is asked for.
    """

    rule: BatchRule
    generates_rows: bool

    def metrics_of(self, step: Mapping[str, float]) -> Mapping[str, Any]:
        """Return the metrics of the last yielded step, with what was measured of its rows. Collective."""

    def steps(self, epoch: int, first_step: int = 0) -> Iterator[list[tuple[int, Any]]]:
        """Yield for each step of an epoch the (index in the global batch, micro-batch) pairs of this rank, if any."""

    def halve(self, epoch: int, step: int) -> int | None:
        """Halve the micro-batches of this and later steps; `steps` has to be called again.

        Return the new limit in tokens; None if they cannot be smaller, and then nothing changes.
        """


def global_batch_size(config: Config, world_size: int) -> int:
    """Return the examples per optimizer step: as configured, else `training.batch_size` for each requested process.

    `world_size` is that of the launch. It is used where `parallel.world_size` is not set.
    """
    num_processes = config.parallel.world_size or world_size
    return config.training.global_batch_size or config.training.batch_size * num_processes


def plan_batches(
    config: Config, rows: Any, *, is_packed: bool, boundary: int | None, global_batch_size: int
) -> BatchRule:
    """Plan how training rows become global batches and micro-batches.

    If the engine computes them (`is_packed`), rows are grouped by their shared prefixes; padded rows by length.
    """
    training = config.training
    has_branches = isinstance(rows, EncodedExamples) and rows.has_branches
    if has_branches and not training.packing:
        raise ConfigError(
            "training.packing is false, but data.train_on=each_turn packs the answers of a conversation into one "
            "micro-batch. Remove training.packing=false, or set data.train_on=all."
        )
    return BatchRule(
        lengths=rows.lengths.numpy().data,  # a list of numbers would take five times the memory
        global_batch_size=global_batch_size,
        batch_size=training.batch_size,
        max_tokens=training.max_tokens_per_microbatch,
        each=config.objective.rows_per_example,
        boundary=boundary,
        drop_last=training.drop_last,
        seed=config.seed,
        tokens=rows.tokens if is_packed and training.packing else None,
        share_prefixes=training.share_prefixes,
        examples=rows.rows_of_examples if has_branches else None,
    )


def rows_to_test(config: Config, splits: Any) -> Any:
    """Return the rows of the test phase: the test split, or the validation rows that `data.validation=auto` held out.

    None if there are neither, or if the only rows are pairs or labels.
    """
    is_held_out = config.objective.learns_answers and holds_out_by_default(config.data)
    return splits.validation if splits.test is None and is_held_out else splits.test


def describe_held_out(config: Config, splits: Any) -> str:
    """Say how many rows `data.validation=auto` held out, and what follows; empty if it held out none."""
    if splits.validation is None or not holds_out_by_default(config.data):
        return ""
    held_out = counted(len(splits.validation), config.objective.example_name)
    return (
        f"{held_out} held out to validate, so adapter/ will hold the best step, not the last; "
        "data.validation=null trains on them too"
    )


def refuse_dropping_all(config: Config, splits: Any, rule: BatchRule) -> None:
    """Raise DataError if `drop_last` leaves nothing of a split. `rule` belongs to the training split."""
    if rule.steps_per_epoch == 0:
        raise DataError(
            f"the training split has {counted(rule.num_examples, 'row')}, fewer than one global batch of "
            f"{rule.global_batch_size}, and training.drop_last leaves them out. "
            "Lower training.global_batch_size, or set training.drop_last=false."
        )
    for section, keys, split in (
        ("validation", config.validation, splits.validation),
        ("testing", config.testing, rows_to_test(config, splits)),
    ):
        if split is not None and keys.drop_last and not evaluation_batches(split, keys, rule.boundary):
            raise DataError(
                f"the {section.removesuffix('ing')} split has {counted(len(split), 'row')}, not enough for a batch of "
                f"{keys.batch_size} ({section}.batch_size), and {section}.drop_last leaves them out: nothing would be "
                f"measured. Lower {section}.batch_size, or set {section}.drop_last=false."
            )


def build_loaders(
    runtime: Runtime, config: Config, splits: Any, *, collate: Collate, is_packed: bool, boundary: int | None
) -> tuple[TrainLoader, EvaluationLoader | None, EvaluationLoader | None]:
    """Build the loaders of this rank. Rank 0 has all test rows, and the others none, unless the model is sharded.

    Raises:
        DataError: see `refuse_dropping_all`.
    """
    device_type = runtime.device.type
    size = global_batch_size(config, runtime.environment.world_size)
    rule = plan_batches(config, splits.train, is_packed=is_packed, boundary=boundary, global_batch_size=size)
    refuse_dropping_all(config, splits, rule)

    def evaluation(split: Any, keys: LoaderKeys, rank: int, world_size: int) -> EvaluationLoader | None:
        if split is None:
            return None
        keys = loader_keys_on(device_type, keys)
        return EvaluationLoader(split, keys, boundary=boundary, rank=rank, world_size=world_size, collate=collate)

    rank, world_size = runtime.rank, runtime.world_size
    train_keys = loader_keys_on(device_type, config.training)
    tested = rows_to_test(config, splits)
    loaders = (
        TrainLoader(splits.train, rule, train_keys, rank=rank, world_size=world_size, collate=collate),
        evaluation(splits.validation, config.validation, rank, world_size),
        evaluation(tested, config.testing, *((0, 1) if runtime.placement.shard_size is None else (rank, world_size))),
    )
    for loader in loaders:
        if loader is not None:
            loader.worker_init_fn = leave_signals_to_parent
    if any(loader is not None and loader.num_workers for loader in loaders):
        from finetune.training.data_workers import prepare_for_workers

        prepare_for_workers(loaders)
    _log.info(
        "Training set size: %s, Validation set size: %s, Test set size: %s",
        *(f"{len(split or ()):,}" for split in (splits.train, splits.validation, splits.test)),
    )
    return loaders


def log_cut_examples(rule: BatchRule) -> None:
    """Log the cost of examples whose rows do not fit into one micro-batch."""
    if rule.examples is None or rule.tokens is None or (rule.max_tokens is None and rule.boundary is None):
        return
    num_cut, again, total = rule.computed_again()
    if num_cut:
        limit = f"training.max_tokens_per_microbatch={rule.max_tokens}" if rule.max_tokens else "LongRoPE's boundary"
        _log.info(
            "%s of %s conversations exceed %s: their answers are cut into several micro-batches, which computes %s "
            "tokens of an epoch again (%.1f %%)",
            *(f"{num_cut:,}", f"{rule.num_examples:,}", limit, f"{again:,}", 100 * again / total),
        )


def log_batches(config: Config, rule: BatchRule, *, num_steps: int, world_size: int) -> None:
    """Log the parts of the global batch and the number of steps."""
    _log.info(
        "global batch of %s (%s): micro-batches of at most %d over %s; %s an epoch, %d in all",
        counted(rule.global_batch_size, "example"),
        "training.global_batch_size" if config.training.global_batch_size else "batch_size x world size",
        rule.batch_size,
        counted(world_size, "process"),
        counted(rule.steps_per_epoch, "step"),
        num_steps,
    )
    log_cut_examples(rule)


def log_microbatches(
    step: int, microbatches: list[tuple[int, Microbatch]], tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> None:
    """Log the shapes and the first tokens of this rank's micro-batches of a step, for `training.debug`."""
    for index, microbatch in microbatches:
        _log.debug(
            "step %d micro-batch %d: %d rows, %d tokens (%d computed), %d targets, on %s; it begins: %r",
            step,
            index,
            microbatch.num_rows,
            microbatch.num_tokens,
            microbatch.num_computed,
            microbatch.num_targets,
            device,
            tokenizer.decode(microbatch.input_ids.flatten()[:40]),
        )
