"""GRPO: learn from the rewards of the model's own answers."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import EvaluationLoader
from finetune.data.encoded import EncodedExamples, EncodedSplits
from finetune.data.splits import shuffled
from finetune.distributed.gradients import LossFunction
from finetune.engine.loss import Choices, cross_entropy_per_target
from finetune.inference.decoding import Decoding
from finetune.inference.evaluation import answer_unless_stopped
from finetune.inference.losses import LossSums, SplitLosses
from finetune.runs.rollouts import remove_rollouts_after
from finetune.runs.state import TrainerState
from finetune.training.objective import Loaders, Prepared, TrainingObjective
from finetune.training.rewards.functions import Rewards
from finetune.training.rewards.groups import METRICS, GroupLoss, advantages_of, summed_group_loss
from finetune.training.rewards.prompt_rows import PromptRows, check_expected, read_rows_by_source
from finetune.training.rewards.rollouts import RolloutLoader, reward_on_main, stops_of
from finetune.training.rewards.warnings import RewardWarnings
from finetune.training.step import LossWithMetrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.training.objective import Setup

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Prompts:
    """The prompts of a run, and the functions that reward the answers to them."""

    rewards: Rewards
    train: PromptRows
    validation: PromptRows | None


def _check(config: Config, rewards_answers: bool) -> None:
    """Load the reward functions, and refuse those that cannot be called."""
    rewards = Rewards.of(config)
    if rewards_answers:
        rewards.check()


def _prepare(config: Config, model: Any, tokenizer: PreTrainedTokenizerBase, splits: EncodedSplits) -> Prepared:
    """Read the prompts, and check that rows have what the reward functions compare with."""
    del model
    rewards = Rewards.of(config)
    rows = read_rows_by_source(config.data) if rewards.need_columns else None

    def prompts_of(examples: EncodedExamples) -> PromptRows:
        prompts = PromptRows(examples, tokenizer, rows)
        check_expected(config, rewards, prompts)
        return prompts

    train = prompts_of(splits.train)
    validation = None if splits.validation is None else prompts_of(_sample(config, splits.validation))
    return Prepared(with_testable_rows(splits), _Prompts(rewards, train, validation))


def _loss(config: Config, choices: Choices) -> LossFunction:
    loss = GroupLoss(config.grpo, config.rollout.max_completion_length)
    compute = partial(summed_group_loss, loss=loss, temperature=config.rollout.temperature, choices=choices)
    return LossWithMetrics(compute, METRICS)


def _evaluation(config: Config, choices: Choices) -> Any:
    del config
    return partial(cross_entropy_per_target, choices=choices)


def _longest_row(config: Config, splits: Any) -> int:
    """Return an upper limit: the longest prompt with the longest answer."""
    return int(splits.train.lengths.max()) + config.rollout.max_completion_length


def _loaders(setup: Setup, prompts: _Prompts, loaders: Loaders) -> Loaders:
    """Generate the answers to learn from."""
    return loaders._replace(train=RolloutLoader(setup, loaders.train.rule, prompts.train, prompts.rewards))


def _start(setup: Setup, train_loader: RolloutLoader, state: TrainerState) -> None:
    """Check the reward functions and the server. Remove recorded answers that the run will not learn from."""
    train_loader.check_sources()
    if state.step == 0 or setup.config.resume_allow:  # what changed may change the answers
        setup.on_main(lambda journal: remove_rollouts_after(journal.folder, state.step), "removing old rollouts")


def _measure(setup: Setup, loader: EvaluationLoader, prompts: _Prompts) -> SplitLosses:
    """Reward greedy answers to the sample of the validation split. Collective."""
    del loader
    assert prompts.validation is not None
    section = setup.config.rollout
    decoding = Decoding(stop_ids=stops_of(setup), max_new_tokens=section.max_completion_length, keeps_stop=True)
    token_ids = prompts.validation.prompts
    answers = answer_unless_stopped(setup.runtime, setup.model, token_ids, decoding, batch_size=section.batch_size)
    if answers is None:
        return SplitLosses(LossSums(num_cut_short=1.0))
    rewards = reward_on_main(setup, prompts.rewards, prompts.validation, range(len(token_ids)), answers)
    table = torch.tensor(rewards, dtype=torch.float64)
    total = advantages_of(table, prompts.rewards.weights, "none", num_generations=1).rewards[:, 0]
    valid_rewards = total[total.isnan().logical_not()]
    names = prompts.rewards.metrics
    metrics = {
        "reward": float(valid_rewards.mean()),
        **{names[name]: float(table[:, place].nanmean()) for place, name in enumerate(prompts.rewards.names)},
    }
    if not setup.runtime.is_main_process:  # the caller adds up all ranks, which have the same rewards
        return SplitLosses(LossSums(), metrics=metrics)
    loss, count, squares = -float(valid_rewards.sum()), float(len(valid_rewards)), float(valid_rewards.square().sum())
    return SplitLosses(LossSums(loss, count, count, loss, squares), metrics=metrics)


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


GRPO = TrainingObjective(
    loss=_loss,
    evaluation=_evaluation,
    measure=_measure,
    metrics=("reward",),
    check=_check,
    prepare=_prepare,
    longest_row=_longest_row,
    loaders=_loaders,
    start=_start,
    warnings=RewardWarnings,
    no_gradient=(
        "No answer had a reward, or all answers to each prompt had the same one: rollouts/ has the answers and their "
        "rewards. Correct the reward functions, or take prompts that are neither too easy nor too hard"
    ),
)
