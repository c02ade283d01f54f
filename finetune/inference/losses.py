"""Measure losses over a data loader. The caller sums them over ranks. Only sharded weights need collectives here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from finetune.data.batches import EvaluationLoader
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import cross_entropy_per_target
from finetune.engine.microbatch import Microbatch
from finetune.engine.products import in_float64
from finetune.logs import report_progress
from finetune.model.base import evaluation_mode
from finetune.runs.metrics import subset_key


class LossSums(NamedTuple):
    """Sums over batches and ranks, from which the metrics of a validation are computed."""

    nats: float = 0.0
    """Cross-entropy summed over target tokens."""
    num_targets: float = 0.0
    num_examples: float = 0.0
    """Rows with at least one target."""
    example_means: float = 0.0
    """Mean nats per target of each row, summed over rows."""
    squared_example_means: float = 0.0
    num_cut_short: float = 0.0
    """The number of ranks that stopped before their last batch. If it is not 0, the other fields are incomplete."""

    @property
    def loss(self) -> float:
        """Nats per target token; nan without targets."""
        return self.nats / self.num_targets if self.num_targets else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the rows' mean losses, sqrt(s^2 / n); 0 below two rows, nan if one is not finite."""
        n = self.num_examples
        if n < 2:
            return 0.0
        variance = (self.squared_example_means - self.example_means**2 / n) / (n - 1)
        return math.sqrt(max(variance, 0.0) / n)  # max(0.0, nan) would be 0.0


class SplitLosses(NamedTuple):
    """The sums over a split, and over each of its subsets (`EncodedExamples.subset_names`)."""

    whole: LossSums
    subsets: Mapping[str, LossSums] = {}
    """The sums of each subset, by its name."""
    metrics: Mapping[str, float] = {}
    """Means over all ranks, by name, the same on every rank."""

    def over_ranks(self, runtime: Runtime) -> SplitLosses:
        """Return the sums over all ranks, which have the same subsets. Collective: one for all sums."""
        width = len(LossSums._fields)
        values = runtime.collectives.sum([value for sums in (self.whole, *self.subsets.values()) for value in sums])
        total, *others = (LossSums(*values[start : start + width]) for start in range(0, len(values), width))
        return self._replace(whole=total, subsets=dict(zip(self.subsets, others, strict=True)))

    def subset_metrics(self) -> dict[str, float]:
        """Return `loss/NAME`, `standard_error/NAME` and `num_targets/NAME` of each subset that has targets.

        The mean of these losses, weighted by the numbers of targets, is the loss of the whole.
        """
        return {
            subset_key(metric, name): getattr(sums, metric)
            for name, sums in self.subsets.items()
            if sums.num_targets
            for metric in ("loss", "standard_error", "num_targets")
        }


class MicrobatchLosses(NamedTuple):
    """The losses of one micro-batch, on the model's device."""

    total: torch.Tensor
    """Nats of all targets, float64, a scalar."""
    nats: torch.Tensor
    """Nats of each row, summed over its targets, float64, shape (rows,)."""
    num_targets: torch.Tensor
    """Target tokens of each row, int64, shape (rows,)."""


def measure_losses(runtime: Runtime, model: torch.nn.Module, microbatch: Microbatch) -> MicrobatchLosses:
    """Measure the losses of a micro-batch by a placed model, in evaluation mode and without gradients."""
    there = microbatch.to(runtime.device)
    nats = in_float64(runtime.placement.forward(cross_entropy_per_target, model, there))
    owner, rows = there.target_row.to(nats.device), there.num_rows
    per_row = torch.zeros(rows, dtype=torch.float64, device=nats.device).index_add_(0, owner, nats)
    return MicrobatchLosses(nats.sum(), per_row, torch.bincount(owner, minlength=rows))


def sum_losses(
    runtime: Runtime,
    model: torch.nn.Module,
    loader: EvaluationLoader,
    *,
    is_to_stop: Callable[[], bool] = lambda: False,
) -> SplitLosses:
    """Add up the losses of this rank's rows, without gradients and in evaluation mode.

    `is_to_stop` is called before each batch; True cuts the evaluation short.
    """
    examples: Any = loader.dataset
    totals = [0.0] * (len(LossSums._fields) - 1)
    subsets = torch.zeros(len(examples.subset_names), len(totals), dtype=torch.float64)
    is_cut_short = False
    with evaluation_mode(model):
        for rows, microbatch in zip_longest(loader.row_batches, in_even_rounds(runtime, loader)):
            if is_cut_short := is_to_stop():
                break
            total, nats, counts = measure_losses(runtime, model, microbatch)
            means = nats[counts > 0] / counts[counts > 0]
            batch = (total, counts.sum(), (counts > 0).sum(), means.sum(), (means**2).sum())
            totals = [total + float(value) for total, value in zip(totals, batch, strict=True)]
            if len(subsets) and rows is not None:
                nats, counts = nats.cpu(), counts.cpu()
                means = nats / counts.clamp(min=1)  # a row without a target has no nats either
                of_rows = torch.stack([nats, counts.double(), (counts > 0).double(), means, means**2], dim=1)
                subsets.index_add_(0, examples.subset[rows].int(), of_rows)
    of_subsets = (LossSums(*sums) for sums in subsets.tolist())
    split_sums = LossSums(num_cut_short=1.0) if is_cut_short else LossSums(*totals)
    return SplitLosses(split_sums, dict(zip(examples.subset_names, of_subsets, strict=True)))


def in_even_rounds(runtime: Runtime, loader: EvaluationLoader) -> Iterator[Microbatch]:
    """Yield this rank's micro-batches. If the weights are sharded, add empty ones until all ranks have had as many."""
    num_done, num_rows = 0, sum(map(len, loader.row_batches))
    for rows, microbatch in zip(loader.row_batches, loader, strict=True):
        report_progress(f"{num_done:,} of {num_rows:,} rows")
        yield microbatch
        num_done += len(rows)
    if runtime.placement.shard_size is not None:
        from finetune.engine.padded import EMPTY_MICROBATCH

        yield from [EMPTY_MICROBATCH] * (loader.most_batches - len(loader.row_batches))
