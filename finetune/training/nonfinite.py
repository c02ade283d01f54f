"""Steps that make no update, because their loss or gradient is not finite. A run imports this module at the first."""

from __future__ import annotations

import math

import torch

from finetune.distributed.runtime import Runtime
from finetune.errors import RunFailedError
from finetune.runs.state import TrainerState
from finetune.runs.tensors import local_shard
from finetune.training.optim import trainable_parameters


def why_not_finite(runtime: Runtime, loss: float, *, own_loss: float, grad_norm: float) -> str:
    """Return the loss, the ranks on which it is not finite, and the gradient norm. Collective.

    `own_loss` is this rank's.
    """
    are_broken = runtime.collectives.by_rank(float(not math.isfinite(own_loss)))
    ranks = [str(rank) for rank, is_broken in enumerate(are_broken) if is_broken]
    where = f" (that of rank {', '.join(ranks)})" if ranks and runtime.world_size > 1 else ""
    return f"the loss is {loss}{where} and the gradient norm {grad_norm}"


def refuse_broken_weights(runtime: Runtime, model: torch.nn.Module, cause: str) -> None:
    """Refuse to go on if the weights are not finite, since skipping the step would not help. Collective.

    Raises:
        RunFailedError: on all ranks, if the weights of any rank are not finite.
    """
    parts = map(local_shard, trainable_parameters(model))
    is_broken = torch.stack([part.isfinite().all().logical_not() for part in parts])
    own_broken = int(is_broken.sum())
    num_broken, num_ranks = runtime.collectives.sum([float(own_broken), float(own_broken > 0)])
    if num_ranks:
        ranks = f" on {num_ranks:.0f} of {runtime.world_size} ranks" if num_ranks < runtime.world_size else ""
        raise RunFailedError(
            f"{cause}; {num_broken / num_ranks:.0f} of the trained weights hold values that are not finite{ranks}: an "
            "earlier update broke them, and no later step can repair them. They are not saved. Lower "
            "optim.learning_rate or set optim.max_grad_norm, and go on from the last checkpoint: resume=auto "
            "resume.allow=optim"
        )


def refuse_too_many(state: TrainerState, not_finite: str, limit: int) -> None:
    """Raise RunFailedError if the run has skipped more than `limit` steps. `not_finite` says why the last one was."""
    if state.num_skipped_steps <= limit:
        return
    if limit:
        policy = f"training.max_skipped_steps is {limit}, and {state.num_skipped_steps - 1} were skipped before it"
        instead = "a higher training.max_skipped_steps allows more"
    else:
        policy = "training.on_nonfinite is stop"
        instead = "training.on_nonfinite=skip skips a bounded number of such steps"
    raise RunFailedError(
        f"step {state.step}: {not_finite}; {policy}. The weights were left as before the step. Look at the rows "
        f"of this step, or lower optim.learning_rate; {instead}. Then go on: resume=auto resume.allow=optim"
    )
