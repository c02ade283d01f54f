"""The trainer for pairs of answers. It differs from `Trainer` only in the loss and the micro-batches."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.preferences import EncodedPairs, EncodedPairSplits
from finetune.distributed.gradients import LossFunction
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import BY_DEVICE, Choices
from finetune.errors import ConfigError, DataError
from finetune.inference.losses import LossSums
from finetune.model.base import longrope_boundary
from finetune.training.preference import FIGURES, put_pairs_together, sum_preference_losses, summed_preferences
from finetune.training.step import LossWithFigures
from finetune.training.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_log = logging.getLogger(__name__)


class PreferenceTrainer(Trainer):
    """Trains an adapter to prefer chosen answers, measured against the base (DPO).

    Each row of a batch is a pair, and the loss is in nats per pair: log 2 before anything is learnt.

    Collective: every rank makes one and calls the same methods in the same order.

    Args:
        runtime: this process's place in the world.
        config: the whole run; `training.objective` is recorded as dpo, even if a script does not set it.
        model: a PEFT model, on the CPU.
        tokenizer: the model's.
        splits: encoded pairs.

    Raises:
        ConfigError: there is no adapter to switch off, or it does not start at the base; or the objective is sft.
        DataError: a LongRoPE model would rotate the two sides of a pair differently.
    """

    objective = "dpo"

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: EncodedPairSplits,
    ) -> None:
        config = _with_objective(config)
        check_reference(config)
        for split in (splits.train, splits.validation):
            _refuse_straddling(split, longrope_boundary(model))
        super().__init__(runtime, config, model, tokenizer, splits)  # type: ignore[arg-type]  # a row is a pair here

    @staticmethod
    def loss_of(config: Config, choices: Choices = BY_DEVICE) -> LossFunction:
        """See `Trainer.loss_of`."""
        return LossWithFigures(partial(summed_preferences, beta=config.preference.beta, choices=choices), FIGURES)

    @staticmethod
    def collation_of(collate: Collate) -> Any:
        """See `Trainer.collation_of`: a row is a pair here."""
        return partial(put_pairs_together, rows=collate)

    def measure(self, loader: EvaluationLoader) -> LossSums:
        """See `Trainer.measure`."""
        beta = self.config.preference.beta
        sums, figures = sum_preference_losses(self.runtime, self.model, loader, beta=beta)
        num_pairs, num_cut_short, *totals = self.runtime.sum([sums.num_targets, sums.num_cut_short, *figures])
        if num_pairs and not num_cut_short:
            self.validation_figures = {name: total / num_pairs for name, total in zip(FIGURES, totals, strict=True)}
            _log.info(
                "Validation: %s", ", ".join(f"{name}={mean:.3f}" for name, mean in self.validation_figures.items())
            )
        return sums


def check_reference(config: Config) -> None:
    """Refuse a run whose reference would not be the base.

    Raises:
        ConfigError: the run trains every weight, or starts from another adapter.
    """
    if config.training.method != "lora":
        raise ConfigError(
            f"training.method is {config.training.method}, but the reference of DPO is the base with its adapter "
            "switched off. Set training.method=lora."
        )
    if config.lora.start_from is not None:
        raise ConfigError(
            f"lora.start_from is {config.lora.start_from}, but the reference of DPO is the base without any "
            "adapter. Merge that adapter into its base first, and name the merged model in model.path."
        )


def _with_objective(config: Config) -> Config:
    """Set the objective to dpo: scripts older than the key do not set it."""
    origin = config.origin("training.objective")
    if config.training.objective == "sft" and origin != "default":
        raise ConfigError(
            f"training.objective is sft ({origin}), but PreferenceTrainer trains on pairs of answers. Set "
            "training.objective=dpo, or use Trainer."
        )
    return config.model_copy(update={"training": config.training.model_copy(update={"objective": "dpo"})})


def _refuse_straddling(split: EncodedPairs | None, boundary: int | None) -> None:
    if split is None or boundary is None:
        return
    one, other = split.chosen.lengths <= boundary, split.rejected.lengths <= boundary
    straddling = (one != other).nonzero()[:, 0].tolist()
    if straddling:
        raise DataError(
            f"{len(straddling)} pairs have one side of at most {boundary} tokens and a longer one; the first is "
            f"{split.chosen.source(straddling[0])}. LongRoPE would rotate both sides with the factors of the longer "
            f"one. Set data.max_length={boundary}, or remove these pairs."
        )
