"""Supervised fine-tuning: learn the answers of the rows by their cross-entropy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from finetune.data.batches import EvaluationLoader
from finetune.distributed.gradients import LossFunction
from finetune.engine.loss import Choices, cross_entropy_per_target, summed_cross_entropy
from finetune.inference.losses import SplitLosses, sum_losses
from finetune.training.objective import TrainingObjective

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.training.objective import Setup


def _loss(config: Config, choices: Choices) -> LossFunction:
    del config
    return partial(summed_cross_entropy, choices=choices)


def _evaluation(config: Config, choices: Choices) -> Any:
    del config
    return partial(cross_entropy_per_target, choices=choices)


def _measure(setup: Setup, loader: EvaluationLoader, prompts: Any) -> SplitLosses:
    del prompts
    return sum_losses(setup.runtime, setup.model, loader, is_to_stop=setup.runtime.stop_requests.is_on_any_rank)


SFT = TrainingObjective(loss=_loss, evaluation=_evaluation, measure=_measure)
