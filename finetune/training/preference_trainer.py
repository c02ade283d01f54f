"""The trainer for pairs of answers and labelled answers. It differs from `Trainer` only in loss and micro-batches."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from finetune.config.objectives import OBJECTIVES
from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.labelled import EncodedLabelled
from finetune.data.objective import AnySplits
from finetune.data.preferences import EncodedPairs
from finetune.distributed.gradients import LossFunction
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import BY_DEVICE, Choices
from finetune.errors import ConfigError, DataError
from finetune.inference.losses import SplitLosses
from finetune.model.base import longrope_boundary
from finetune.training.checks import check_objective
from finetune.training.objectives.preference_losses import PreferenceLoss
from finetune.training.objectives.preferences import (
    local_sums,
    measure_rows,
    put_labelled_together,
    put_pairs_together,
    sum_preference_losses,
    summed_preferences,
    with_global_sums,
)
from finetune.training.step import LossWithMetrics
from finetune.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_log = logging.getLogger(__name__)


class PreferenceTrainer(Trainer):
    """Trains a model to prefer chosen or good answers: `training.objective=dpo|kto|orpo|simpo`.

    Each row of a batch is a pair or, for KTO, a labelled answer; the loss is the mean over them.

    Collective: every rank makes one and calls the same methods in the same order.

    See `Trainer` for the arguments. The rows are encoded pairs or labelled answers, as the objective needs them.
    If it has a reference, the model is a PEFT model. A script that does not set `training.objective` trains and
    records dpo.

    Raises:
        ConfigError: there is no adapter to switch off, or it does not start at the base; the objective is sft, has
            other rows, or does not read a key of the section `preference` that is set.
        DataError: a LongRoPE model would use different factors for answers that are compared with each other.
    """

    objectives: ClassVar = tuple(name for name, each in OBJECTIVES.items() if each.rows in ("pairs", "labelled"))

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: AnySplits,
    ) -> None:
        config = _with_objective(config)
        check_objective(config)
        _refuse_other_rows(config, splits)
        for split in (splits.train, splits.validation):
            _refuse_straddling(split, longrope_boundary(model))
        super().__init__(runtime, config, model, tokenizer, splits)  # type: ignore[arg-type]  # other rows than there
        if isinstance(splits.train, EncodedLabelled):
            _warn_of_imbalance(config, splits.train)

    @staticmethod
    def loss_of(config: Config, choices: Choices = BY_DEVICE) -> LossFunction:
        """See `Objective.loss_of`."""
        loss = _loss_of(config)
        return LossWithMetrics(
            partial(summed_preferences, loss=loss, choices=choices),
            loss.metrics,
            global_sums=partial(local_sums, loss=loss) if loss.needs_global_sums else None,
            with_global_sums=with_global_sums,
        )

    @staticmethod
    def evaluation_of(config: Config, choices: Choices = BY_DEVICE) -> Any:
        """See `Objective.evaluation_of`."""
        return partial(measure_rows, objective=_loss_of(config).objective, choices=choices)

    @staticmethod
    def metrics_of(config: Config) -> tuple[str, ...]:
        """See `Objective.metrics_of`."""
        return _loss_of(config).metrics

    @staticmethod
    def collation_of(config: Config, collate: Collate) -> Any:
        """See `Objective.collation_of`: a row is a pair or a labelled answer here."""
        if OBJECTIVES[config.training.objective].rows == "labelled":
            return partial(put_labelled_together, rows=collate)
        return partial(put_pairs_together, rows=collate, learns_prompt=config.training.objective == "orpo")

    def measure(self, loader: EvaluationLoader) -> SplitLosses:
        """See `Objective.measure`."""
        loss = _loss_of(self.config)
        sums, metrics = sum_preference_losses(self.runtime, self.model, loader, loss=loss)
        num_pairs, num_cut_short, *totals = self.runtime.sum([sums.num_targets, sums.num_cut_short, *metrics])
        if num_pairs and not num_cut_short:
            means = {name: total / num_pairs for name, total in zip(loss.metrics, totals, strict=True)}
            self.validation_metrics = {name: mean for name, mean in means.items() if not math.isnan(mean)}
            _log.info(
                "Validation: %s", ", ".join(f"{name}={mean:.3f}" for name, mean in self.validation_metrics.items())
            )
        return SplitLosses(sums)


def _loss_of(config: Config) -> PreferenceLoss:
    return PreferenceLoss(config.training.objective, config.preference)


def _with_objective(config: Config) -> Config:
    """Set the objective to dpo if none is set: scripts older than the key do not set it."""
    if config.training.objective != "sft":
        return config
    origin = config.origin("training.objective")
    if origin != "default":
        raise ConfigError(
            f"training.objective is sft ({origin}), but PreferenceTrainer trains on pairs of answers. Set "
            "training.objective=dpo, or use Trainer."
        )
    return config.model_copy(update={"training": config.training.model_copy(update={"objective": "dpo"})})


def _refuse_other_rows(config: Config, splits: AnySplits) -> None:
    objective = OBJECTIVES[config.training.objective]
    types = {"pairs": (EncodedPairs, "encode_preferences"), "labelled": (EncodedLabelled, "encode_labelled")}
    row_type, function = types[objective.rows]
    if not isinstance(splits.train, row_type):
        raise ConfigError(
            f"training.objective is {objective.name} ({config.origin('training.objective')}), but the rows were not "
            f"encoded for it. Encode them with {function} or encode_for_objective."
        )


def _warn_of_imbalance(config: Config, rows: EncodedLabelled) -> None:
    """Warn where good and bad answers have very different weights: the paper advises 1:1 to 4:3 (section 4.2)."""
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
    one, other = split.chosen.lengths <= boundary, split.rejected.lengths <= boundary
    straddling = (one != other).nonzero()[:, 0].tolist()
    if straddling:
        raise DataError(
            f"{len(straddling)} pairs have one side of at most {boundary} tokens and a longer one; the first is "
            f"{split.chosen.source(straddling[0])}. LongRoPE would rotate both sides with the factors of the longer "
            f"one. Set data.max_length={boundary}, or remove these pairs."
        )
