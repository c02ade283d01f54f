"""Figures of a model over a split: the same for any batch size and any number of processes.

Every figure is a mean over rows or tokens. What each row gives is computed once, on the rank that its batch falls to;
the batches do not depend on the number of ranks, and what rows gave is added with `math.fsum`, whose result does not
depend on the order. So the number of processes changes no bit. The batch size changes no generated token in fp32, and
the loss only by the rounding of fp32 products of another shape (about 1e-7 of it).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from finetune.config.schema import TestingSection
from finetune.data.batches import Collate, EvaluationLoader
from finetune.data.encoded import EncodedExamples
from finetune.data.templates import stop_ids
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import cross_entropy_per_target
from finetune.engine.reference import in_float64
from finetune.inference.answer_metrics import measure
from finetune.inference.answers import Dialogues, Metric, text_of
from finetune.inference.decoding import Decoding, decode_rows, plan_batches
from finetune.inference.finished_run import has_base
from finetune.model.base import evaluation_mode, longrope_boundary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ModelName = Literal["base", "tuned"]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one model did."""

    loss: float
    """Nats per target token; nan without targets."""
    standard_error: float
    """Of the rows' mean losses."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the rows that have an answer."""

    @property
    def perplexity(self) -> float:
        """exp(loss): as uncertain as a choice between so many equally likely tokens."""
        return math.exp(self.loss) if self.loss < math.log(float("1e308")) else math.inf


@dataclass(frozen=True, kw_only=True)
class AnsweredRow:
    """A row, and what the models made of it."""

    source: str
    prompt: str
    expected: str
    answers: Mapping[ModelName, str]
    metrics: Mapping[ModelName, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The figures of a split. On the main process: elsewhere `answered` is empty and no metric is taken."""

    num_rows: int
    num_targets: int
    scores: Mapping[ModelName, Scores]
    """Of the base, where there is one, and of the tuned model."""
    answered: Sequence[AnsweredRow] = ()


def evaluate_model(
    runtime: Runtime,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    examples: EncodedExamples,
    section: TestingSection,
    *,
    metrics: Mapping[str, Metric],
    collate: Collate | None = None,
) -> Evaluation:
    """Measure the tuned model, and the base by switching the adapter off.

    Collective: every rank, with the same arguments.

    Args:
        runtime: the world of processes.
        model: placed.
        tokenizer: the model's.
        examples: the rows; all of them are measured, `drop_last` or not.
        section: batch size, the longest answer, how many answers to show, whether to measure the base.
        metrics: of generated answers, by name.
        collate: what puts rows together for the loss.
    """
    dialogue = Dialogues(examples, tokenizer)
    asked = len(dialogue.prompts) if metrics else min(section.num_samples, len(dialogue.prompts))
    names: list[ModelName] = ["base", "tuned"] if section.compare_base and has_base(model) else ["tuned"]
    nats: dict[ModelName, torch.Tensor] = {}
    answers: dict[ModelName, list[str]] = {}
    for name in names:
        with model.disable_adapter() if name == "base" else nullcontext():
            nats[name] = _row_losses(runtime, model, examples, section, collate)
            ids = _answers(runtime, model, tokenizer, dialogue.prompts[:asked], section)
            answers[name] = [text_of(tokenizer, row) for row in ids] if runtime.is_main_process else []
    measured = {name: _measure(metrics, given, dialogue.expected) for name, given in answers.items()}
    counts = examples.num_targets
    return Evaluation(
        num_rows=len(examples),
        num_targets=int(counts.sum()),
        scores={name: _scores(nats[name], counts, measured[name]) for name in names},
        answered=tuple(
            AnsweredRow(
                source=dialogue.sources[row],
                prompt=dialogue.last_turn(row),
                expected=dialogue.expected[row],
                answers={name: answers[name][row] for name in names},
                metrics={name: {key: values[row] for key, values in measured[name].items()} for name in names},
            )
            for row in range(asked if runtime.is_main_process else 0)
        ),
    )


def _row_losses(
    runtime: Runtime, model: Any, examples: EncodedExamples, section: TestingSection, collate: Collate | None
) -> torch.Tensor:
    """Nats of each row, summed over its targets: float64, shape (rows,). Collective."""
    loader = EvaluationLoader(
        examples,
        section.model_copy(update={"drop_last": False}),
        boundary=longrope_boundary(model),
        rank=runtime.rank,
        world_size=runtime.world_size,
        collate=collate,
    )
    mine = torch.zeros(len(examples), dtype=torch.float64)
    with evaluation_mode(model):
        for rows, microbatch in zip(loader.row_batches, loader, strict=True):
            there = microbatch.to(runtime.device)
            with runtime.autocast():
                nats = in_float64(cross_entropy_per_target(model, there))
            of_rows = torch.zeros(there.num_rows, dtype=torch.float64, device=nats.device)
            mine[rows] = of_rows.index_add_(0, there.target_row.to(nats.device), nats).cpu()
    return torch.tensor(runtime.sum(mine.tolist()), dtype=torch.float64)


def _answers(
    runtime: Runtime,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    section: TestingSection,
) -> list[list[int]]:
    """The greedy answer to each prompt. Collective: the ranks are dealt whole batches, and tell each other theirs."""
    limit = section.max_new_tokens
    decoding = Decoding(
        stop_ids=stop_ids(tokenizer, model.generation_config.eos_token_id), max_new_tokens=limit, sampling=None
    )
    batches = plan_batches(model, prompts, batch_size=section.batch_size, max_new_tokens=limit)
    mine: list[list[int]] = [[] for _ in prompts]
    for rows in batches[runtime.rank :: runtime.world_size]:
        for row, answer in zip(rows, decode_rows(model, prompts, rows, decoding), strict=True):
            mine[row] = answer
    if runtime.world_size == 1 or not prompts:
        return mine
    # A row is one rank's alone, so that the sum over ranks is that rank's: ids from 1 on, 0 behind the end.
    flat = [float(token + 1) for answer in mine for token in [*answer, *[-1] * (limit - len(answer))]]
    whole = runtime.sum(flat)
    return [[int(token) - 1 for token in row if token] for row in _chunks(whole, limit)]


def _chunks(values: Sequence[float], size: int) -> Iterator[Sequence[float]]:
    return (values[start : start + size] for start in range(0, len(values), size))


def _measure(metrics: Mapping[str, Metric], answers: Sequence[str], expected: Sequence[str]) -> dict[str, list[float]]:
    pairs = list(zip(answers, expected, strict=False))  # fewer answers than rows where no metric is asked for
    return {name: [measure(name, metric, *pair) for pair in pairs] for name, metric in metrics.items()}


def _scores(nats: torch.Tensor, counts: torch.Tensor, measured: Mapping[str, Sequence[float]]) -> Scores:
    taught = counts > 0
    num_targets = int(counts.sum())
    means = (nats[taught] / counts[taught]).tolist()
    return Scores(
        loss=math.fsum(nats.tolist()) / num_targets if num_targets else math.nan,
        standard_error=_standard_error(means),
        metrics={name: math.fsum(values) / len(values) for name, values in measured.items() if values},
    )


def _standard_error(values: Sequence[float]) -> float:
    """sqrt(s^2 / n); 0 below two values."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)
