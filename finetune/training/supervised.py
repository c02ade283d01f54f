"""Supervised fine-tuning: learn the answers of the rows by their cross-entropy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from finetune.data.batches import EvaluationLoader
from finetune.engine.loss import Choices, LossFunction, summed_cross_entropy
from finetune.inference.losses import SplitLosses, sum_losses
from finetune.training.objective import Objective

if TYPE_CHECKING:
    from finetune.training.objective import Setup


class Supervised(Objective):
    """Next-token cross-entropy of the answers."""

    def loss(self, choices: Choices) -> LossFunction:
        """Return the function that sums −log p over the targets."""
        return partial(summed_cross_entropy, choices=choices)

    def measure(self, setup: Setup, loader: EvaluationLoader) -> SplitLosses:
        """Sum the losses of this rank's rows. Collective."""
        return sum_losses(setup.runtime, setup.model, loader, is_to_stop=setup.runtime.stop_requests.is_on_any_rank)
