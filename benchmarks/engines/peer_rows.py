"""The job's rows in the form that the trainers of the Hugging Face stack take, and which of them a rank has seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.clock import RankReport
from benchmarks.job import Job, Row, RowShape

IGNORED = -100

Features = Sequence[dict[str, Any]]


def labels_of(row: Row) -> list[int]:
    """The row's ids where it carries loss."""
    return [token if is_target else IGNORED for token, is_target in zip(row.ids, row.is_target, strict=True)]


def dataset_of(job: Job) -> Any:
    """A `datasets.Dataset` of input_ids and labels, in the job's order."""
    from datasets import Dataset

    rows = job.rows()
    return Dataset.from_dict({"input_ids": [row.ids for row in rows], "labels": [labels_of(row) for row in rows]})


class SeenRows:
    """Stands before a collator and notes what passes: a few list operations a row.

    Args:
        collate: what makes a batch of rows.
        per_step: micro-batches of an optimizer step on this rank.
    """

    def __init__(self, collate: Callable[[Any], Any], per_step: int) -> None:
        self._collate = collate
        self._per_step = per_step
        self._microbatches: list[list[RowShape]] = []
        self._first: list[list[int]] = []

    def __call__(self, features: Features) -> Any:
        """Note the rows and make the batch."""
        rows = [row for feature in features for row in _documents(feature)]
        self._microbatches.append([RowShape(len(ids), len(labels) - labels.count(IGNORED)) for ids, labels in rows])
        if len(self._microbatches) <= self._per_step:
            self._first += [ids for ids, _ in rows]
        return self._collate(features)

    def fill(self, report: RankReport, job: Job) -> None:
        """Tell a report which rows were in which step."""
        numbers = {tuple(row.ids): number for number, row in enumerate(job.rows())}
        report.first_rows = [numbers[tuple(ids)] for ids in self._first]
        report.rows = [
            [row for microbatch in self._microbatches[start : start + self._per_step] for row in microbatch]
            for start in range(0, job.steps * self._per_step, self._per_step)
        ]


def _documents(feature: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """The rows in a feature, of which a packed one has several."""
    ids, labels = feature["input_ids"], feature["labels"]
    documents = []
    start = 0
    for length in feature.get("seq_lengths") or [len(ids)]:
        documents.append((ids[start : start + length], labels[start : start + length]))
        start += length
    return documents
