"""The trainer that learns from rewards of the model's own answers. `Trainer` learns from answers that are given."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from finetune.data.batches import EvaluationLoader, TrainLoader
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.held_out import shuffled
from finetune.distributed.gradients import LossFunction
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import BY_DEVICE, Choices
from finetune.inference.decoding import Decoding
from finetune.inference.evaluation import answer_unless_stopped
from finetune.inference.losses import LossSums, SplitLosses
from finetune.inference.rewards import Rewards
from finetune.runs.rollouts import remove_rollouts_after
from finetune.runs.state import TrainerState
from finetune.training.checks import check_objective
from finetune.training.loop import Cadence
from finetune.training.objectives.group_loss import METRICS, GroupLoss, advantages_of
from finetune.training.objectives.groups import summed_group_loss
from finetune.training.prompt_rows import PromptRows, check_expected, read_rows
from finetune.training.reporting.journal import Journal
from finetune.training.rollouts import RolloutLoader, reward_on_main, stops_of
from finetune.training.step import LossWithMetrics
from finetune.training.trainer import Trainer, TrainingResults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config

_log = logging.getLogger(__name__)


class RewardTrainer(Trainer):
    """Trains a model on its own answers, by what reward functions give them: `training.objective=grpo`.

    Each row of a batch is a prompt. The loss of a validation is minus the mean reward of greedy answers.

    Collective: every rank makes one and calls the same methods in the same order.

    See `Trainer` for the arguments. The rows come from `encode_for_objective`. If `grpo.beta` is not 0, the model
    is a PEFT model.

    Raises:
        ConfigError: the reward functions and their weights do not fit, or the run trains every weight although its loss
            has a reference.
        DataError: a prompt is too long, or rows lack the expected answer that a function compares with.
    """

    objectives: ClassVar = ("grpo",)

    def __init__(
        self,
        runtime: Runtime,
        config: Config,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        splits: EncodedSplits,
    ) -> None:
        check_objective(config)
        self._rewards = Rewards.of(config)
        rows = read_rows(config.data) if self._rewards.need_columns else None
        self._train_prompts = PromptRows(splits.train, tokenizer, rows)
        check_expected(config, self._rewards, self._train_prompts)
        self._validation_prompts: PromptRows | None = None
        if splits.validation is not None:
            self._validation_prompts = PromptRows(_sample(config, splits.validation), tokenizer, rows)
            check_expected(config, self._rewards, self._validation_prompts)
        super().__init__(runtime, config, model, tokenizer, with_testable_rows(splits))

    @staticmethod
    def loss_of(config: Config, choices: Choices = BY_DEVICE) -> LossFunction:
        """See `Objective.loss_of`."""
        loss = GroupLoss(config.grpo, config.rollout.max_completion_length)
        compute = partial(summed_group_loss, loss=loss, temperature=config.rollout.temperature, choices=choices)
        return LossWithMetrics(compute, METRICS)

    @staticmethod
    def metrics_of(config: Config) -> tuple[str, ...]:
        """See `Objective.metrics_of`."""
        del config
        return ("reward",)

    @staticmethod
    def longest_row(config: Config, splits: Any) -> int:
        """See `Objective.longest_row`: no prompt with its answer is longer."""
        return int(splits.train.lengths.max()) + config.rollout.max_completion_length

    def prepare_dataloaders(self) -> tuple[TrainLoader, EvaluationLoader | None, EvaluationLoader | None]:
        """See `Trainer.prepare_dataloaders`. The first one generates the answers to learn from."""
        train, validation, test = super().prepare_dataloaders()
        rollouts: Any = RolloutLoader(self._setup, train.rule, self._train_prompts, self._rewards)
        return rollouts, validation, test

    def run_training(
        self, train_loader: TrainLoader, val_loader: EvaluationLoader | None = None
    ) -> tuple[TrainingResults, LossSums | None]:
        """See `Trainer.run_training`.

        Raises:
            ConfigError: a reward function is unknown or not allowed.
        """
        self._rewards.check()
        if isinstance(train_loader, RolloutLoader):
            train_loader.check_server()
        return super().run_training(train_loader, val_loader)

    def measure(self, loader: EvaluationLoader) -> SplitLosses:
        """Reward greedy answers to the sample of the validation split. Collective."""
        del loader
        prompts, setup, config = self._validation_prompts, self._setup, self.config
        assert prompts is not None
        length, size = config.rollout.max_completion_length, config.rollout.batch_size
        decoding = Decoding(stop_ids=stops_of(setup), max_new_tokens=length, keeps_stop=True)
        answers = answer_unless_stopped(self.runtime, self.model, prompts.prompts, decoding, batch_size=size)
        if answers is None:
            return SplitLosses(LossSums(num_cut_short=1.0))
        rewards = reward_on_main(setup, self._rewards, prompts, range(len(prompts)), answers)
        return SplitLosses(self._as_sums(rewards))

    def _as_sums(self, rewards: list[list[float]]) -> LossSums:
        """Set the metrics. Return the sums on the main process and zeros elsewhere: the caller adds up all ranks."""
        table = torch.tensor(rewards, dtype=torch.float64)
        total = advantages_of(table, self._rewards.weights, "none", num_generations=1).rewards[:, 0]
        given = total[total.isnan().logical_not()]
        names = self._rewards.metrics
        self.validation_metrics = {
            "reward": float(given.mean()),
            **{names[name]: float(table[:, place].nanmean()) for place, name in enumerate(self._rewards.names)},
        }
        shown = ", ".join(f"{name}={mean:.3f}" for name, mean in self.validation_metrics.items())
        _log.info("Validation: %s", shown)
        if not self.runtime.is_main_process:
            return LossSums()
        nats, count, squares = -float(given.sum()), float(len(given)), float(given.square().sum())
        return LossSums(nats, count, count, nats, squares)

    def _start_journal(
        self, journal: Journal, state: TrainerState, cadence: Cadence, optimizer: torch.optim.Optimizer
    ) -> None:
        if state.step == 0 or self.config.resume_allow:  # what changed may change the answers
            remove_rollouts_after(journal.folder, state.step)
        super()._start_journal(journal, state, cadence, optimizer)


def with_testable_rows(splits: EncodedSplits) -> EncodedSplits:
    """Leave out the test phase, which compares with expected answers, if its rows have none."""
    test = splits.test
    if test is None or any(test.prompt_and_answer(row).answer for row in range(len(test))):
        return splits
    _log.info("test is off: its rows have no expected answer")
    return replace(splits, test=None)


def _sample(config: Config, rows: EncodedExamples) -> EncodedExamples:
    """Return the rows that validations answer, the same in every validation."""
    return rows.select(sorted(shuffled(len(rows), config.data.split_seed)[: config.validation.num_samples]))
