"""The scores on the rows of each subset (`EncodedExamples.subset_names`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from finetune.data.encoded import EncodedExamples
from finetune.inference.scores import Evaluation, ModelName, scores_of


def evaluate_subsets(
    examples: EncodedExamples,
    losses: Mapping[ModelName, torch.Tensor],
    measured: Mapping[ModelName, Mapping[str, Sequence[float]]],
    subsets: Sequence[str],
) -> dict[str, Evaluation]:
    """Return the scores of each subset that has rows, from the losses of all rows and the metrics of those answered."""
    evaluations = {}
    for index, subset in enumerate(examples.subset_names):
        rows = examples.subset == index
        if rows.any():
            evaluations[subset] = Evaluation(
                num_rows=int(rows.sum()),
                num_targets=int(losses["tuned"][1][rows].sum()),
                scores={
                    name: scores_of(of_rows[:, rows], values_in_subset(measured[name], subsets, subset))
                    for name, of_rows in losses.items()
                },
            )
    return evaluations


def values_in_subset(
    measured: Mapping[str, Sequence[float]], subsets: Sequence[str], subset: str
) -> dict[str, Sequence[float]]:
    """Keep the values of the rows of one subset."""
    return {
        name: [value for value, other in zip(values, subsets, strict=False) if other == subset]
        for name, values in measured.items()
    }
