"""Steps that make no update, because their loss or gradient is not finite. A run imports this module at the first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from finetune.distributed.runtime import Runtime
from finetune.errors import RunFailedError
from finetune.model.base import evaluation_mode
from finetune.runs.state import TrainerState
from finetune.runs.tensors import local_shard
from finetune.training.optim import trainable_parameters
from finetune.units import name_first

if TYPE_CHECKING:
    from finetune.engine.loss import LossFunction

_MOST_ROWS = 32
"""How many rows of a step a message names."""


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


class StepRows(NamedTuple):
    """The rows of a step whose loss or gradient is not finite."""

    setup: Any
    loader: Any
    compute: LossFunction
    step: int

    def names(self) -> list[str]:
        """Return the file and line of each row of the global batch, the same on all ranks.

        The list is empty for a loader without encoded rows, as in a run with rewards, where `rollouts/` names them.
        """
        if not (sides := self._sides):
            return []
        return [sides[0].source(row) for part in self._microbatches(0, 1) for row in part.rows]

    def name_broken(self) -> str:
        """Name rows whose loss is not finite, by computing each row alone. Collective.

        A micro-batch cannot tell, because one row can make the losses of all its rows NaN. At most one row of each rank
        is named. The text is empty if no row is to blame: none is broken, or all rows are. Rows of pairs, of prompts
        and of sharded models are not computed again.
        """
        runtime = self.setup.runtime
        learns_answers = self.setup.config.objective.learns_answers
        if not (learns_answers and self._sides) or runtime.placement.shard_size is not None:
            return ""
        rows = self.loader.dataset
        parts = self._microbatches(runtime.context.rank, runtime.world_size)
        own, broken = [row for part in parts for row in part.rows], []
        with evaluation_mode(self.setup.model):
            for row in own:
                microbatch = self.loader.collate_fn([rows[row]]).to(runtime.device)
                loss = runtime.placement.forward(self.compute, self.setup.model, microbatch).reshape(-1)[0]
                if not loss.isfinite():
                    broken.append(row)
        first_of_each = runtime.collectives.by_rank(float(min(broken, default=-1)))
        num_rows, num_broken = runtime.collectives.sum([float(len(own)), float(len(broken))])
        named = [rows.source(int(row)) for row in first_of_each if row >= 0]
        is_any_row = num_rows > 1 and num_broken == num_rows
        return "" if is_any_row else ", ".join(named)

    @property
    def _sides(self) -> Any:
        """The encoded rows of the loader, for pairs of each side. A loader of a script or of rewards has none."""
        return getattr(getattr(self.loader, "dataset", None), "sides", ())

    def _microbatches(self, rank: int, world_size: int) -> Any:
        epoch, place = divmod(self.step - 1, self.loader.rule.steps_per_epoch)
        return next(self.loader.rule.steps_of_rank(epoch, place, rank, world_size))


def skip_or_refuse(state: TrainerState, result: Any, limit: int, rows: StepRows) -> Any:
    """Return the `StepResult` of a skipped step with the names of its rows, for the log and metrics.jsonl. Collective.

    Raises:
        RunFailedError: the run has skipped more than `limit` steps.
    """
    names = rows.names()
    shown = name_first(names, _MOST_ROWS)
    if state.num_skipped_steps <= limit:
        if not names:
            return result
        not_finite, metrics = f"{result.not_finite} in the step of {shown}", {**result.metrics, "rows": names}
        return result._replace(not_finite=not_finite, metrics=metrics)
    if limit:
        policy = f"training.max_skipped_steps is {limit}, and {state.num_skipped_steps - 1} were skipped before it"
        instead = "a higher training.max_skipped_steps allows more"
    else:
        policy = "training.on_nonfinite is stop"
        instead = "training.on_nonfinite=skip skips a bounded number of such steps"
    look, key = f"Look at the rows of this step{shown and f' ({shown})'}, or lower optim.learning_rate", "optim"
    if named := rows.name_broken():
        look, key = f"The loss of {named} alone is not finite either: correct or remove this row", "data"
    raise RunFailedError(
        f"step {state.step}: {result.not_finite}; {policy}. The weights were left as before the step. {look}; "
        f"{instead}. Then go on: resume=auto resume.allow={key}"
    )
