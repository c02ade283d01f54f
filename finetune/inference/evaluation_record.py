"""What `finetune evaluate` makes of an evaluation: plain values for JSON, Markdown, and what `--fail-if-worse` says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from finetune.errors import ConfigError
from finetune.inference.scores import LABELS, Evaluation, format_score
from finetune.units import counted


def exceeded_margins(evaluation: Evaluation, margins: Mapping[str, float]) -> list[str]:
    """Return a sentence for each metric that is worse than its margin allows, or cannot be compared.

    Raises:
        ConfigError: there is no verdict on one of them.
    """
    if missing := margins.keys() - (verdicts := evaluation.verdicts).keys():
        raise ConfigError(
            f"--fail-if-worse {missing.pop()}: there is no verdict on it. It needs at least two different rows and "
            "a second model (--against RUN2, or testing.compare_base=true), and for the loss the same tokens in "
            "both."
        )
    return [
        f"{name} does not pass --fail-if-worse ({margin:g}): {verdicts[name]}"
        for name, margin in margins.items()
        if verdicts[name].is_worse_than(margin)
    ]


def markdown_of(run: str, evaluation: Evaluation, limits: Mapping[str, float]) -> str:
    """Return a table of scores and verdicts, and each metric that is worse than its limit allows. `run` is its folder.

    Of what others wrote, it has only names, as code: a text of a row could mention people or show pictures.
    """

    def code(text: str) -> str:
        return f"`{text.replace('`', '').replace('|', '')}`"

    verdicts = {name: str(verdict) for name, verdict in evaluation.verdicts.items()}
    columns = {name: {**scores.metrics, "loss": scores.loss} for name, scores in evaluation.scores.items()}
    rows = [["", *(code(evaluation.other_name) if name == "base" else name for name in columns), "verdict"]]
    rows += [["---", *("---:" for _ in columns), "---"]]
    rows += [
        [
            LABELS.get(name) or code(name),
            *(format_score(name, each[name]) for each in columns.values()),
            verdicts.get(name, ""),
        ]
        for name in columns["tuned"]
        if evaluation.has_rows or name != "loss"
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    failed = exceeded_margins(evaluation, limits)
    verdict = "Does not pass" if failed else "Not worse than allowed" if limits else "Scores"
    num_rows = counted(evaluation.num_rows, "row")
    measured = f"{num_rows} of the {evaluation.split} split" if evaluation.has_rows else "suites"
    return "\n\n".join([f"### {verdict}", f"{code(run)}, {measured}", table, *(f"- {each}" for each in failed)]) + "\n"


def record_of(evaluation: Evaluation) -> dict[str, Any]:
    """Return the scores as plain values."""
    record: dict[str, Any] = {"split": evaluation.split, **_scores_as_record(evaluation)}
    record["against"] = None if evaluation.other_name == "base" else evaluation.other_name
    record["verdict"] = {name: verdict.as_record() for name, verdict in evaluation.verdicts.items()}
    record["unended"] = dict(evaluation.num_unended)
    record["forgetting"] = evaluation.forgetting and evaluation.forgetting.as_record()
    changes = evaluation.changes
    record["trained_rows_left_out"] = evaluation.num_trained
    record["recorded_rows_missing"], record["new_rows"] = changes or (None, None)
    if evaluation.subsets:
        record["sources"] = {name: _scores_as_record(each) for name, each in evaluation.subsets.items()}
    return record


def _scores_as_record(evaluation: Evaluation) -> dict[str, Any]:
    scores: dict[str, Any] = {
        name: {
            "loss": score.loss,
            "standard_error": score.standard_error,
            "perplexity": score.perplexity,
            **score.metrics,
        }
        for name, score in evaluation.scores.items()
    }
    return {"num_rows": evaluation.num_rows, "num_targets": evaluation.num_targets, **scores}


def answers_of(evaluation: Evaluation) -> list[dict[str, Any]]:
    """Return the answered rows as plain values."""
    return [
        {
            "source": row.source,
            **({"context": row.context} if row.context else {}),
            "prompt": row.prompt,
            "expected": row.expected,
            **{name: {"answer": answer, **row.metrics[name]} for name, answer in row.answers.items()},
        }
        for row in evaluation.answers
    ]


def with_finite_numbers(value: Any) -> Any:
    """Return plain values in which None stands for each number that is not finite, which JSON cannot express."""
    if isinstance(value, dict):
        return {name: with_finite_numbers(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [with_finite_numbers(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
