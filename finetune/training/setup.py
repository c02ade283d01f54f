"""Set up a run: from a model, a configuration and encoded rows to everything that training uses, in order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.config.render import resolved_yaml
from finetune.data import row_checks
from finetune.data.batches import Collate
from finetune.data.encoded import EncodedExamples, EncodedSplits, digest_tensors
from finetune.distributed.device import DTYPES, convert_weights
from finetune.distributed.runtime import Runtime
from finetune.engine.fused import is_fused
from finetune.errors import ConfigError
from finetune.fallbacks import Fallback
from finetune.model.base import checkpoint_gradients, states_in_4_bits
from finetune.model.lora import describe_architecture, fingerprint_base, without_adapter
from finetune.model.tokens import set_stop_and_pad_ids
from finetune.runs.checkpoints import save_base
from finetune.runs.folder import RunFolder
from finetune.runs.model_files import load_model
from finetune.runs.row_record import write_row_record
from finetune.training.checks import check_fit, check_settings, named_splits, raw_digests, sometimes_read
from finetune.training.forward import Computation, Forward, agree_on_forward, mention_bf16
from finetune.training.hooks import Hooks
from finetune.training.loaders import global_batch_size, plan_batches, refuse_dropping_all
from finetune.training.memory.choice import MemoryChoice, agree_on_memory
from finetune.training.objective import Objective, Setup, objective_of
from finetune.training.optim import build_optimizer
from finetune.training.reporting.events import energy_reader
from finetune.training.reporting.journal import Journal
from finetune.training.validation import (
    check_criteria,
    check_metrics,
    measured_in_subsets,
    refuse_early_stopping,
    refuse_rows_without_answers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.inference.answers import Metric
    from finetune.training.objective import AnySplits

_log = logging.getLogger(__name__)
_SAME_BASE = "Give every node the same files at model.path."
_NOT_IN_BACKGROUND = Fallback(
    what="checkpoint.background",
    wanted="written in the background",
    used="written while training waits",
    why="all ranks gather the sharded weights, tensor by tensor, for rank 0 to write",
)


class CheckedConfig(NamedTuple):
    """A configuration that a run can have, as far as it can be told before its model and its rows are read."""

    config: Config
    """With what the objective fills in, and the values of the launcher if `check_config` was given a runtime."""
    objective: Objective
    metrics: Mapping[str, Metric]
    """`validation.metrics` and the script's own metrics, by name."""


class _Checked(NamedTuple):
    """The parts of a run, which fit each other. Nothing is written yet."""

    config: Config
    objective: Objective
    splits: EncodedSplits
    metrics: Mapping[str, Metric]
    base: str | None
    """The fingerprint of the base of an adapter; None if it is random or trains."""


class _Placed(NamedTuple):
    """The model on its device, and how a step computes it."""

    forward: Forward
    collate: Collate
    memory_twin: Any
    """The model. If it is sharded, a copy without data that was made before: a sharded model cannot be copied."""
    states_in_4_bits: Mapping[str, Any]


def check_config(
    config: Config, hooks: Hooks | None = None, *, runtime: Runtime | None = None, rewards_answers: bool = True
) -> CheckedConfig:
    """Check everything that the configuration and the script's own code tell, before anything slow.

    The model and the rows are not looked at. Without a runtime, the device is not looked at either. With
    `rewards_answers=False`, no reward function will be called.

    Raises:
        ConfigError: no run can have this configuration.
    """
    hooks = Hooks() if hooks is None else hooks
    if not isinstance(hooks, Hooks):
        raise ConfigError(f"hooks is {hooks!r}; expected Hooks(loss=…, metrics=…, optimizer=…, callbacks=…).")
    hooks.check(config)
    check_settings(hooks.config(config), runtime)
    if config.data.keep is not None or config.early_stopping.max_forgotten is not None:
        from finetune.training.keeping import check_keeping

        check_keeping(config)
    if runtime is not None:
        config = runtime.with_launcher_values(config)
    objective = objective_of(config)
    objective.check(rewards_answers=rewards_answers)
    metrics = check_metrics(config, objective.metrics, given=hooks.metrics)
    if (runtime is None or runtime.is_main_process) and (chosen := sometimes_read(config)):
        from finetune.training.unread_keys import describe_unread_keys, warn_of

        world_size = None if runtime is None else runtime.world_size
        warn_of(describe_unread_keys(config, chosen, has_metrics=bool(metrics), world_size=world_size))
    return CheckedConfig(objective.config, objective, metrics)


def set_up(
    runtime: Runtime,
    checked_config: CheckedConfig,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: AnySplits,
    hooks: Hooks,
) -> Setup:
    """Check that all parts fit, open the run's folder, place the model, and decide on its forward and its memory.

    Collective: every rank. For what is raised see `Trainer`.
    """
    checked = _check(runtime, checked_config, model, tokenizer, rows, hooks)
    folder = RunFolder(checked.config.output_dir)
    journal = _open(runtime, checked, folder, model, tokenizer, hooks)
    if _has_new_tokens_in_reference(checked.config):  # after the base's fingerprint was taken
        from finetune.model.new_tokens import ids_of_new_tokens, start_base_from_mean_row

        start_base_from_mean_row(model, ids_of_new_tokens(tokenizer, checked.config.lora))
    placed = _place(runtime, checked, journal, model)
    base_answers = None
    if checked.config.data.keep is not None:
        from finetune.training.keeping import answer_with_base, with_rows_on_top

        train = checked.splits.train
        base_answers = answer_with_base(runtime, checked.config, model, tokenizer, train, checked.base, journal)
        checked = checked._replace(splits=with_rows_on_top(checked.splits, base_answers))
    memory = _choose_memory(runtime, checked, journal, placed)
    if memory.gradient_checkpointing:
        checkpoint_gradients(model, offloads=memory.offloads)
    if memory.embedding_on_host:
        from finetune.engine.host_embedding import keep_embedding_on_host

        keep_embedding_on_host(model)
    if placed.states_in_4_bits:  # after the choice, so that this takes no more memory than a step
        _try_precision(runtime, checked, journal, model, placed)
    setup = Setup(
        runtime=runtime,
        config=checked.config,
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        splits=checked.splits,
        base_answers=base_answers,
        objective=checked.objective,
        journal=journal,
        metrics=checked.metrics,
        collate=placed.collate,
        is_packed=placed.forward.why_not_engine is None,
        memory_twin=placed.memory_twin,
        memory=memory,
        hooks=hooks,
    )
    setup.record_memory(memory)
    return setup


def _check(
    runtime: Runtime,
    checked: CheckedConfig,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    rows: AnySplits,
    hooks: Hooks,
) -> _Checked:
    """Refuse parts that do not fit each other, and ranks that have other parts. Collective."""
    objective, metrics = checked.objective, checked.metrics
    hooks.refuse_no_sum(model, runtime.device)
    config = hooks.config(checked.config, model)
    objective.check_rows(rows)
    check_fit(config, model, rows)
    splits: EncodedSplits = _with_subsets(config, objective.prepare(model, tokenizer, rows))
    in_subsets = measured_in_subsets(config, splits.validation, metrics)
    check_criteria(config, objective.metrics, metrics, in_subsets=in_subsets)
    refuse_early_stopping(config, splits)
    if runtime.is_main_process and None in (splits.validation, splits.test):
        from finetune.training.unread_keys import OF_SPLITS, describe_missing_splits, warn_of

        warn_of(describe_missing_splits(config, sometimes_read(config, OF_SPLITS), splits))
    if splits.validation is not None:
        refuse_rows_without_answers(metrics, splits.validation.row_type)
    set_stop_and_pad_ids(model, tokenizer)
    if config.early_stopping.max_forgotten is not None:
        from finetune.training.keeping import encode_measured_prompts

        encode_measured_prompts(config, model, tokenizer)  # before step 1, and not in the first validation
    runtime.collectives.agree_set_up()
    runtime.collectives.refuse_differences("the data", "/".join(_digests_of_rows(splits)))
    has_base = config.training.method == "lora" and config.model.init == "pretrained"
    base = fingerprint_base(model, config.lora) if has_base else None
    runtime.collectives.refuse_differences("the base model", base or "", remedy=_SAME_BASE)
    runtime.placement.fit_threads(model)
    _refuse_background_of_shards(runtime, config)
    return _Checked(config, objective, splits, metrics, base)


def _open(
    runtime: Runtime, checked: _Checked, folder: RunFolder, model: Any, tokenizer: PreTrainedTokenizerBase, hooks: Hooks
) -> Journal | None:
    """Open the run's folder and journal on the main process, and read a random base from it. Collective."""
    config, journal = checked.config, None
    with runtime.collectives.failing_together("opening the run's folder"):
        if runtime.is_main_process:
            journal = _open_journal(runtime, checked, model, tokenizer, hooks)
    if _saves_base(config) and config.resume == "auto":  # a resumed run keeps it, whatever its seed is now
        with runtime.collectives.failing_together("reading the base model"):
            load_model(without_adapter(model), folder.base, may_round=True)
    return journal


def _place(runtime: Runtime, checked: _Checked, journal: Journal | None, model: Any) -> _Placed:
    """Place or shard the model, and decide how a step computes it. Collective."""
    config = checked.config
    if runtime.placement.shard_size is None:
        runtime.placement.place(model)
    if config.training.neftune_alpha:
        from finetune.model.embedding_noise import add_embedding_noise

        noise = add_embedding_noise(model, config.training.neftune_alpha)
        runtime.liveness.on_close(lambda _: noise.remove())
    forward = agree_on_forward(runtime, config.training, model)
    collate = checked.objective.collate(forward.collate)
    memory_twin, states = model, states_in_4_bits(model)
    if runtime.placement.shard_size is not None:
        from finetune.training.memory.forecast import copy_without_data

        memory_twin = copy_without_data(model)
        convert_weights(memory_twin, runtime.precision)
        runtime.placement.shard(model)
    placed = _Placed(forward, collate, memory_twin, states)
    if not states:  # before the choice, because fp8 changes the weights
        _try_precision(runtime, checked, journal, model, placed)
    if config.training.graphs is True:
        from finetune.inference.answer_graphs import agree_on_replays

        agree_on_replays(runtime, config.training, model)
    return placed


def _choose_memory(runtime: Runtime, checked: _Checked, journal: Journal | None, placed: _Placed) -> MemoryChoice:
    """Choose gradient checkpointing and the size of micro-batches, as recorded in a resumed run. Collective."""
    objective = checked.objective
    how = Computation(
        # A script's own loss may refuse tensors without data, and takes about as much memory.
        loss_of=objective.loss,
        device_type=runtime.device.type,
        dtype=DTYPES[runtime.precision],
        is_fused=is_fused(),
    )
    return agree_on_memory(
        runtime,
        checked.config,
        placed.memory_twin,
        how,
        longest=objective.longest_row(checked.splits),
        rows_of=objective.filler_rows,
        collate=placed.collate,
        recorded=None if journal is None else journal.recorded("memory"),
    )


def _with_subsets(config: Config, splits: Any) -> Any:
    """Divide validation and test rows by `validation.by`."""
    measured = {name: split for name, split in named_splits(splits).items() if name != "train"}
    if config.validation.by is None or not measured:
        return splits
    from finetune.data.subsets import by_column

    return EncodedSplits(**vars(splits) | by_column(config.data, config.validation.by, measured))


def _digests_of_rows(splits: EncodedSplits) -> list[str]:
    """Describe the rows, and the subsets of the validation split: ranks add up the sums of each."""
    digests, rows = [split.fingerprint for split in named_splits(splits).values()], splits.validation
    if not isinstance(rows, EncodedExamples):
        return digests
    return [*digests, *rows.subset_names, digest_tensors([rows.subset])]


def _try_precision(runtime: Runtime, checked: _Checked, journal: Journal | None, model: Any, placed: _Placed) -> None:
    """Compute a few rows before step 1, if the run's precision may be too coarse for this model. Collective."""
    config, splits, forward, collate = checked.config, checked.splits, placed.forward, placed.collate
    if forward.why_not_engine is None:
        mention_bf16(runtime, model)
    if runtime.precision == "fp16":
        from finetune.training.low_precision import refuse_overflow

        row = splits.train[0]
        is_plain = isinstance(splits.train, EncodedExamples) and runtime.placement.shard_size is None
        refuse_overflow(runtime, model, collate([row]), row if is_plain else None)
    if config.model.frozen_precision == "fp8" or placed.states_in_4_bits:
        from finetune.training.low_precision import measure_base

        measure_base(runtime, config, model, splits.train, collate, forward, placed.states_in_4_bits, journal)


def _saves_base(config: Config) -> bool:
    """Return whether the base is random, so that the run's folder must hold it for the adapter."""
    return config.model.init == "random" and config.training.method == "lora"


def _has_new_tokens_in_reference(config: Config) -> bool:
    """Return whether the base is a reference, which needs rows for the new tokens."""
    return config.has_reference and bool(config.lora.new_tokens)


def _refuse_background_of_shards(runtime: Runtime, config: Config) -> None:
    """Say that saving sharded trained weights blocks training. It is a fallback if the background was asked for."""
    if not (runtime.placement.shards_trained and config.checkpoint.background):
        return
    if config.origin("checkpoint.background") == "default":
        _log.info("checkpoints are %s: %s", _NOT_IN_BACKGROUND.used, _NOT_IN_BACKGROUND.why)
    else:
        runtime.fallbacks.take(_NOT_IN_BACKGROUND)


def _open_journal(
    runtime: Runtime, checked: _Checked, model: Any, tokenizer: PreTrainedTokenizerBase, hooks: Hooks
) -> Journal:
    environment, config, splits = runtime.environment, checked.config, checked.splits
    batch_size = global_batch_size(config, environment.world_size)
    inputs = {f"data.{name}": split.fingerprint for name, split in named_splits(splits).items()}
    inputs |= {} if checked.base is None else {"base": checked.base}
    inputs |= {"reference": "with the first rows of new tokens"} if _has_new_tokens_in_reference(config) else {}
    inputs |= {**hooks.fingerprints(config), **checked.objective.fingerprints}

    def check_loads(checkpoint: Path) -> None:
        from finetune.runs import checkpoint_loading  # only a run that resumes with changes

        checkpoint_loading.refuse_misfit(checkpoint, model=model, optimizer=build_optimizer(model, config.optim))
        rule = plan_batches(config, splits.train, is_packed=False, boundary=None, global_batch_size=batch_size)
        refuse_dropping_all(config, splits, rule)

    texts = {"config": resolved_yaml(config), "chat_template": str(tokenizer.chat_template)}
    texts["model_config"] = describe_architecture(model)
    inputs |= {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    journal = Journal(
        config,
        runtime.fallbacks,
        world={
            "world_size": runtime.world_size,
            "processes_started": environment.world_size,
            "launcher": environment.launcher,
            "backend": runtime.collectives.backend,
            "threads": runtime.threads,
            "sharding": "none" if runtime.placement.shard_size is None else config.parallel.sharding,
            "shard_size": runtime.placement.shard_size,
            "device": runtime.device.type,
            "precision": runtime.precision,
        },
        global_batch={
            "global_batch_size": batch_size,
            "batch_size": config.training.batch_size,
            "world_size_asked": config.parallel.world_size or environment.world_size,
        },
        rows_read_as={name: split.sides[0].read_as for name, split in named_splits(splits).items()},
        fingerprints=inputs,
        refuse_misfit=check_loads,
        former_fingerprints=hooks.former_fingerprints,
        warnings=checked.objective.warnings(),
        energy=energy_reader(runtime.device.type, world_size=runtime.world_size, num_here=environment.local_world_size),
    )
    runtime.liveness.on_close(journal.close)
    if script_parts := hooks.as_record(config, model):
        journal.record(script=script_parts)
    _record_rows(journal, config, splits)
    if _saves_base(config):
        save_base(journal.folder, without_adapter(model), tokenizer)
    return journal


def _record_rows(journal: Journal, config: Config, splits: EncodedSplits) -> None:
    """Count the rows of each file in run.json, log the counts, and write a digest of each row."""
    counts = {}
    for name, split in named_splits(splits).items():
        digests = [side.digest_rows() for side in split.sides]
        keys = row_checks.keys_of_rows(digests)
        are_prompts = config.objective.generates_answers
        counts[name] = row_checks.count_by_file(split, row_checks.repeated_rows(split, keys), are_prompts=are_prompts)
        if name == "train":
            tokens = (digest.tobytes().hex() for side in digests for digest in side[:, 0])
            earlier: AbstractSet[str] = frozenset()
            if config.resume == "auto":
                from finetune.runs.recorded_rows import rows_of_earlier_starts

                earlier = rows_of_earlier_starts(journal.folder)
            described = row_checks.describe_rows(split, keys)
            write_row_record(journal.folder, raw_digests(splits), tokens, *described, earlier=earlier)
    journal.record(row_counts=counts)
    for name, of_file in ((name, of_file) for name, files in counts.items() for of_file in files):
        _log.info("%s: %s", name, row_checks.describe_counts(of_file))
        if name == "train" and not are_prompts and (finding := row_checks.learns_nothing_or_everything(of_file)):
            _log.warning("train: %s. `finetune preview` shows rows; data.chat_template sets another template.", finding)
