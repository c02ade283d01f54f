"""Steps that make no update, because their loss or gradient is not finite. A run imports this module at the first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from finetune.distributed.runtime import Runtime
from finetune.errors import RunFailedError
from finetune.model.base import evaluation_mode
from finetune.runs.state import TrainerState
from finetune.runs.tensors import local_shard
from finetune.training.optim import trainable_parameters

if TYPE_CHECKING:
    from finetune.engine.loss import LossFunction


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


def name_broken_rows(setup: Any, loader: Any, compute: LossFunction, step: int) -> str:
    """Name rows that make the loss of a step not finite, by computing each row alone. Collective.

    A micro-batch cannot tell, because one row can make the losses of all its rows NaN. At most one row of each rank is
    named. The text is empty if no row is to blame: none is broken, or all rows are. Rows of pairs, of prompts and of
    sharded models are not computed again.
    """
    runtime, rows = setup.runtime, loader.dataset
    if not setup.config.objective.learns_answers or runtime.placement.shard_size is not None:
        return ""
    epoch, place = divmod(step - 1, loader.rule.steps_per_epoch)
    parts = next(loader.rule.steps_of_rank(epoch, place, runtime.context.rank, runtime.world_size))
    own, broken = [row for part in parts for row in part.rows], []
    with evaluation_mode(setup.model):
        for row in own:
            microbatch = loader.collate_fn([rows[row]]).to(runtime.device)
            if not runtime.placement.forward(compute, setup.model, microbatch).reshape(-1)[0].isfinite():
                broken.append(row)
    first_of_each = runtime.collectives.by_rank(float(min(broken, default=-1)))
    num_rows, num_broken = runtime.collectives.sum([float(len(own)), float(len(broken))])
    named = [rows.source(int(row)) for row in first_of_each if row >= 0]
    is_any_row = num_rows > 1 and num_broken == num_rows
    return "" if is_any_row else ", ".join(named)


def refuse_too_many(state: TrainerState, not_finite: str, limit: int, name_rows: Callable[[int], str]) -> None:
    """Raise RunFailedError if the run has skipped more than `limit` steps. `not_finite` says why the last one was.

    Collective. `name_rows` names the rows that broke a step.
    """
    if state.num_skipped_steps <= limit:
        return
    if limit:
        policy = f"training.max_skipped_steps is {limit}, and {state.num_skipped_steps - 1} were skipped before it"
        instead = "a higher training.max_skipped_steps allows more"
    else:
        policy = "training.on_nonfinite is stop"
        instead = "training.on_nonfinite=skip skips a bounded number of such steps"
    look, key = "Look at the rows of this step, or lower optim.learning_rate", "optim"
    if named := name_rows(state.step):
        look, key = f"The loss of {named} alone is not finite either: correct or remove this row", "data"
    raise RunFailedError(
        f"step {state.step}: {not_finite}; {policy}. The weights were left as before the step. {look}; {instead}. "
        f"Then go on: resume=auto resume.allow={key}"
    )
