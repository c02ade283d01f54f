"""Measure a loaded model on one of a run's splits, with the forward that training uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from finetune.config.schema import Config
from finetune.data.batches import EvaluationLoader, loader_keys_on
from finetune.data.encode import encode_examples
from finetune.data.examples import load_examples
from finetune.data.subsets import by_column
from finetune.distributed.runtime import Runtime
from finetune.errors import ConfigError
from finetune.inference.answer_metrics import Metric
from finetune.inference.evaluation import evaluate_model
from finetune.inference.finished_run import LoadedRun, place_finished_run
from finetune.inference.scores import Evaluation
from finetune.model.base import longrope_boundary
from finetune.training.forward import agree_on_forward

_log = logging.getLogger(__name__)


def measure_split(
    runtime: Runtime,
    config: Config,
    loaded: LoadedRun,
    split: str,
    metrics: Mapping[str, Metric],
    *,
    rows_of_run: str | None = None,
) -> Evaluation:
    """Place a model, and measure it on every row of a split. Collective: every rank.

    Args:
        runtime: the world of processes.
        config: of the run; `testing` has the batch size, the longest answer and the number of answers to keep.
        loaded: a model that is not placed yet, and its tokenizer.
        split: train, validation or test.
        metrics: of generated answers, by name.
        rows_of_run: the fingerprint of the rows that the run had; a warning says if these are others. None: not known.

    Raises:
        ConfigError: the run has no such split, or metrics are asked for and its rows have no answers.
    """
    model, tokenizer = loaded
    # Before the model is sharded: the engine refuses one with hooks.
    forward = agree_on_forward(runtime, config.training, model)
    place_finished_run(runtime, model)
    splits = encode_examples(load_examples(config.data), tokenizer, config.data, fallbacks=runtime.fallbacks)
    examples = getattr(splits, split)
    if examples is None:
        others = "" if split == "validation" or splits.validation is None else " Or measure --split validation."
        raise ConfigError(f"this run has no {split} split. Give one with data.{split}=FILE_OR_SPLIT.{others}")
    if metrics and examples.row_type == "text":
        raise ConfigError(
            f"the {split} split is plain text, in which there are no answers to measure by {', '.join(metrics)}. Drop "
            "--metric, and set testing.metrics=[] where the run's config names some."
        )
    if rows_of_run not in (None, examples.fingerprint):
        _log.warning(
            "the %s rows are not those of the run, so training rows may be among them. The data files or the tokenizer "
            "have changed, or this folder has other files of the same name.",
            split,
        )
    if config.validation.by is not None:
        examples = by_column(config.data, config.validation.by, {split: examples})[split]
    runtime.refuse_differences(f"the {split} rows", examples.fingerprint)
    loader = EvaluationLoader(
        examples,
        loader_keys_on(runtime.device.type, config.testing).model_copy(update={"drop_last": False}),  # every row counts
        boundary=longrope_boundary(model),
        rank=runtime.rank,
        world_size=runtime.world_size,
        collate=forward.collate,
    )
    return evaluate_model(runtime, model, tokenizer, loader, config.testing, metrics=metrics)
