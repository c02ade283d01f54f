"""ONE optimizer step. It never sees an epoch, a file or a log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from finetune.data.batches import EMPTY_MICROBATCH, Microbatch, derived_seed
from finetune.distributed.runtime import Runtime
from finetune.engine.loss import summed_cross_entropy
from finetune.errors import DataError, RunFailedError
from finetune.training.optim import set_learning_rate, trainable_parameters


class StepResult(NamedTuple):
    """What one step did, over the whole global batch."""

    loss: float
    """Nats per target token."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    num_targets: int
    num_tokens: int
    num_told_to_stop: int = 0
    """Ranks that a signal had told to stop before this step: the same number on all."""


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
) -> StepResult:
    """From this rank's share of a global batch to updated weights.

    The loss is the sum over all target tokens of the global batch, divided by their number. A mean of means over
    micro-batches or ranks would weigh a short row's tokens more than a long row's.

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

    Raises:
        DataError: the whole global batch has no target token.
        RunFailedError: the loss or the gradient is not finite; the weights are as before the step.
    """
    parameters = trainable_parameters(model)

    counts = [sum(m.num_targets for _, m in microbatches), sum(m.num_tokens for _, m in microbatches)]
    # Whether a rank was told to stop travels along: all ranks then know it in the same step, at no cost.
    told = int(runtime.is_told_to_stop)
    num_targets, num_tokens, num_microbatches, num_told = map(int, runtime.sum([*counts, len(microbatches), told]))
    if num_targets == 0:
        raise DataError(
            f"no row of step {step} has a target token. See how the rows are encoded, or raise data.max_length."
        )

    share = list(microbatches)
    if runtime.needs_even_shares:
        rounds = math.ceil(num_microbatches / runtime.world_size)
        share += [(num_microbatches, EMPTY_MICROBATCH)] * (rounds - len(share))
    loss_sum = 0.0
    for position, (index, microbatch) in enumerate(share):
        # Masks belong to the micro-batch, whatever rank computes it and however often the run was resumed.
        torch.manual_seed(derived_seed(seed, step, index))
        is_last = position == len(share) - 1
        summed = runtime.loss(summed_cross_entropy, model, microbatch, is_last=is_last)
        runtime.backward(summed / num_targets)
        loss_sum += float(summed.detach())
    runtime.sync_gradients(parameters)

    loss = runtime.sum([loss_sum])[0] / num_targets
    grad_norm = runtime.clip_grad_norm(parameters, max_grad_norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise RunFailedError(
            f"step {step}: the loss is {loss}{_whose(runtime, loss_sum)} and the gradient norm {grad_norm}; the "
            "weights were left as before the step. Lower optim.learning_rate, add optim.warmup_steps, or look at the "
            "rows of this step."
        )

    set_learning_rate(optimizer, learning_rate)
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(loss, grad_norm, learning_rate, num_targets, num_tokens, num_told)


def _whose(runtime: Runtime, loss_sum: float) -> str:
    """Which ranks' part of the loss is not finite, in words. Collective."""
    is_bad = not math.isfinite(loss_sum)
    counts = runtime.sum([float(is_bad and rank == runtime.rank) for rank in range(runtime.world_size)])
    ranks = [str(rank) for rank, count in enumerate(counts) if count]
    return f" (that of rank {', '.join(ranks)})" if ranks and runtime.world_size > 1 else ""
