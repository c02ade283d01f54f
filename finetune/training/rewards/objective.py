"""GRPO: learn from the rewards of the model's own answers."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from finetune.data.batches import EvaluationLoader
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedSplits
from finetune.data.examples import load_examples
from finetune.data.preferences import refuse_each_turn
from finetune.engine.loss import Choices, LossFunction
from finetune.errors import DataError
from finetune.inference.decoding import Decoding, SampledAnswer
from finetune.inference.losses import LossSums, SplitLosses
from finetune.inference.validation_answers import answer_unless_stopped
from finetune.runs.rollouts import remove_rollouts_after
from finetune.runs.state import TrainerState
from finetune.training.objective import Loaders, Objective
from finetune.training.reporting.run_warnings import RunWarnings
from finetune.training.rewards.conversations import SingleAnswers, ToolUse
from finetune.training.rewards.functions import Rewards
from finetune.training.rewards.groups import advantages_of, group_loss_of, has_turns, summed_group_loss
from finetune.training.rewards.prompt_rows import (
    ConversationRows,
    PromptRows,
    check_expected,
    read_rows_by_source,
    validation_sample,
)
from finetune.training.rewards.rollouts import RolloutLoader, mean_rewards, reward_on_main, stops_of
from finetune.training.rewards.tools import Environment, offered_tools, with_tools
from finetune.training.rewards.warnings import RewardWarnings
from finetune.training.step import LossWithMetrics
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.config.schema import Config
    from finetune.fallbacks import Fallbacks
    from finetune.training.objective import AnySplits, Setup

_log = logging.getLogger(__name__)


class RewardedAnswers(Objective):
    """GRPO: compare the model's own answers to a prompt by their rewards."""

    metrics = ("reward",)
    no_gradient = (
        "No answer had a reward, or all answers to each prompt had the same one: rollouts/ has the answers and their "
        "rewards. Correct the reward functions, or take prompts that are neither too easy nor too hard"
    )
    may_lack_gradient = True  # all answers to each prompt may have equal rewards

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.grpo.mask_truncated_completions:
            self.no_gradient = (
                f"{RewardedAnswers.no_gradient}. Or no answer has an end, and grpo.mask_truncated_completions leaves "
                "such answers out: raise rollout.max_completion_length"
            )
        self._prompts: dict[str, PromptRows] = {}
        self._warnings = RewardWarnings()
        self._answering = SingleAnswers()
        if schemas := offered_tools(config):  # a replay reads them instead of the code of the tools
            self.config = config.with_values({"rollout.tool_schemas": (schemas, "rollout.tools")})

    @cached_property
    def rewards(self) -> Rewards:
        """The reward functions of the run."""
        return Rewards.of(self.config)

    def encode(self, tokenizer: PreTrainedTokenizerBase, *, fallbacks: Fallbacks, is_checked: bool) -> AnySplits:
        """Read and encode the prompts, with the expected answers of rows that have one."""
        refuse_each_turn(self.config.data)
        examples = load_examples(self.config.data, self.facts.reads)
        for source in examples.wholes():
            source.tools = offered_tools(self.config)
            source.offer = partial(with_tools, tools=source.tools)
        return encode_examples(examples, tokenizer, self.config.data, fallbacks=fallbacks, is_checked=is_checked)

    def check(self, *, rewards_answers: bool) -> None:
        """Load the reward functions, and refuse those that cannot be called."""
        rewards = self.rewards
        if rewards_answers:
            rewards.check()
            if self.config.rollout.environment:
                Environment(self.config.rollout).check()

    def prepare(self, model: Any, tokenizer: PreTrainedTokenizerBase, splits: EncodedSplits) -> EncodedSplits:
        """Read the prompts, and check that rows have what the reward functions compare with."""
        del model
        has_environment = bool(self.config.rollout.environment)
        rows_of = ConversationRows if has_turns(self.config.rollout) else PromptRows
        rows = read_rows_by_source(self.config.data) if self.rewards.need_columns or has_environment else None
        answered = {"train": splits.train}
        if splits.validation is not None:
            answered["validation"] = validation_sample(self.config, splits.validation)
        for name, examples in answered.items():
            self._prompts[name] = rows_of(examples, tokenizer, rows)
            check_expected(self.config, self.rewards, self._prompts[name])
        if rows is not None:  # functions get more of a row than its tokens
            measured = [splits.train, *([] if splits.validation is None else [splits.validation])]
            digests = [rows[split.source(row)].digest for split in measured for row in range(len(split))]
            self.fingerprints = {"columns": hashlib.sha256(" ".join(digests).encode()).hexdigest()}
        if has_turns(self.config.rollout):
            self._answering = ToolUse(self.config, tokenizer, offered_tools(self.config))
            _log.info("test is off: it asks for single answers, and this run learns conversations")
            return replace(splits, test=None)
        return with_testable_rows(splits)

    def loss(self, choices: Choices) -> LossFunction:
        """Return the function that sums the clipped loss and the metrics over the tokens of the answers."""
        config = self.config
        loss = group_loss_of(config)
        compute = partial(summed_group_loss, loss=loss, temperature=config.rollout.temperature, choices=choices)
        return LossWithMetrics(compute, loss.metrics)

    def longest_row(self, splits: Any) -> int:
        """Return an upper limit: the longest prompt with the longest answer."""
        return super().longest_row(splits) + self.config.rollout.max_completion_length

    def loaders(self, setup: Setup, loaders: Loaders) -> Loaders:
        """Generate the answers to learn from."""
        if self._answering.fallback is not None:
            setup.runtime.fallbacks.take(self._answering.fallback)
        rule, prompts = loaders.train.rule, self._prompts["train"]
        return loaders._replace(
            train=RolloutLoader(setup, rule, prompts, self.rewards, self._answering, self._warnings)
        )

    def start(self, setup: Setup, train_loader: RolloutLoader, state: TrainerState) -> None:
        """Check the reward functions and the server. Remove recorded answers that the run will not learn from."""
        train_loader.check_sources()
        if state.step == 0 or self.config.resume_allow:  # what changed may change the answers
            setup.on_main(lambda journal: remove_rollouts_after(journal.folder, state.step), "removing old rollouts")

    def measure(self, setup: Setup, loader: EvaluationLoader) -> SplitLosses:
        """Reward greedy answers to the sample of the validation split. Collective."""
        del loader
        prompts, section = self._prompts["validation"], self.config.rollout
        decoding = Decoding(stop_ids=stops_of(setup), max_new_tokens=section.max_completion_length, keeps_stop=True)
        ask = partial(answer_unless_stopped, setup.runtime, setup.model, batch_size=section.batch_size)

        def draw(heads: Sequence[Sequence[int]], decoding: Decoding) -> list[SampledAnswer] | None:
            ids = ask(heads, decoding)
            return None if ids is None else [SampledAnswer(each, []) for each in ids]

        rows = map(prompts.row, range(len(prompts)))
        answers = self._answering.converse(
            prompts.prompts, decoding, draw, rows=rows, runtime=setup.runtime, model=setup.model
        )
        if answers is None:
            return SplitLosses(LossSums(num_cut_short=1.0))
        rewards = reward_on_main(setup, self.rewards, prompts, range(len(prompts.prompts)), answers)
        table = torch.tensor(rewards, dtype=torch.float64)
        total = advantages_of(table, self.rewards.weights, "none", num_generations=1).rewards[:, 0]
        valid_rewards = total[total.isnan().logical_not()]
        if not len(valid_rewards):
            raise DataError(
                f"reward.functions ({', '.join(self.rewards.names)}) gave no reward to any of "
                f"{counted(len(total), 'validation answer')}; expected a number for at least one. Correct the "
                "functions, or validate on other rows: data.validation."
            )
        metrics = {"reward": float(valid_rewards.mean()), **mean_rewards(self.rewards, table)}
        if not setup.runtime.is_main_process:  # the caller adds up all ranks, which have the same rewards
            return SplitLosses(LossSums(), metrics=metrics)
        loss, count = -float(valid_rewards.sum()), float(len(valid_rewards))
        squares = float(valid_rewards.square().sum())
        return SplitLosses(LossSums(loss, count, count, loss, squares), metrics=metrics)

    def warnings(self) -> RunWarnings:
        """Return what checks rewards and answers, too."""
        return self._warnings


def with_testable_rows(splits: EncodedSplits) -> EncodedSplits:
    """Leave out the test phase, which compares with expected answers, if its rows have none."""
    test = splits.test
    if test is None or any(test.prompt_and_answer(row).answer for row in range(len(test))):
        return splits
    _log.info("test is off: its rows have no expected answer")
    return replace(splits, test=None)
