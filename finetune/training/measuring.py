"""Measure a loaded model on one of a run's splits, with the forward that training uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from finetune.config.schema import Config
from finetune.data.batches import EvaluationLoader, loader_keys_on
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.subsets import by_column
from finetune.distributed.runtime import Runtime
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallback
from finetune.inference.answers import Metric
from finetune.inference.evaluation import evaluate_model
from finetune.inference.finished_run import choose_split, place_finished_run
from finetune.inference.scores import Evaluation, ModelName, RowValues, Scores
from finetune.model.base import longrope_boundary
from finetune.runs.model_files import LoadedRun, has_adapter
from finetune.runs.recorded_rows import RowChanges, RowRecord
from finetune.training.checks import named_splits, raw_digests
from finetune.training.forward import agree_on_forward


class KnownRows(NamedTuple):
    """What is known of the rows that runs were trained on."""

    recorded: RowRecord | None = None
    """The rows that the run recorded; None if it recorded none."""
    has_same_data: bool = False
    """Whether the configuration names the data of the run. The rows are then compared with its own."""
    fingerprints: Mapping[str, Any] = MappingProxyType({})
    """For a run that recorded no rows: the fingerprint of each split by its name: `data.test`."""
    others: Sequence[RowRecord] = ()
    """The rows of other runs. Their training rows are left out too."""

    @property
    def records(self) -> list[RowRecord]:
        """The rows of all runs."""
        return [*self.others, *([] if self.recorded is None else [self.recorded])]


def measure_split(
    runtime: Runtime,
    config: Config,
    loaded: LoadedRun,
    split: str | None,
    metrics: Mapping[str, Metric],
    known: KnownRows | None = None,
    *,
    select: Callable[[EncodedExamples], EncodedExamples] = lambda examples: examples,
) -> Evaluation:
    """Place a model, and measure it on every row of a split that it was not trained on. Collective: every rank.

    Of the split train, all rows are measured; of "none", no rows, for suites of prompts that are measured afterwards.
    `choose_split` chooses a split for None. `select` chooses among the rows that are left.

    Raises:
        ConfigError: the run has no such split, metrics are asked for and its rows have no answers, or rows have changed
            and the run is strict.
        DataError: the run was trained on all rows of the split.
    """
    known, (model, tokenizer) = known or KnownRows(), loaded
    if split == "none":
        place_finished_run(runtime, config, model)
        return _without_rows(has_base=config.testing.compare_base and has_adapter(model))
    # Before the model is sharded: the engine refuses one with hooks.
    forward = agree_on_forward(runtime, config.training, model)
    place_finished_run(runtime, config, model)
    splits = encode_examples(
        load_examples(config.data),
        tokenizer,
        config.data,
        fallbacks=runtime.fallbacks,
        knows_trained=known.recorded is not None,
    )
    split = choose_split(split, named_splits(splits))
    examples = getattr(splits, split)
    if metrics and examples.row_type == "text":
        raise ConfigError(
            f"the {split} split is plain text, in which there are no answers to measure by {', '.join(metrics)}. Drop "
            "--metric, and set testing.metrics=[] where the run's config names some."
        )
    num_rows = len(examples)
    changes = _take_changes(runtime, splits, known)
    _warn_of_other_rows(runtime, examples, split, known)  # before rows are left out, which changes the fingerprint
    examples = _without_trained_rows(runtime, examples, split, known)
    num_trained = num_rows - len(examples) if known.records else None
    examples = select(examples)
    if config.validation.by is not None:
        examples = by_column(config.data, config.validation.by, {split: examples})[split]
    runtime.collectives.refuse_differences(f"the {split} rows", examples.fingerprint)
    loader = EvaluationLoader(
        examples,
        loader_keys_on(runtime.device.type, config.testing).model_copy(update={"drop_last": False}),  # every row counts
        boundary=longrope_boundary(model),
        rank=runtime.rank,
        world_size=runtime.world_size,
        collate=forward.collate,
    )
    evaluation = evaluate_model(runtime, model, tokenizer, loader, config.testing, metrics=metrics)
    return replace(
        evaluation,
        split=split,
        num_trained=num_trained,
        changes=changes,
        row_digests=examples.raw_digests(),
        tokens=examples.fingerprint,
    )


def _without_rows(*, has_base: bool) -> Evaluation:
    """Return an evaluation of no rows."""
    names: list[ModelName] = ["base", "tuned"] if has_base else ["tuned"]
    return Evaluation(
        num_rows=0,
        split="none",
        scores={name: Scores(loss=math.nan) for name in names},
        rows={name: RowValues((), (), {}) for name in names},
    )


def _take_changes(runtime: Runtime, splits: EncodedSplits, known: KnownRows) -> RowChanges | None:
    """Compare all rows with those that the run recorded. Other rows are a fallback. None if they are not compared."""
    if known.recorded is None or not known.has_same_data:
        return None
    changes = known.recorded.compare(chain(*raw_digests(splits).values()))
    if any(changes):
        wanted, used = "the rows that the run recorded", "those that there are now"
        runtime.fallbacks.take(Fallback(what="the data", wanted=wanted, used=used, why=str(changes)))
    return changes


def _warn_of_other_rows(runtime: Runtime, examples: EncodedExamples, split: str, known: KnownRows) -> None:
    """Take a fallback if a run that recorded no rows had another fingerprint of the split."""
    before = known.fingerprints.get(f"data.{split}", examples.fingerprint)
    if known.recorded is None and known.has_same_data and before != examples.fingerprint:
        why = "the data files or the tokenizer have changed, or this folder has other files of the same name"
        fallback = Fallback(what="the data", wanted=f"the {split} rows of the run", used="other rows", why=why)
        warning = f"the {split} rows are not those of the run, so training rows may be among them: {why}"
        runtime.fallbacks.take(fallback, warning=warning)


def _without_trained_rows(runtime: Runtime, examples: EncodedExamples, split: str, known: KnownRows) -> EncodedExamples:
    """Return the rows that no run was trained on; of the split train, all rows."""
    if split == "train" or not known.records:
        return examples
    trained = set[str]().union(*(record.trained for record in known.records))
    both = zip(examples.raw_digests(), examples.digests(with_targets=False), strict=True)
    untrained = [row for row, (raw, ids) in enumerate(both) if trained.isdisjoint((raw, ids.hex()))]
    if not untrained:
        raise DataError(
            f"the run was trained on all {len(examples):,} rows of the {split} split, so none is left to measure. Give "
            f"other rows with data.{split}=FILE, or measure the training rows with --split train."
        )
    if num_trained := len(examples) - len(untrained):
        wanted, used = f"{len(examples):,} rows", f"the {len(untrained):,} that the run was not trained on"
        why = f"rows that were trained on among them: {num_trained:,}"
        runtime.fallbacks.take(Fallback(what=f"the {split} split", wanted=wanted, used=used, why=why))
    return examples.select(untrained)
