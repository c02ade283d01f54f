"""The test phase: loss and generated answers of the base and of the tuned model. No collective inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.config.schema import TestingSection
from finetune.data.batches import EvaluationLoader
from finetune.data.encode import EncodedExamples
from finetune.data.templates import stop_ids
from finetune.distributed.runtime import Runtime
from finetune.generate import generate_answers
from finetune.training.evaluate import sum_losses
from finetune.training.state import ComparedAnswer, Comparison, ModelScores

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
    dialogue = _Dialogues(examples, tokenizer) if section.metrics or section.num_samples else None

    def measure() -> tuple[ModelScores, list[str]]:
        loss = sum_losses(runtime, model, loader).loss
        if dialogue is None or not dialogue.prompts:
            return ModelScores(loss=loss), []
        asked = dialogue.prompts if section.metrics else dialogue.prompts[: section.num_samples]
        generated = generate_answers(
            model,
            asked,
            stop_ids=stop_ids(tokenizer, model.generation_config.eos_token_id),
            max_new_tokens=section.max_new_tokens,
            batch_size=section.batch_size,
        )
        answers = [_text(tokenizer, ids) for ids in generated]
        return ModelScores(loss=loss, **_score(answers, dialogue.answers, section.metrics)), answers

    tuned, tuned_answers = measure()
    base, base_answers = None, []
    if has_base:
        with model.disable_adapter():
            base, base_answers = measure()
    return Comparison(
        tuned=tuned,
        base=base,
        num_rows=len(examples),
        answers=() if dialogue is None else dialogue.compared(tuned_answers, base_answers, section.num_samples),
    )


class _Dialogues:
    """Prompt, expected answer and readable prompt of each row that has an answer to generate."""

    def __init__(self, examples: EncodedExamples, tokenizer: PreTrainedTokenizerBase) -> None:
        has_answer = [] if examples.kind == "text" else examples.num_targets.nonzero()[:, 0].tolist()
        pairs = [examples.prompt_and_answer(row) for row in has_answer]
        self.prompts = [list(map(int, prompt)) for prompt, _ in pairs]
        self.answers = [_text(tokenizer, list(map(int, answer))) for _, answer in pairs]
        self._tokenizer = tokenizer

    def compared(self, tuned: list[str], base: list[str], count: int) -> tuple[ComparedAnswer, ...]:
        """The first rows, readable."""
        return tuple(
            ComparedAnswer(
                prompt=self._last_turn(self.prompts[row]),
                expected=self.answers[row],
                tuned=tuned[row],
                base=base[row] if base else None,
            )
            for row in range(min(count, len(tuned)))
        )

    def _last_turn(self, prompt: list[int]) -> str:
        """What the last turn before the answer says, without the tokens around it; all of a prompt without turns."""
        special = set(self._tokenizer.all_special_ids)
        end_of_turn = stop_ids(self._tokenizer, None)[0]
        ends = [position for position, token in enumerate(prompt) if token == end_of_turn]
        end = ends[-1] if ends else len(prompt)
        start = end
        while start > 0 and prompt[start - 1] not in special:
            start -= 1
        return _text(self._tokenizer, prompt[start:end])


def _score(answers: Sequence[str], expected: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    measures = {
        "exact_match": lambda: [
            answer.strip() == right.strip() for answer, right in zip(answers, expected, strict=True)
        ],
        "json_valid": lambda: [_is_json(answer) for answer in answers],
    }
    return {name: sum(measures[name]()) / len(answers) for name in metrics}


def _is_json(text: str) -> bool:
    """Whether a text is a JSON object or array; a bare number or word is an answer, not a document."""
    try:
        return isinstance(json.loads(text), (dict, list))
    except ValueError:
        return False


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
