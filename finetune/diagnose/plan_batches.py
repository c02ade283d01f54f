"""Split the rows of a run into steps and micro-batches, and find the largest one of training, validation and test.

If a run generates its rows (`training.objective=grpo`), every answer is assumed to have as many tokens as it may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy
import torch

from finetune.config.keys import values
from finetune.config.schema import Config
from finetune.data.batches import BatchRule, evaluation_batches
from finetune.data.encoded import EncodedExample, EncodedExamples, EncodedSplits
from finetune.data.preferences import EncodedLabelled, EncodedPairs
from finetune.engine.prefixes import RowGroup, Tokens
from finetune.inference.decoding import group_prompts, room_for_answer
from finetune.model.base import max_context
from finetune.training.cadence import Cadence
from finetune.training.loaders import global_batch_size, plan_batches, refuse_dropping_all, rows_to_test
from finetune.training.memory.generation import AnswerBatch
from finetune.training.rewards.objective import with_testable_rows
from finetune.training.validation import answered_rows
from finetune.units import ceil_div

if TYPE_CHECKING:
    from finetune.training.objective import AnySplits

_MOST_STEPS_LOOKED_AT = 500
_FILLER_TOKEN = 1
Section = Literal["validation", "testing"]


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The figures of rows and steps.

    A row is a pair of answers where preferences are trained, and with `data.train_on=each_turn` one answer of a
    conversation.
    """

    rows: int | None
    """Rows of an epoch, or prompts; None if the data could not be read."""
    answers_per_prompt: int | None
    """With `training.objective=grpo`: answers to each prompt. Tokens and rows of micro-batches are those of answers,
    each assumed to be as long as `rollout.max_completion_length` allows; else None."""
    conversations: int | None
    """With `data.train_on=each_turn`: conversations of an epoch, which the global batch counts; else None."""
    tokens: int | None
    """Tokens of an epoch; None likewise."""
    target_tokens: int | None
    computed_share: float | None
    """Tokens that go through the model, over all tokens: shared prefixes count once, padding counts."""
    global_batch_size: int
    rows_per_sequence: float | None
    """Rows, or conversations, with as many tokens as a sequence of `data.max_length`, which other tools fill with rows.
    None if the data could not be read, or `training.objective` is not sft."""
    global_batch_from: str
    """The settings that give it, in words."""
    world_size: int
    steps_per_epoch: int | None
    steps: int | None
    microbatches_per_step: int
    """On the busiest rank."""
    largest_microbatch_rows: int
    largest_microbatch_tokens: int
    """Computed."""


class AssumedAnswers:
    """The rows of a rollout before it is generated: each prompt with answers that begin differently.

    Like encoded rows, without their memory: a row is made when it is asked for. The answers to a prompt follow each
    other, prompt after prompt.

    Args:
        prompts: token ids of each prompt.
        limits: the most tokens of an answer to each prompt.
        per_prompt: answers to each prompt.
        global_batch_size: prompts of a step.

    Attributes:
        per_step: the most answers of a step.
        lengths: tokens of each row, int64, shape (rows,).
        num_targets: tokens of each answer, int64, shape (rows,).
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], *, per_prompt: int, global_batch_size: int
    ) -> None:
        self.prompts, self.per_prompt = prompts, per_prompt
        self._ids = [numpy.array(prompt, dtype=numpy.int32) for prompt in prompts]
        self.per_step = per_prompt * min(len(prompts), global_batch_size)
        self.num_targets = torch.tensor(limits).repeat_interleave(per_prompt)
        lengths = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
        self.lengths = torch.tensor(lengths).repeat_interleave(per_prompt)

    @classmethod
    def of(
        cls, config: Config, model: Any, prompts: Sequence[Sequence[int]] | None, global_batch_size: int
    ) -> AssumedAnswers:
        """Assume the answers of a run. Without prompts, assume those of a step, each as long as it may be."""
        longest, context = config.rollout.max_completion_length, max_context(model)
        if prompts is None:
            length = config.data.max_length
            length = length if context is None else max(1, min(length, context - longest))
            prompts = [[row, *[_FILLER_TOKEN] * (length - 1)] for row in range(global_batch_size)]
        limits = [max(1, room_for_answer(model, prompt, longest)) for prompt in prompts]
        return cls(prompts, limits, per_prompt=config.rollout.num_generations, global_batch_size=global_batch_size)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedExample:
        ids = torch.from_numpy(self.tokens(index)).long()
        return EncodedExample(ids, torch.arange(len(ids)) >= len(ids) - self.num_targets[index])

    @property
    def sides(self) -> tuple[AssumedAnswers, ...]:
        """The one side that answers have."""
        return (self,)

    def tokens(self, index: int) -> Tokens:
        """Return the token ids of a row, shape (time,)."""
        prompt, answer = self._ids[index // self.per_prompt], index % self.per_prompt
        ids = numpy.full(int(self.lengths[index]), _FILLER_TOKEN, dtype=numpy.int32)
        ids[: len(prompt)] = prompt
        ids[len(prompt)] = answer
        return ids

    def longest_prompts(self, number: int) -> list[Sequence[int]]:
        """Return the prompts of so many answers of a step, if they are the longest ones. The longest is last."""
        ordered = sorted(self.prompts, key=len, reverse=True)
        repeated = (prompt for prompt in ordered for _ in range(self.per_prompt))
        return list(islice(repeated, min(number, self.per_step)))[::-1]

    def rows_of(self, prompts: Sequence[int]) -> list[int]:
        """Return the rows with these prompts."""
        return [self.per_prompt * prompt + answer for prompt in prompts for answer in range(self.per_prompt)]


class Largest(NamedTuple):
    """The micro-batch of a run that computes most."""

    microbatch: Any
    per_step: int
    """Micro-batches in a step, on the busiest rank."""


@dataclass(frozen=True, kw_only=True)
class Batching:
    """The division of the rows of a run into micro-batches.

    Attributes:
        rows: the training rows; None if they cannot be read, so that every row is assumed to have data.max_length.
        rows_of: makes rows for a plan without data, given their number and the tokens of each.
        collate: makes a micro-batch from rows.
        is_padded: rows are padded and go through the model's own forward.
        boundary: see `BatchRule`.
        answers: the rows that a step learns from if the run generates them, and `rows` are prompts.
    """

    config: Config
    rows: EncodedExamples | EncodedPairs | EncodedLabelled | None
    rows_of: Callable[[int, int], Any]
    collate: Callable[[Sequence[Any]], Any]
    is_padded: bool
    boundary: int | None
    world_size: int
    answers: AssumedAnswers | None = None

    def refuse_dropping_all(self, splits: AnySplits) -> None:
        """Raise DataError if `drop_last` leaves nothing of a split."""
        refuse_dropping_all(self.config, splits, self._rule)

    @cached_property
    def largest(self) -> Largest:
        """The micro-batch of the first epoch that computes most."""
        per_step = max(1, *(ceil_div(len(groups), self.world_size) for groups in self._groups))
        most = max((group for groups in self._groups for group in groups), key=self._num_computed)
        return Largest(self.collate([self._rows[row] for row in most.rows]), per_step)

    @cached_property
    def computed_per_step(self) -> float:
        """The mean number of tokens that go through the model in a step, on all ranks."""
        return sum(self._num_computed(group) for groups in self._groups for group in groups) / len(self._groups)

    @property
    def targets_per_step(self) -> float:
        """The mean number of tokens with loss in a step, on all ranks."""
        num_targets = sum(int(side.num_targets.sum()) for side in self._rows.sides)
        return num_targets / max(1, self._rule.num_examples) * self._rule.global_batch_size

    @property
    def cadence(self) -> Cadence | None:
        """The cadence of the run; None if the rows cannot be read, or do not fill a global batch."""
        steps_per_epoch = 0 if self.rows is None else self._rule.steps_per_epoch
        return Cadence.of(self.config, steps_per_epoch) if steps_per_epoch else None

    def describe(self) -> Batches:
        """The figures of the run."""
        training, rule, is_known = self.config.training, self._rule, self.rows is not None
        words = f"training.batch_size={training.batch_size} x {self.world_size} process{'es' * (self.world_size > 1)}"
        if training.global_batch_size is not None:
            words = "training.global_batch_size, whatever the number of processes"
        num_tokens = sum(int(side.lengths.sum()) for side in self._rows.sides)
        per_prompt = None if self.answers is None else self.answers.per_prompt
        num_examples = len(self._rows) if rule.examples is None else rule.num_examples
        has_sequences = is_known and self.config.objective.learns_answers
        computed = self.computed_per_step * rule.steps_per_epoch / rule.repeats
        return Batches(
            rows=len(self._rows) // (per_prompt or 1) if is_known else None,
            answers_per_prompt=per_prompt,
            conversations=None if rule.examples is None else rule.num_examples,
            tokens=num_tokens if is_known else None,
            target_tokens=sum(int(side.num_targets.sum()) for side in self._rows.sides) if is_known else None,
            computed_share=computed / num_tokens if is_known else None,
            global_batch_size=rule.global_batch_size,
            rows_per_sequence=self.config.data.max_length * num_examples / num_tokens if has_sequences else None,
            global_batch_from=words,
            world_size=self.world_size,
            steps_per_epoch=rule.steps_per_epoch if is_known else None,
            steps=training.max_steps if self.cadence is None else self.cadence.num_steps,
            microbatches_per_step=self.largest.per_step,
            largest_microbatch_rows=self.largest.microbatch.num_rows,
            largest_microbatch_tokens=self.largest.microbatch.num_computed,
        )

    @property
    def first_examples(self) -> list[int]:
        """The examples of the first step."""
        return self._rule.examples_of_step(self._rule.order(0), 0)

    @cached_property
    def _rows(self) -> Any:
        if self.answers is not None:
            return self.answers
        if self.rows is not None:
            return self.rows
        number, length = global_batch_size(self.config, self.world_size), self.config.data.max_length
        return self.rows_of(number, length)

    @cached_property
    def _rule(self) -> BatchRule:
        """Assigns rows to steps; prompts if the run generates its rows."""
        if self.answers is None:
            return self._rule_of_rows
        return replace(
            self._rule_of_rows, lengths=range(len(self.answers.prompts)), repeats=self.config.grpo.num_iterations
        )

    @cached_property
    def _rule_of_rows(self) -> BatchRule:
        return plan_batches(
            self.config,
            self._rows,
            is_packed=not self.is_padded,
            boundary=self.boundary,
            global_batch_size=global_batch_size(self.config, self.world_size),
        )

    @cached_property
    def _groups(self) -> list[list[RowGroup]]:
        """The micro-batches of each step of the first epoch, or of evenly spread steps where there are very many."""
        rule = self._rule
        order, size, steps = rule.order(0), rule.global_batch_size, max(1, rule.steps_per_epoch // rule.repeats)
        stride = ceil_div(steps, _MOST_STEPS_LOOKED_AT)
        return [self._split(order[step * size : (step + 1) * size]) for step in range(0, steps, stride)]

    def _split(self, examples: list[int]) -> list[RowGroup]:
        """Split a global batch into micro-batches."""
        return self._rule_of_rows.split(examples if self.answers is None else self.answers.rows_of(examples))

    def _num_computed(self, group: RowGroup) -> int:
        """Count the tokens of a micro-batch that go through the model, padding included."""
        training = self.config.training
        if self.is_padded or (training.packing and training.share_prefixes):
            return group.num_tokens
        return sum(int(side.lengths[group.rows].sum()) for side in self._rows.sides)


@dataclass(frozen=True, kw_only=True)
class PlannedEvaluation:
    """The rows that are measured, and the prompts that are answered.

    Attributes:
        has_loss: whether the loss of the rows is computed; with rewards, a validation only generates answers.
        prompts: token ids of the prompts to answer.
    """

    section: Section
    rows: Any
    has_loss: bool
    prompts: Sequence[Sequence[int]]

    def largest_batch(self, batching: Batching) -> list[int]:
        """Return the rows of the batch that computes the most tokens."""
        lengths = self.rows.lengths.tolist()

        def num_computed(rows: list[int]) -> int:
            each = [lengths[row] for row in rows]
            return len(each) * max(each) if batching.is_padded else sum(each)

        batches = evaluation_batches(self.rows, getattr(batching.config, self.section), batching.boundary)
        return max(batches, key=num_computed)

    def largest_answers(self, config: Config, model: Any) -> AnswerBatch | None:
        """Return the answers that take the most memory at once, each as long as it may be; None if there are none.

        Raises:
            DataError: a prompt leaves no room for an answer in the model's context.
        """
        if not self.prompts:
            return None
        size, limit = (values(config)[key] for key in answer_keys(config, self.section))
        batches = group_prompts(model, self.prompts, batch_size=size, max_new_tokens=limit)
        rows = max(batches, key=lambda rows: len(rows) * (len(self.prompts[rows[-1]]) + limit))
        prompts = [self.prompts[row] for row in rows]
        return AnswerBatch(prompts, room_for_answer(model, prompts[-1], limit))


def evaluations_of(config: Config, splits: AnySplits) -> Iterator[PlannedEvaluation]:
    """Yield the validation and the test phase of a run, if it has them."""
    learns_prompts = config.objective.generates_answers
    rows: Any = splits.validation
    if rows is not None:
        asks = learns_prompts or bool(config.validation.metrics)
        yield PlannedEvaluation(
            section="validation",
            rows=rows,
            has_loss=not learns_prompts,
            prompts=_prompts(answered_rows(config, rows)) if asks else [],
        )
    if isinstance(splits, EncodedSplits) and learns_prompts:
        splits = with_testable_rows(splits)
    rows = rows_to_test(config, splits)
    if rows is not None:
        most = None if config.testing.metrics else config.testing.num_samples
        yield PlannedEvaluation(section="testing", rows=rows, has_loss=True, prompts=_prompts(rows, most))


def answer_keys(config: Config, section: Section) -> tuple[str, str]:
    """Return the key of the answers that are generated at once in an evaluation, and the key of their most tokens."""
    if section == "validation" and config.objective.generates_answers:
        return "rollout.batch_size", "rollout.max_completion_length"
    return f"{section}.batch_size", f"{section}.max_new_tokens"


def _prompts(rows: EncodedExamples, most: int | None = None) -> list[Sequence[int]]:
    return [rows.prompt_and_answer(row).prompt for row in rows.has_answer.nonzero()[:most, 0].tolist()]
