"""One optimizer step. It sees no epoch, no file and no log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.data.batches import derived_seed
from finetune.distributed.liveness import as_out_of_memory
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import LossFunction, summed_cross_entropy
from finetune.engine.microbatch import Microbatch
from finetune.engine.products import in_float64, unchanged_weights
from finetune.errors import DataError, RunFailedError
from finetune.training.optim import learning_rate_at, set_learning_rate, trainable_parameters

if TYPE_CHECKING:
    from types import TracebackType

    from finetune.config.schema import Config
    from finetune.engine.captured import CapturedMicrobatches


@dataclass(frozen=True)
class LossWithMetrics:
    """A loss function that also sums other metrics over the targets."""

    sums: LossFunction
    """(model, micro-batch) to shape (1 + names,): the loss, with a gradient, then the metrics."""
    names: tuple[str, ...]
    global_sums: Callable[[Runtime, torch.nn.Module, Sequence[Any]], Sequence[float]] | None = None
    """Computes this rank's part of the sums over the global batch that the loss needs, without a gradient."""
    with_global_sums: Callable[[Any, Sequence[float]], Any] | None = None
    """Returns a copy of a micro-batch that holds these sums over all ranks."""

    def __call__(self, model: torch.nn.Module, microbatch: Any) -> torch.Tensor:
        """Return the loss and the metrics."""
        return self.sums(model, microbatch)


class StepTooLargeError(Exception):
    """Memory ran out in a step, on this rank or another. All ranks raise it; no gradient is left, no weight changed.

    Attributes:
        error: the error to raise if the step cannot be made smaller; None if another rank ran out of memory.
    """

    def __init__(self, error: RunFailedError | None) -> None:
        super().__init__("memory ran out")
        self.error = error


class StepSettings(NamedTuple):
    """The settings of one step."""

    step: int
    """The number of the optimizer step, for dropout's seeds and for messages."""
    learning_rate: float
    max_grad_norm: float | None
    """Gradients with a larger norm are scaled down to it; None: none is."""
    seed: int
    """Of the run."""
    loss_scale: int = 1
    """The factor of the loss in the backward pass, a power of two; 1 unless the run computes in fp16."""

    @classmethod
    def of(cls, config: Config, step: int, num_steps: int, *, loss_scale: int = 1) -> StepSettings:
        """Return the settings of one step, given the configuration and the number of steps of the run."""
        rate = learning_rate_at(step, num_steps, config.optim)
        return cls(step, rate, config.optim.max_grad_norm, config.seed, loss_scale)


class StepResult(NamedTuple):
    """The result of one step, over the whole global batch."""

    step: int
    """The number of the step, counted from 1."""
    loss: float
    """Nats per target token."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_targets: int
    num_tokens: int
    """Without padding; a shared token counts once for each row."""
    num_computed: int = 0
    """Without padding; a shared token counts once."""
    num_preempted: int = 0
    """Ranks that a signal preempted before the end of this step's passes; the same number on all ranks."""
    not_finite: str = ""
    """The reason why the step made no update, the same on all ranks; empty if it made one."""
    rank_seconds: tuple[float, ...] = ()
    """Seconds that each rank computed, without waiting; empty in a world of one."""
    metrics: Mapping[str, Any] = MappingProxyType({})
    """The means over the targets of other metrics, by name."""

    @property
    def is_skipped(self) -> bool:
        """True if weights and optimizer are unchanged."""
        return bool(self.not_finite)


def train_step(
    runtime: Runtime,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[tuple[int, Microbatch]],
    settings: StepSettings,
    *,
    compute: LossFunction = summed_cross_entropy,
    may_be_too_large: bool = False,
    graphs: CapturedMicrobatches | None = None,
) -> StepResult:
    """Update the weights with a global batch, of which this rank computes its micro-batches.

    The loss is the sum over all target tokens of the global batch, divided by their number. A mean of means over
    micro-batches or ranks would weigh a short row's tokens more than a long row's. If the loss or the gradient is not
    finite on any rank, no rank makes an update. Collective: every rank; a rank may have no micro-batch.

    Args:
        runtime: the world of processes.
        model: in training mode.
        optimizer: prepared by the runtime.
        microbatches: (index in the global batch, micro-batch) pairs of this rank.
        settings: of this step.
        compute: sums the loss, and perhaps other metrics, over the targets of a micro-batch.
        may_be_too_large: StepTooLargeError may be raised. Not with torch's reducer, whose passes wait for each other.
        graphs: computes the micro-batches that CUDA graphs replay.

    Raises:
        DataError: the whole global batch has no target token.
        PeerFailedError: another rank failed outside of the step, and raises its own error.
        RunFailedError: trained weights are not finite, so that no later step can be.
        StepTooLargeError: on all ranks; one ran out of memory.
    """
    batch = _count(runtime, microbatches, settings.step)
    placement, parameters = runtime.placement, trainable_parameters(model)
    divisor = batch.num_targets / settings.loss_scale
    sums = in_float64(torch.zeros(1 + len(_names(compute)), device=runtime.device))

    def forward_and_backward(seeded: Sequence[tuple[int, Microbatch]]) -> float:
        """Add to the gradients and to `sums`, and return the seconds. Nothing here may wait for the device."""
        started = time.perf_counter()
        for position, (seed, microbatch) in enumerate(seeded):
            torch.manual_seed(seed)
            is_last = position == len(seeded) - 1
            loss_and_metrics = None if graphs is None else graphs(microbatch, divisor)
            if loss_and_metrics is None:
                loss_and_metrics = placement.loss(compute, model, microbatch, is_last=is_last).reshape(-1)
                placement.backward(loss_and_metrics[0] / divisor, is_last=is_last)
            sums.add_(in_float64(loss_and_metrics.detach()))
        if runtime.world_size > 1 and not placement.uses_reducer:  # with it, ranks have met in the last backward pass
            runtime.liveness.let_device_finish()
        return time.perf_counter() - started

    attempt = partial(_Attempt, runtime, parameters, graphs) if may_be_too_large else nullcontext
    with unchanged_weights():
        seeded = _seeded(runtime, microbatches, settings, num_microbatches=batch.num_microbatches)
        seeded = _with_global_sums(runtime, model, seeded, compute, attempt)
        with attempt():
            seconds = forward_and_backward(seeded)
    placement.sync_gradients(parameters)
    placement.unscale_gradients(parameters, settings.loss_scale)
    # Clipping by an infinite norm turns gradients into zeros or NaN; it is detected before they reach a weight.
    totals = _read_over_ranks(runtime, sums, placement.clip_grad_norm(parameters, settings.max_grad_norm), seconds)
    loss, not_finite = totals.loss / batch.num_targets, ""
    if math.isfinite(loss) and not totals.is_bad_norm:
        set_learning_rate(optimizer, settings.learning_rate)
        optimizer.step()
    else:
        from finetune.training.nonfinite import refuse_broken_weights, why_not_finite

        not_finite = why_not_finite(runtime, loss, own_loss=totals.own_loss, grad_norm=totals.grad_norm)
        refuse_broken_weights(runtime, model, f"step {settings.step}: {not_finite}")
    optimizer.zero_grad()
    result = StepResult(settings.step, loss, totals.grad_norm, settings.learning_rate, *batch[:3], totals.num_preempted)
    metrics = _means(_names(compute), totals.metrics, batch.num_targets)
    return result._replace(not_finite=not_finite, metrics=metrics, rank_seconds=totals.rank_seconds)


def _seeded(
    runtime: Runtime, microbatches: Sequence[tuple[int, Microbatch]], settings: StepSettings, *, num_microbatches: int
) -> Sequence[tuple[int, Microbatch]]:
    """Return this rank's micro-batches with the seed of each, and empty ones where all ranks need equally many.

    Dropout masks belong to the micro-batch, whichever rank computes it and however often the run was resumed.
    """
    indexed = list(microbatches)
    if runtime.placement.needs_equal_microbatches:
        from finetune.engine.padded import EMPTY_MICROBATCH

        rounds = math.ceil(num_microbatches / runtime.world_size)
        indexed += [(num_microbatches, EMPTY_MICROBATCH)] * (rounds - len(indexed))
    return [(derived_seed(settings.seed, settings.step, index), microbatch) for index, microbatch in indexed]


class _Counted(NamedTuple):
    """Counts over all ranks for a global batch. The first three are in `StepResult`."""

    num_targets: int
    num_tokens: int
    num_computed: int
    num_microbatches: int
    num_failed_beside: int


def _count(runtime: Runtime, microbatches: Sequence[tuple[int, Microbatch]], step: int) -> _Counted:
    """Count over all ranks. Collective.

    The same collective tells all ranks, in the same step and at no cost, whether a rank failed.

    Raises:
        DataError: see `train_step`.
        PeerFailedError: see `train_step`.
    """
    counts = [
        sum(getattr(microbatch, name) for _, microbatch in microbatches)
        for name in ("num_targets", "num_tokens", "num_computed")
    ]
    has_failed = int(runtime.collectives.has_failed_beside)
    batch = _Counted(*map(int, runtime.collectives.sum([*counts, len(microbatches), has_failed])))
    if batch.num_failed_beside:
        runtime.collectives.agree_on_failure_beside()
    if batch.num_targets == 0:
        raise DataError(f"no row of step {step} has a target token. Look at the rows, or raise data.max_length.")
    return batch


def _with_global_sums(
    runtime: Runtime,
    model: torch.nn.Module,
    seeded: Sequence[tuple[int, Microbatch]],
    compute: LossFunction,
    attempt: Callable[[], AbstractContextManager[Any]],
) -> Sequence[tuple[int, Microbatch]]:
    """Give the micro-batches the sums over the global batch that their loss needs. Collective if it needs any.

    The sums are over the global batch, so that the loss does not depend on the split into micro-batches or on the
    number of ranks. This rank's part of them is added up in a context of `attempt`.
    """
    if not isinstance(compute, LossWithMetrics) or compute.global_sums is None or compute.with_global_sums is None:
        return seeded
    with attempt():
        own_sums = compute.global_sums(runtime, model, [microbatch for _, microbatch in seeded])
    global_sums = runtime.collectives.sum(own_sums)
    return [(seed, compute.with_global_sums(microbatch, global_sums)) for seed, microbatch in seeded]


class _Attempt:
    """A part of a step that may run out of memory. If it does on one rank, all ranks drop the gradients. Collective.

    Raises:
        StepTooLargeError: on all ranks, on exit.
    """

    def __init__(self, runtime: Runtime, parameters: Sequence[torch.nn.Parameter], graphs: Any) -> None:
        self._runtime, self._parameters, self._graphs = runtime, parameters, graphs

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        out_of_memory = None if error is None else as_out_of_memory(error)
        if error is not None and out_of_memory is None:
            return
        while error is not None:  # the frames of what was called hold the tensors of the pass
            clear_frames(error.__traceback__)
            error = error.__context__
        if sum(self._runtime.collectives.sum([float(out_of_memory is not None)])):
            for parameter in self._parameters:
                parameter.grad = None
            if self._graphs is not None:
                self._graphs.free()
            if self._runtime.device.type == "cuda":
                torch.cuda.empty_cache()
            raise StepTooLargeError(out_of_memory) from None


def _means(names: Sequence[str], sums: Sequence[float], num_targets: int) -> dict[str, float]:
    """Return the mean of each metric, by name, without those for which there was nothing to measure."""
    return {name: total / num_targets for name, total in zip(names, sums, strict=True) if not math.isnan(total)}


def _names(compute: LossFunction) -> tuple[str, ...]:
    return compute.names if isinstance(compute, LossWithMetrics) else ()


class _StepSums(NamedTuple):
    """The results of a step, summed over all ranks unless an attribute says otherwise."""

    loss: float
    metrics: list[float]
    is_bad_norm: bool
    rank_seconds: tuple[float, ...]
    num_preempted: int
    grad_norm: float
    own_loss: float
    """Of this rank."""


def _read_over_ranks(runtime: Runtime, sums: torch.Tensor, norm: torch.Tensor, seconds: float) -> _StepSums:
    """Add the sums of all ranks, collect the seconds of each, and read all that the host needs at once. Collective.

    The norm may overflow on one device type and not on another, so the ranks decide together. A signal is counted here,
    after the passes, so that a run ends after the step in which it comes.
    """
    norm = in_float64(norm).reshape(1)
    is_bad = norm.float().square().isfinite().logical_not().to(norm.dtype)  # Adam squares gradients in fp32
    of_ranks = sums.new_zeros(runtime.world_size if runtime.world_size > 1 else 0)
    of_ranks[runtime.rank : runtime.rank + 1].fill_(seconds)
    vectors = {"loss": sums[:1], "is_bad_norm": is_bad, "metrics": sums[1:], "rank_seconds": of_ranks}
    vectors["num_preempted"] = torch.full_like(is_bad, runtime.stop_requests.is_on_this_rank)
    read = runtime.collectives.sum_and_read(vectors, own={"grad_norm": norm, "own_loss": sums[:1]})
    return _StepSums(
        loss=read["loss"][0],
        metrics=read["metrics"],
        is_bad_norm=bool(read["is_bad_norm"][0]),
        rank_seconds=() if runtime.placement.needs_equal_microbatches else tuple(read["rank_seconds"]),
        num_preempted=int(read["num_preempted"][0]),
        grad_norm=read["grad_norm"][0],
        own_loss=read["own_loss"][0],
    )
