"""Measure a model on a split, for the test phase and for `finetune evaluate`.

The result does not depend on the number of processes, bit for bit: batches do not depend on it, each row is computed
once, and `math.fsum` adds the values of the rows with a result that does not depend on their order. The batch size
changes no generated token in fp32, and the loss only by rounding (about 1e-7 of it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby, pairwise, zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from finetune.config.schema import TestingSection
from finetune.data.batches import EvaluationLoader
from finetune.data.encoded import EncodedExamples
from finetune.data.templates import AnswerTokens
from finetune.distributed.runtime import Runtime
from finetune.inference.answers import METRICS, AnswerReader, Metric, measure
from finetune.inference.decoding import Decoding, count_unended, generate_answers
from finetune.inference.losses import in_even_rounds, measure_losses
from finetune.inference.scores import AnsweredRow, Evaluation, ModelName, RowValues, scores_of, worse_first
from finetune.logs import waiting
from finetune.model.base import evaluation_mode
from finetune.runs.model_files import has_adapter
from finetune.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_LINE = 100
"""The most characters of a turn in the context of an answer."""


def run_test_phase(
    runtime: Runtime,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    loader: EvaluationLoader,
    section: TestingSection,
    given: Mapping[str, Metric] = MappingProxyType({}),
) -> Evaluation:
    """Evaluate for the test phase of training, with the metrics of the configuration and those `given` by the script.

    This process computes alone, without communication, and `loader` has the whole test split. If the model is sharded,
    this is collective (every rank), and `loader` has this rank's rows.
    """
    metrics: dict[str, Metric] = {name: METRICS[name] for name in section.metrics} | dict(given)
    is_alone = runtime.placement.shard_size is None
    evaluation = evaluate_model(runtime, model, tokenizer, loader, section, metrics=metrics, is_alone=is_alone)
    return replace(evaluation, answers=tuple(worse_first(evaluation.answers)[: section.num_samples]))


def evaluate_model(
    runtime: Runtime,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    loader: EvaluationLoader,
    section: TestingSection,
    *,
    metrics: Mapping[str, Metric],
    is_alone: bool = False,
) -> Evaluation:
    """Measure the tuned model, and the base by switching the adapter off.

    Collective: every rank, with its rows of the split and otherwise the same arguments. With `is_alone`, this process
    measures all rows without communication.

    The section says the batch size, the longest answer, how many answers to show, and whether to measure the base.
    """
    examples = loader.dataset
    assert isinstance(examples, EncodedExamples)
    dialogue = Dialogues(examples if metrics or section.num_samples else None, tokenizer)
    num_answers = len(dialogue.prompts) if metrics else min(section.num_samples, len(dialogue.prompts))
    is_writer = is_alone or runtime.is_main_process
    names: list[ModelName] = ["base", "tuned"] if section.compare_base and has_adapter(model) else ["tuned"]
    as_model = {name: model.disable_adapter if name == "base" else nullcontext for name in names}
    decoding = Decoding.greedy(model, tokenizer, section.max_new_tokens)
    losses: dict[ModelName, torch.Tensor] = {}
    answers: dict[ModelName, list[str]] = {}
    for name in names:
        with as_model[name](), waiting(f"measuring the {name} model on {counted(len(examples), 'row')}"):
            losses[name] = _row_losses(runtime, model, loader, is_alone=is_alone)
    chosen = list(range(len(dialogue.prompts)))
    if not metrics and len(names) > 1:  # rows whose loss rose are shown first
        rise = (losses["tuned"][0] - losses["base"][0]) / losses["base"][1].clamp(min=1)
        chosen.sort(key=lambda row: min(0.0, -float(rise[dialogue.rows[row]])))
    chosen = chosen[:num_answers]
    asked, unended = [dialogue.prompts[row] for row in chosen], dict[ModelName, int]()
    for name in names:
        with as_model[name](), waiting(f"answering {counted(num_answers, 'prompt')} with the {name} model"):
            ids = generate_answers(
                model, asked, decoding, batch_size=section.batch_size, runtime=None if is_alone else runtime
            )
            answers[name] = [dialogue.reader.read(row).text for row in ids] if is_writer else []
            unended[name] = count_unended(model, asked, ids, section.max_new_tokens) if is_writer else 0
    measured = {name: measured_values(metrics, texts, dialogue.expected) for name, texts in answers.items()}
    subsets: dict[str, Evaluation] = {}
    if examples.subset_names:
        from finetune.inference.subset_scores import evaluate_subsets

        subsets = evaluate_subsets(examples, losses, measured, dialogue.subsets)
    return Evaluation(
        num_rows=len(examples),
        num_targets=int(losses["tuned"][1].sum()),
        scores={name: scores_of(losses[name], measured[name]) for name in names},
        subsets=subsets,
        answers=tuple(
            AnsweredRow(
                source=dialogue.sources[row],
                prompt=dialogue.last_turn(row),
                context=dialogue.context(row),
                question=dialogue.question(row),
                expected=dialogue.expected[row],
                answers={name: answers[name][place] for name in names},
                metrics={name: {key: values[place] for key, values in measured[name].items()} for name in names},
            )
            for place, row in enumerate(chosen if is_writer else ())
        ),
        rows={name: RowValues(*losses[name].tolist(), measured[name]) for name in names},
        contents=_contents(examples, dialogue.rows, measured["tuned"]),
        num_left_out=loader.num_left_out,
        num_unended=unended,
        num_answers=len(chosen),
        answered_rows=[dialogue.rows[row] for row in chosen],
    )


class Dialogues:
    """The prompts and expected answers of rows.

    Args:
        examples: encoded rows; rows of plain text have no answers and are left out. None: no rows.
        tokenizer: the model's.

    Attributes:
        rows: the index of each row in the examples.
        sources: file and line of each row.
        prompts: token ids, including the header of the assistant's turn.
        expected: the text of the assistant's answer, after its thinking.
        reader: reads answers, the expected ones and generated ones alike.
        subsets: the name of the subset of each row; empty if the rows have no subsets.
    """

    def __init__(self, examples: EncodedExamples | None, tokenizer: PreTrainedTokenizerBase) -> None:
        self.rows: list[int] = []
        self.sources: list[str] = []
        self.prompts: list[list[int]] = []
        self.expected: list[str] = []
        self.subsets: list[str] = []
        self._tokens = AnswerTokens(tokenizer)
        self.reader = AnswerReader(self._tokens)
        if examples is None:
            return
        for row in examples.has_answer.nonzero()[:, 0].tolist():
            prompt, answer = examples.prompt_and_answer(row)
            self.rows.append(row)
            self.sources.append(examples.source(row))
            self.prompts.append([int(token) for token in prompt])
            self.expected.append(self.reader.read(answer).text)
            if examples.subset_names:
                self.subsets.append(examples.subset_names[int(examples.subset[row])])

    def last_turn(self, row: int) -> str:
        """Return the text of the last turn before the answer, or the whole prompt if it has no turns."""
        return self._turns(row)[-1][1]

    def context(self, row: int) -> str:
        """Return the turns before the last one, each on a short line. The system turn is left out."""
        lines = (" ".join(f"{role}: {text}".split()) for role, text in self._turns(row)[:-1])
        return "\n".join(line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 1]}…" for line in lines)

    def question(self, row: int) -> str:
        """Return the turn of the user that begins the conversation, which can be asked alone; empty without one."""
        role, text = self._turns(row)[0]
        return text if role in ("user", "") else ""

    def _turns(self, row: int) -> list[tuple[str, str]]:
        """Return role and text of each turn before the answer, without system turns unless they are all."""
        prompt, end_ids = self.prompts[row], (self._tokens.end_id, self._tokens.earlier_end_id)
        ends = [place for place, token in enumerate(prompt) if token in end_ids]
        if not ends:
            return [("", self._decode(prompt).strip())]
        # ChatML and others write roles as plain text, which the header of the answer shows.
        has_plain_roles = self._decode(prompt[ends[-1] :]).strip().startswith(("assistant", "model"))
        turns = [self._turn(prompt[start + 1 : end], has_plain_roles) for start, end in pairwise([-1, *ends])]
        return [turn for turn in turns if turn[0] not in ("system", "developer")] or turns

    def _turn(self, ids: Sequence[int], has_plain_role: bool) -> tuple[str, str]:
        tokenizer = self._tokens.tokenizer
        runs = groupby(ids, self._tokens.special_ids.__contains__)
        text = "\n".join(filter(None, (self._decode(run).strip() for is_special, run in runs if not is_special)))
        if has_plain_role:
            role, _, text = text.partition("\n")
        elif text.startswith("<|"):  # the template writes a role that is no token of this tokenizer
            role, _, text = text.removeprefix("<|").partition("|>")
        else:  # the first special token: <|user|>
            special = (token for token in ids if token in self._tokens.special_ids and token != tokenizer.bos_token_id)
            role = str(tokenizer.convert_ids_to_tokens(next(special, []))).strip("<|>[]")
        return role, text.strip()

    def _decode(self, ids: Iterable[int]) -> str:
        return str(self._tokens.tokenizer.decode(list(ids), skip_special_tokens=True))


def _contents(
    examples: EncodedExamples, answered: Sequence[int], measured: Mapping[str, Sequence[float]]
) -> dict[str, list[bytes]]:
    """Return the content of each row that has a value: all rows for the loss, the answered ones for each metric."""
    every = [*examples.digests(with_targets=True)]
    of_metrics = {
        name: [every[row] for row, _ in zip(answered, values, strict=False)] for name, values in measured.items()
    }
    return {"loss": every, **of_metrics}


def _row_losses(runtime: Runtime, model: Any, loader: EvaluationLoader, *, is_alone: bool) -> torch.Tensor:
    """Return nats and target tokens of each row, float64, shape (2, rows). Collective unless `is_alone`."""
    own_losses = torch.zeros(2, len(loader.dataset), dtype=torch.float64)  # type: ignore[arg-type]
    with evaluation_mode(model):
        for rows, microbatch in zip_longest(loader.row_batches, in_even_rounds(runtime, loader)):
            of_batch = measure_losses(runtime, model, microbatch)
            if rows is not None:
                own_losses[:, rows] = torch.stack([of_batch.nats, of_batch.num_targets.double()]).cpu()
    if is_alone:
        return own_losses
    return torch.tensor(runtime.collectives.sum(own_losses.flatten().tolist()), dtype=torch.float64).view_as(own_losses)


def measured_values(
    metrics: Mapping[str, Metric], answers: Sequence[str], expected: Sequence[str]
) -> dict[str, list[float]]:
    """Return the values of each metric, one for each answer."""
    pairs = list(zip(answers, expected, strict=False))  # fewer answers than rows if there is no metric
    return {name: [measure(name, metric, *pair) for pair in pairs] for name, metric in metrics.items()}
