"""The result of the test phase, and the table that it and `finetune evaluate` print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from finetune.inference.answer_metrics import SHARES
from finetune.signals import give_up_dead_screens
from finetune.terminal import print_table, print_texts

_LABELS = {
    "exact_match": "exact match",
    "json_valid": "valid JSON",
    "json_equal": "equal JSON",
    "token_f1": "token F1",
    "loss": "loss (nats per target token)",
}
_MAX_ANSWERS = 3


@dataclass(frozen=True, kw_only=True)
class ModelScores:
    """The scores of one model on the test split. A metric that was not measured is None."""

    loss: float | None = None
    """Nats per target token."""
    exact_match: float | None = None
    """Share of generated answers that equal the expected one, between 0 and 1."""
    json_valid: float | None = None
    """Share of generated answers that are JSON, between 0 and 1."""

    @property
    def figures(self) -> dict[str, float | None]:
        """The scores by name, in the order in which they are shown."""
        return {"exact_match": self.exact_match, "json_valid": self.json_valid, "loss": self.loss}


@dataclass(frozen=True, kw_only=True)
class ComparedAnswer:
    """A prompt, its expected answer and the answers of the models."""

    prompt: str
    expected: str
    tuned: str
    base: str | None = None
    """None if the base did not answer this prompt."""


@dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """The result of the test phase."""

    tuned: ModelScores
    base: ModelScores | None = None
    """None if the base was not measured (`testing.compare_base=false`, or full fine-tuning)."""
    num_rows: int = 0
    """Rows of the test split."""
    num_left_out: int = 0
    """Rows that the loss leaves out (`testing.drop_last`)."""
    answers: tuple[ComparedAnswer, ...] = ()


def show_comparison(comparison: ModelComparison) -> None:
    """Print the result of the test phase: base against tuned, then prompts with the answers of both."""
    give_up_dead_screens()
    models = {"base": comparison.base, "tuned": comparison.tuned}
    show_scores(
        "test",
        comparison.num_rows,
        {name: scores.figures for name, scores in models.items() if scores is not None},
        [
            [(name, text) for name in ("prompt", "expected", *models) if (text := getattr(answer, name)) is not None]
            for answer in comparison.answers[:_MAX_ANSWERS]
        ],
        num_left_out=comparison.num_left_out,
    )


def show_scores(
    split: str,
    num_rows: int,
    scores: Mapping[str, Mapping[str, float | None]],
    answers: Iterable[Iterable[tuple[str, str]]],
    *,
    num_left_out: int = 0,
) -> None:
    """Print a table with one column of figures per model, then the texts of each answered row.

    Args:
        split: the name of the split.
        num_rows: its rows.
        scores: figures of each model, by name; one that is None for every model is left out.
        answers: for each row its prompt, its expected answer and the models' answers, by name.
        num_left_out: rows without a part in the loss.
    """
    rows = [
        [_LABELS.get(name, name), *(_shown(name, figures[name]) for figures in scores.values())]
        for name in scores["tuned"]
        if any(figures[name] is not None for figures in scores.values())
    ]
    title = f"{split.capitalize()} split, {num_rows:,} rows"
    if num_left_out:
        title += f"; the loss is over {num_rows - num_left_out:,} of them (drop_last)"
    print_table(["", *scores], rows, right=scores, title=title)
    for texts in answers:
        print_texts(texts)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name in SHARES:
        return f"{value:.1%}"
    return f"{value:.3f}" if name == "perplexity" else f"{value:.4f}"
