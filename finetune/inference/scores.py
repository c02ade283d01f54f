"""The scores and answers of a model on a split, and the table that training and `finetune evaluate` print of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from finetune.errors import ConfigError
from finetune.inference.answers import SHARES
from finetune.inference.forgetting import Forgetting
from finetune.inference.verdict import PairedVerdict, judge_distinct_rows, standard_error
from finetune.terminal import print_table, print_texts, say
from finetune.units import counted

if TYPE_CHECKING:
    import torch

    from finetune.runs.recorded_rows import RowChanges

ModelName = Literal["base", "tuned"]

LABELS = {
    "exact_match": "exact match",
    "json_valid": "valid JSON",
    "json_equal": "equal JSON",
    "token_f1": "token F1",
    "chosen_reward": "chosen reward",
    "rejected_reward": "rejected reward",
    "reward_accuracy": "reward accuracy",
    "reward_margin": "reward margin",
}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of one model."""

    loss: float
    """Nats per target token; nan without targets."""
    standard_error: float = 0.0
    """Standard error of the rows' mean losses."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over the rows that have an answer, by name."""

    @property
    def perplexity(self) -> float:
        """exp(loss): the number of equally likely tokens that would be as uncertain."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, kw_only=True)
class AnsweredRow:
    """A row with the answers of the models and the metrics of each answer."""

    source: str
    prompt: str
    expected: str
    answers: Mapping[ModelName, str]
    context: str = ""
    """The turns before `prompt`, each shortened to a line."""
    question: str = ""
    """The first turn of the user, which can be asked alone."""
    metrics: Mapping[ModelName, Mapping[str, float]] = field(default_factory=dict)


class RowValues(NamedTuple):
    """The values of each row under one model, from which two models are compared."""

    nats: Sequence[float]
    """The loss, summed over the targets of a row."""
    num_targets: Sequence[float]
    metrics: Mapping[str, Sequence[float]]
    """The metrics of the rows that were answered, by name."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores on a split. On other ranks than the main process there are no metrics and no answers."""

    num_rows: int
    split: str = "test"
    """The split. The test phase of a run without a test split measures `validation`. `none`: no rows, only suites."""
    num_targets: int = 0
    scores: Mapping[ModelName, Scores]
    """Scores of the base, where it was measured, and of the tuned model."""
    answers: Sequence[AnsweredRow] = ()
    loss_unit: str = "nats per target token"
    num_left_out: int = 0
    """Rows without a part in the loss (`testing.drop_last`)."""
    subsets: Mapping[str, Evaluation] = field(default_factory=dict)
    """The scores on the rows of each subset, by its name."""
    num_trained: int | None = None
    """Rows that were left out because the run, or the other one, was trained on them. None if that is not known."""
    changes: RowChanges | None = None
    """How the rows differ from those that the run recorded. None if they were not compared."""
    rows: Mapping[ModelName, RowValues] = field(default_factory=dict)
    row_digests: Sequence[str] = ()
    """The content of each row."""
    contents: Mapping[str, Sequence[Hashable]] = field(default_factory=dict)
    """The prompt and the answer of each row that has a value, as digests of tokens, for each metric and the loss. Rows
    with equal content are copies. A name that is missing has no copies."""
    answered_rows: Sequence[int] = ()
    """The indices of the rows that were answered: those in which the tokenizer leaves an expected answer."""
    tokens: str = ""
    """A digest of the tokens and targets of all rows."""
    other_name: str = "base"
    """The model in the place of the base, for tables: another run's folder if the runs are compared."""
    forgetting: Forgetting | None = None
    num_unended: Mapping[ModelName, int] = field(default_factory=dict)
    """The answers of each model that the limit of tokens cut off. An empty mapping if nothing was answered."""
    num_answers: int = 0
    """The answers of each model. `answers` may hold only some of them, as examples."""

    @property
    def has_rows(self) -> bool:
        """Whether rows of a split were measured, not only suites."""
        return self.split != "none"

    @property
    def unended(self) -> str:
        """Say how many answers did not end; empty if all did."""
        names = {"base": self.other_name}
        counts = [
            f"{number:,} of {counted(self.num_answers, 'answer')} of {names.get(name, name)}"
            for name, number in self.num_unended.items()
            if number
        ]
        return f"Did not end within testing.max_new_tokens: {', '.join(counts)}." if counts else ""

    @cached_property
    def verdicts(self) -> dict[str, PairedVerdict]:
        """The comparison of both models by each metric and the loss, where two rows differ; empty with one model."""
        if not {"base", "tuned"} <= self.rows.keys():
            return {}
        base, tuned = self.rows["base"], self.rows["tuned"]
        verdicts = {
            name: judge_distinct_rows(name, values, base.metrics[name], self.contents.get(name) or range(len(values)))
            for name, values in tuned.metrics.items()
            if name in base.metrics
        }
        if tuned.num_targets == base.num_targets:
            with_loss = [row for row, count in enumerate(tuned.num_targets) if count]
            sizes, judged, other = ([of[row] for row in with_loss] for of in (tuned.num_targets, tuned.nats, base.nats))
            contents = self.contents.get("loss") or range(len(tuned.nats))
            verdicts["loss"] = judge_distinct_rows("loss", judged, other, [contents[row] for row in with_loss], sizes)
        return {name: verdict for name, verdict in verdicts.items() if verdict is not None}

    @property
    def only_copies(self) -> list[str]:
        """The metrics, or the loss, without a verdict because all rows are copies of one row."""
        return [name for name, rows in self.contents.items() if self.base and len(rows) > 1 and len(set(rows)) == 1]

    def against(self, other: Evaluation, name: str) -> Evaluation:
        """Return this evaluation with the tuned model of another one, of the same rows, in the place of the base.

        If the two models have other tokens for the rows, their losses per token are not comparable, and only this
        model's is kept.

        Raises:
            ConfigError: the other evaluation is of other rows, or answered others, or there are fewer than two
                different ones.
        """
        counts = [len(set(each.contents.get("loss") or range(each.num_rows))) for each in (self, other)]
        if self.row_digests != other.row_digests or (min(counts) < 2 and name != "base" and self.has_rows):
            raise ConfigError(
                f"{name} cannot be compared on these rows: at least two different ones are needed, the same for both "
                f"runs. Without training rows and copies, {counts[0]:,} and {counts[1]:,} are left. Give others with "
                "data.test=FILE."
            )
        if apart := {*self.answered_rows} ^ {*other.answered_rows}:
            raise ConfigError(
                f"{name} cannot be compared on these rows: one of the two tokenizers leaves no expected answer in "
                f"{len(apart):,} of {counted(self.num_rows, 'row')}, as where data.max_length cuts them. Raise it: "
                "data.max_length=N."
            )
        scores, values = other.tuned, other.rows["tuned"]
        if self.tokens != other.tokens:
            scores, values = replace(scores, loss=math.nan, standard_error=math.nan), values._replace(num_targets=())
        answers = tuple(
            replace(
                row,
                answers={"base": theirs.answers["tuned"], **row.answers},
                metrics={"base": theirs.metrics["tuned"], **row.metrics},
            )
            for row, theirs in zip(self.answers, other.answers, strict=True)
        )
        both, rows = {"base": scores, **self.scores}, {"base": values, **self.rows}
        unended: dict[ModelName, int] = {"base": other.num_unended.get("tuned", 0), **self.num_unended}
        contents = {  # a copy for one tokenizer may be another row for the other one
            key: [*zip(ours, other.contents.get(key, ours), strict=True)] for key, ours in self.contents.items()
        }
        return replace(
            self, scores=both, rows=rows, contents=contents, answers=answers, other_name=name, num_unended=unended
        )

    @property
    def tuned(self) -> Scores:
        """The scores of the tuned model."""
        return self.scores["tuned"]

    @property
    def base(self) -> Scores | None:
        """The scores of the base. None if it was not measured (`testing.compare_base=false`, or full fine-tuning)."""
        return self.scores.get("base")


def scores_of(losses: torch.Tensor, measured: Mapping[str, Sequence[float]]) -> Scores:
    """Return the scores of one model. `losses` has nats and target tokens of each row, shape (2, rows)."""
    nats, counts = losses
    num_targets = int(counts.sum())
    means = (nats[counts > 0] / counts[counts > 0]).tolist()
    loss = math.fsum(nats.tolist()) / num_targets if num_targets else math.nan
    return Scores(loss=loss, standard_error=standard_error(means), metrics=mean_metrics(measured))


def mean_metrics(measured: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each metric that has values."""
    return {name: math.fsum(values) / len(values) for name, values in measured.items() if values}


def worse_first(rows: Iterable[AnsweredRow]) -> list[AnsweredRow]:
    """Sort rows so that the one with the largest fall of a metric comes first. Rows without a fall keep their order."""

    def change(row: AnsweredRow) -> float:
        base, tuned = (row.metrics.get(name, {}) for name in ("base", "tuned"))
        return min([0.0, *(tuned[name] - before for name, before in base.items())])

    return sorted(rows, key=change)


def show_evaluation(evaluation: Evaluation, *, num_answers: int = 3, with_perplexity: bool = False) -> None:
    """Print a table with a column of scores for each model, then prompts with the expected and the models' answers."""
    columns = {
        name: {**each.metrics, "loss": each.loss, **({"perplexity": each.perplexity} if with_perplexity else {})}
        for name, each in evaluation.scores.items()
    }
    labels = {**LABELS, "loss": f"loss ({evaluation.loss_unit})"}
    rows = [
        [labels.get(name, name), *(format_score(name, column[name]) for column in columns.values())]
        for name in columns["tuned"]
        if evaluation.has_rows or name not in ("loss", "perplexity")
    ]
    num_rows = counted(evaluation.num_rows, "row")
    title = f"{evaluation.split.capitalize()} split, {num_rows}" if evaluation.has_rows else "Suites"
    if evaluation.num_left_out:
        title += f"; the loss is over {evaluation.num_rows - evaluation.num_left_out:,} of them (drop_last)"
    if evaluation.num_trained:
        trained = "the run was" if evaluation.other_name == "base" else "one of the runs was"
        title += f"; left out, because {trained} trained on them: {evaluation.num_trained:,}"
    names = {"base": evaluation.other_name}
    head = [names.get(name, name) for name in columns]
    print_table(["", *head], rows, right=head, title=title)
    if evaluation.subsets:
        _show_subsets(evaluation.subsets)
    for name, verdict in evaluation.verdicts.items():
        say(f"{LABELS.get(name, name)}: {verdict}", indent="  ")
    for name in evaluation.only_copies:
        rows_of = counted(len(evaluation.contents[name]), "row")
        say(f"{LABELS.get(name, name)}: no verdict, because {rows_of} are copies of one row", indent="  ")
    if evaluation.unended:
        say(evaluation.unended, indent="  ")
    if evaluation.forgetting is not None and (with_perplexity or not evaluation.forgetting.why_not):
        say(str(evaluation.forgetting), indent="  ")
    for row in worse_first(evaluation.answers)[:num_answers]:
        context = [("context", row.context)] if row.context else []
        answers = [(names.get(name, name), text) for name, text in row.answers.items()]
        print_texts([*context, ("prompt", row.prompt), ("expected", row.expected), *answers])


def _show_subsets(subsets: Mapping[str, Evaluation]) -> None:
    """Print a table with one row for each subset. A metric is missing where none of the answered rows is in it."""
    cells = [
        {
            (model, metric): format_score(metric, value)
            for model, scores in each.scores.items()
            for metric, value in {**scores.metrics, "loss": scores.loss}.items()
        }
        for each in subsets.values()
    ]
    keys = list(dict.fromkeys(key for row in cells for key in row))
    columns = [f"{model} {LABELS.get(metric, metric)}" for model, metric in keys]
    rows = [
        [name, f"{each.num_rows:,}", f"{each.num_targets:,}", *(row.get(key, "–") for key in keys)]
        for (name, each), row in zip(subsets.items(), cells, strict=True)
    ]
    head = ["", "rows", "target tokens", *columns]
    print_table(head, rows, right=head[1:], title="each source")


def format_score(name: str, value: float) -> str:
    """Format the score of a metric for a table."""
    if name in SHARES or name.startswith("suite_"):
        return f"{value:.1%}"
    return f"{value:.3f}" if name == "perplexity" else f"{value:.4f}"
