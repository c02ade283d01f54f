"""The test phase: loss and generated answers of the base and of the tuned model. No collective inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.config.schema import TestingSection
from finetune.data.batches import EvaluationLoader
from finetune.data.encoded import EncodedExamples
from finetune.data.templates import stop_ids
from finetune.distributed.runtime import Runtime
from finetune.inference.answers import METRICS, Dialogues, text_of
from finetune.inference.decoding import generate_answers
from finetune.inference.evaluate import sum_losses
from finetune.runs.state import ComparedAnswer, Comparison, ModelScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def compare_models(
    runtime: Runtime,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    loader: EvaluationLoader,
    section: TestingSection,
) -> Comparison:
    """Measure the tuned model, and the base by switching the adapter off, on the rows of a loader.

    Args:
        runtime: for precision and device; nothing is exchanged.
        model: the tuned model.
        tokenizer: the model's.
        loader: over the test split.
        section: what to measure.
    """
    examples = loader.dataset
    assert isinstance(examples, EncodedExamples)
    has_base = section.compare_base and hasattr(model, "disable_adapter")
    dialogues = Dialogues(examples, tokenizer) if section.metrics or section.num_samples else None

    def measure() -> tuple[ModelScores, list[str]]:
        loss = sum_losses(runtime, model, loader).loss
        if dialogues is None or not dialogues.prompts:
            return ModelScores(loss=loss), []
        asked = dialogues.prompts if section.metrics else dialogues.prompts[: section.num_samples]
        generated = generate_answers(
            model,
            asked,
            stop_ids=stop_ids(tokenizer, model.generation_config.eos_token_id),
            max_new_tokens=section.max_new_tokens,
            batch_size=section.batch_size,
        )
        answers = [text_of(tokenizer, ids) for ids in generated]
        return ModelScores(loss=loss, **_score(answers, dialogues.expected[: len(answers)], section.metrics)), answers

    tuned, tuned_answers = measure()
    base, base_answers = None, []
    if has_base:
        with model.disable_adapter():
            base, base_answers = measure()
    return Comparison(
        tuned=tuned,
        base=base,
        num_rows=len(examples),
        answers=() if dialogues is None else _compared(dialogues, tuned_answers, base_answers, section.num_samples),
    )


def _compared(
    dialogues: Dialogues, tuned: Sequence[str], base: Sequence[str], count: int
) -> tuple[ComparedAnswer, ...]:
    """The first rows, readable."""
    return tuple(
        ComparedAnswer(
            prompt=dialogues.last_turn(row),
            expected=dialogues.expected[row],
            tuned=tuned[row],
            base=base[row] if base else None,
        )
        for row in range(min(count, len(tuned)))
    )


def _score(answers: Sequence[str], expected: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    pairs = list(zip(answers, expected, strict=True))
    return {name: sum(METRICS[name](*pair) for pair in pairs) / len(pairs) for name in metrics}
