"""One optimizer step. It sees no epoch, no file and no log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from finetune.data.batches import derived_seed
from finetune.distributed.gradients import LossFunction
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.microbatch import EMPTY_MICROBATCH, Microbatch
from finetune.errors import DataError, RunFailedError
from finetune.training.optim import set_learning_rate, trainable_parameters


@dataclass(frozen=True)
class LossWithFigures:
    """A loss function that also sums other figures over the targets."""

    sums: LossFunction
    """(model, micro-batch) to shape (1 + names,): the loss, with a gradient, then the figures."""
    names: tuple[str, ...]

    def __call__(self, model: torch.nn.Module, microbatch: Any) -> torch.Tensor:
        """Return the loss and the figures."""
        return self.sums(model, microbatch)


class StepResult(NamedTuple):
    """The result of one step, over the whole global batch."""

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
    num_told_to_stop: int = 0
    """Ranks that a signal told to stop before this step; the same number on all ranks."""
    not_finite: str = ""
    """The reason why the step made no update, the same on all ranks; empty if it made one."""
    rank_seconds: tuple[float, ...] = ()
    """Seconds that each rank computed, without waiting; empty in a world of one."""
    figures: Mapping[str, float] = MappingProxyType({})
    """The means over the targets of other figures, by name."""

    @property
    def is_skipped(self) -> bool:
        """True if weights and optimizer are unchanged."""
        return bool(self.not_finite)


def train_step(
    runtime: Runtime,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[tuple[int, Microbatch]],
    *,
    step: int,
    learning_rate: float,
    max_grad_norm: float | None,
    seed: int,
    compute: LossFunction = summed_cross_entropy,
) -> StepResult:
    """Update the weights with this rank's share of a global batch.

    The loss is the sum over all target tokens of the global batch, divided by their number. A mean of means over
    micro-batches or ranks would weigh a short row's tokens more than a long row's.

    If the loss or the gradient is not finite on any rank, no rank makes an update, and the result says why.

    Collective: every rank, with the same step; a rank's share may be empty.

    Args:
        runtime: the world of processes.
        model: in training mode.
        optimizer: prepared by the runtime.
        microbatches: (index in the global batch, micro-batch) pairs of this rank.
        step: the optimizer step, for dropout's seeds and for messages.
        learning_rate: of this step.
        max_grad_norm: see `Runtime.clip_grad_norm`.
        seed: of the run.
        compute: sums the loss, and perhaps other figures, over the targets of a micro-batch.

    Raises:
        DataError: the whole global batch has no target token.
        PeerFailedError: another rank failed outside of the step, and raises its own error.
        RunFailedError: trained weights are not finite, so that no later step can be.
    """
    batch = _count(runtime, microbatches)
    if batch.num_failed_beside:
        runtime.agree_on_failure_beside()
    if batch.num_targets == 0:
        raise DataError(
            f"no row of step {step} has a target token. See how the rows are encoded, or raise data.max_length."
        )
    share = list(microbatches)
    if runtime.needs_even_shares:
        rounds = math.ceil(batch.num_microbatches / runtime.world_size)
        share += [(batch.num_microbatches, EMPTY_MICROBATCH)] * (rounds - len(share))
    # Dropout masks belong to the micro-batch, whichever rank computes it and however often the run was resumed.
    seeded = [(derived_seed(seed, step, index), microbatch) for index, microbatch in share]
    own = _backpropagate(runtime, model, seeded, compute, batch.num_targets)

    parameters = trainable_parameters(model)
    runtime.sync_gradients(parameters)
    # Clipping by an infinite norm turns gradients into zeros or NaN; it is detected before they reach a weight.
    grad_norm = runtime.clip_grad_norm(parameters, max_grad_norm)
    whole = _sum_over_ranks(runtime, own, is_bad_norm=not math.isfinite(grad_norm))
    loss = whole.loss / batch.num_targets
    not_finite = ""
    if math.isfinite(loss) and not whole.is_bad_norm:
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
    else:
        whose = _whose(runtime, not math.isfinite(own.loss))
        not_finite = f"the loss is {loss}{whose} and the gradient norm {grad_norm}"
        _refuse_broken_weights(runtime, model, f"step {step}: {not_finite}")
    optimizer.zero_grad()
    return StepResult(
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        num_targets=batch.num_targets,
        num_tokens=batch.num_tokens,
        num_computed=batch.num_computed,
        num_told_to_stop=batch.num_told_to_stop,
        not_finite=not_finite,
        rank_seconds=() if runtime.needs_even_shares else whole.rank_seconds,
        figures={name: figure / batch.num_targets for name, figure in whole.figures.items()},
    )


class _Counted(NamedTuple):
    """Counts over all ranks for a global batch."""

    num_targets: int
    num_tokens: int
    num_computed: int
    num_microbatches: int
    num_told_to_stop: int
    num_failed_beside: int


def _count(runtime: Runtime, microbatches: Sequence[tuple[int, Microbatch]]) -> _Counted:
    """Count over all ranks. Collective.

    The same exchange tells all ranks, in the same step and at no cost, whether a rank was told to stop or failed.
    """
    counts = [
        sum(getattr(microbatch, name) for _, microbatch in microbatches)
        for name in ("num_targets", "num_tokens", "num_computed")
    ]
    flags = [int(runtime.is_told_to_stop), int(runtime.has_failed_beside)]
    return _Counted(*map(int, runtime.sum([*counts, len(microbatches), *flags])))


class _Sums(NamedTuple):
    """Sums over the targets of one rank, or of all."""

    loss: float
    figures: dict[str, float]
    rank_seconds: tuple[float, ...]
    is_bad_norm: bool = False


def _backpropagate(
    runtime: Runtime,
    model: torch.nn.Module,
    seeded: Sequence[tuple[int, Microbatch]],
    compute: LossFunction,
    num_targets: int,
) -> _Sums:
    """Run forward and backward over this rank's micro-batches, each with its seed; the gradients add up."""
    names = compute.names if isinstance(compute, LossWithFigures) else ()
    sums = [0.0] * (1 + len(names))
    started = time.perf_counter()
    for position, (seed, microbatch) in enumerate(seeded):
        torch.manual_seed(seed)
        made = runtime.loss(compute, model, microbatch, is_last=position == len(seeded) - 1).reshape(-1)
        runtime.backward(made[0] / num_targets)
        sums = [total + more for total, more in zip(sums, made.detach().tolist(), strict=True)]
    seconds = time.perf_counter() - started
    return _Sums(sums[0], dict(zip(names, sums[1:], strict=True)), (seconds,))


def _sum_over_ranks(runtime: Runtime, own: _Sums, *, is_bad_norm: bool) -> _Sums:
    """Add the sums of all ranks and collect the seconds of each. Collective.

    The norm may overflow on one kind of device and not on another, so the ranks decide together.
    """
    seconds = [own.rank_seconds[0] * (rank == runtime.rank) for rank in range(runtime.world_size)]
    loss, num_bad, *others = runtime.sum([own.loss, float(is_bad_norm), *own.figures.values(), *seconds])
    figures = dict(zip(own.figures, others, strict=False))
    rank_seconds = tuple(others[len(figures) :]) if runtime.world_size > 1 else ()
    return _Sums(loss, figures, rank_seconds, bool(num_bad))


def _whose(runtime: Runtime, is_mine: bool) -> str:
    """Name the ranks on which `is_mine` is true; empty in a world of one. Collective."""
    counts = runtime.sum([float(is_mine and rank == runtime.rank) for rank in range(runtime.world_size)])
    ranks = [str(rank) for rank, count in enumerate(counts) if count]
    return f" (that of rank {', '.join(ranks)})" if ranks and runtime.world_size > 1 else ""


def _refuse_broken_weights(runtime: Runtime, model: torch.nn.Module, what: str) -> None:
    """Refuse to go on if the weights are not finite, since skipping the step would not help. Collective.

    Raises:
        RunFailedError: on all ranks, if the weights of any rank are not finite.
    """
    names = [name for name, weight in model.named_parameters() if weight.requires_grad and not weight.isfinite().all()]
    num_broken, num_ranks = runtime.sum([float(len(names)), float(bool(names))])
    if num_ranks:
        ranks = f" on {num_ranks:.0f} of {runtime.world_size} ranks" if num_ranks < runtime.world_size else ""
        raise RunFailedError(
            f"{what}; {num_broken / num_ranks:.0f} of the trained weights hold values that are not finite{ranks}: an "
            "earlier update broke them, and no later step can repair them. They are not saved. Lower "
            "optim.learning_rate, add optim.warmup_steps or set optim.max_grad_norm, and go on from the last "
            "checkpoint: resume=auto resume.allow=optim"
        )
