"""The objectives that compare answers: DPO, ORPO and SimPO on pairs, KTO on labelled answers.

The formulas are in `finetune.training.preferences.losses`.
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.config.objectives import OBJECTIVES
from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.preferences import EncodedLabelled
from finetune.distributed.gradients import LossFunction
from finetune.engine.loss import Choices
from finetune.errors import DataError
from finetune.inference.losses import SplitLosses
from finetune.model.base import longrope_boundary
from finetune.training.objective import Prepared, TrainingObjective
from finetune.training.preferences.losses import KTO_METRICS, METRICS, PreferenceLoss
from finetune.training.preferences.microbatches import (
    local_sums,
    measure_rows,
    put_labelled_together,
    put_pairs_together,
    sum_preference_losses,
    summed_preferences,
    with_global_sums,
)
from finetune.training.step import LossWithMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.training.objective import Setup

_log = logging.getLogger(__name__)


def _loss(config: Config, choices: Choices) -> LossFunction:
    loss = _loss_of(config)
    return LossWithMetrics(
        partial(summed_preferences, loss=loss, choices=choices),
        loss.metrics,
        global_sums=partial(local_sums, loss=loss) if loss.needs_global_sums else None,
        with_global_sums=with_global_sums,
    )


def _evaluation(config: Config, choices: Choices) -> Any:
    return partial(measure_rows, objective=_loss_of(config).objective, choices=choices)


def _measure(setup: Setup, loader: EvaluationLoader, prompts: Any) -> SplitLosses:
    del prompts
    loss = _loss_of(setup.config)
    sums, metrics = sum_preference_losses(setup.runtime, setup.model, loader, loss=loss)
    num_rows, num_cut_short, *totals = setup.runtime.collectives.sum([sums.num_targets, sums.num_cut_short, *metrics])
    if not num_rows or num_cut_short:
        return SplitLosses(sums)
    means = {name: total / num_rows for name, total in zip(loss.metrics, totals, strict=True)}
    return SplitLosses(sums, metrics={name: mean for name, mean in means.items() if not math.isnan(mean)})


def _collate_pairs(config: Config, collate: Collate) -> Any:
    return partial(put_pairs_together, rows=collate, learns_prompt=config.training.objective == "orpo")


def _collate_labelled(config: Config, collate: Collate) -> Any:
    del config
    return partial(put_labelled_together, rows=collate)


def _prepare(config: Config, model: Any, tokenizer: PreTrainedTokenizerBase, splits: Any) -> Prepared:
    """Refuse pairs that need different LongRoPE factors for their two answers, and warn of unequal labels."""
    del tokenizer
    for split in (splits.train, splits.validation):
        _refuse_straddling(split, longrope_boundary(model))
    if isinstance(splits.train, EncodedLabelled):
        _warn_of_imbalance(config, splits.train)
    return Prepared(splits)


def _loss_of(config: Config) -> PreferenceLoss:
    return PreferenceLoss(config.training.objective, config.preference)


def _warn_of_imbalance(config: Config, rows: EncodedLabelled) -> None:
    """Warn if good and bad answers have very different weights: the paper advises 1:1 to 4:3 (section 4.2)."""
    num_good = int(rows.is_good.sum())
    good = config.preference.desirable_weight * num_good
    bad = config.preference.undesirable_weight * (len(rows) - num_good)
    if not 1.0 <= (good / bad if bad else math.inf) <= 4 / 3:
        _log.warning(
            "the %d good answers have a weight of %g in the loss and the %d bad ones %g; KTO's paper advises 1:1 to "
            "4:3. Set preference.desirable_weight or preference.undesirable_weight",
            *(num_good, good, len(rows) - num_good, bad),
        )


def _refuse_straddling(split: Any, boundary: int | None) -> None:
    if split is None or boundary is None:
        return
    if isinstance(split, EncodedLabelled):
        if split.longest_mismatched > boundary:
            raise DataError(
                f"{split.label}: the longest prompt with the longest answer has {split.longest_mismatched} tokens. KTO "
                f"puts prompts before the answers of other rows, and LongRoPE rotates rows of more than {boundary} "
                f"tokens with other factors. Set data.max_length={boundary}."
            )
        return
    chosen_is_short, rejected_is_short = (side.lengths <= boundary for side in split.sides)
    straddling = (chosen_is_short != rejected_is_short).nonzero()[:, 0].tolist()
    if straddling:
        raise DataError(
            f"{len(straddling)} pairs have one side of at most {boundary} tokens and a longer one; the first is "
            f"{split.chosen.source(straddling[0])}. LongRoPE would rotate both sides with the factors of the longer "
            f"one. Set data.max_length={boundary}, or remove these pairs."
        )


_EQUAL = "In each pair, the chosen and the rejected answer may be the same: see finetune preview. "
PREFERENCES = {
    name: TrainingObjective(
        loss=_loss,
        evaluation=_evaluation,
        measure=_measure,
        metrics=KTO_METRICS if objective.rows == "labelled" else METRICS,
        prepare=_prepare,
        collate=_collate_labelled if objective.rows == "labelled" else _collate_pairs,
        no_gradient=f"{_EQUAL if objective.rows == 'pairs' else ''}{TrainingObjective.no_gradient}",
    )
    for name, objective in OBJECTIVES.items()
    if objective.rows in ("pairs", "labelled")
}
"""By the value of `training.objective`."""
