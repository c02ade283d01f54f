"""Plan validations and the test phase: which of their batches takes the most memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune.config.keys import values
from finetune.config.objectives import OBJECTIVES
from finetune.data.batches import evaluation_batches
from finetune.data.encoded import EncodedSplits
from finetune.inference.decoding import group_prompts, room_for_answer
from finetune.training.loaders import rows_to_test
from finetune.training.memory.generation import AnswerBatch
from finetune.training.rewards.objective import with_testable_rows
from finetune.training.validation import answered_rows

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.data.encoded import EncodedExamples
    from finetune.data.objective import AnySplits
    from finetune.diagnose.plan_batches import Batching

Section = Literal["validation", "testing"]


@dataclass(frozen=True, kw_only=True)
class PlannedEvaluation:
    """The rows that are measured, and the prompts that are answered.

    Attributes:
        section: of the configuration.
        rows: of the split.
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
    learns_prompts = OBJECTIVES[config.training.objective].rows == "prompts"
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
    if section == "validation" and OBJECTIVES[config.training.objective].rows == "prompts":
        return "rollout.batch_size", "rollout.max_completion_length"
    return f"{section}.batch_size", f"{section}.max_new_tokens"


def _prompts(rows: EncodedExamples, most: int | None = None) -> list[Sequence[int]]:
    return [rows.prompt_and_answer(row).prompt for row in rows.has_answer.nonzero()[:most, 0].tolist()]
