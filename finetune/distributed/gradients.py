"""Sum the gradients of several ranks: in one all-reduce after the backward passes, or in torch's reducer meanwhile."""

# No postponed annotations here: torch looks at those of `_summed` and refuses text.
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from finetune.engine.loss import LossFunction


def sum_flat(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Sum the gradients over ranks in one all-reduce.

    Summed in the parameters' own order, gradients have the same bits after a restart, unlike in rebuilt buckets; and a
    rank may have no micro-batch.

    Collective: every rank, once per step, with the same parameters, each of which has a gradient.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


class Reducer:
    """torch's DistributedDataParallel, which sums gradients bucket by bucket while the backward pass goes on.

    Every rank needs the same number of micro-batches in a step. The order of sums follows the buckets, which torch
    rebuilds after the first step: from three ranks on, a resumed run differs in the last bits.

    Collective: every rank makes one for the same model, which is placed (`Placement.place`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: LossFunction,
        *,
        device: torch.device,
        output_device: int | None = None,
        find_unused_parameters: bool = False,
    ) -> None:
        self.model = model
        is_gpu = device.type == "cuda"
        with warnings.catch_warnings():
            # torch 2.13 has a new name for it, which the older versions that we allow do not know.
            warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
            self._wrapped = DistributedDataParallel(
                _LossOf(model, loss),
                device_ids=[device] if is_gpu else None,
                output_device=output_device if is_gpu else None,
                find_unused_parameters=find_unused_parameters,
                # Otherwise it would send a frozen base of many gigabytes, and rank 0's buffers before each step.
                init_sync=False,
                broadcast_buffers=False,
            )
        # The loss is divided by the number of targets of all ranks: torch's own mean over ranks would divide again.
        self._wrapped.register_comm_hook(None, _summed)

    def loss(self, microbatch: Any, *, is_last: bool) -> torch.Tensor:
        """Return the summed loss. Only the backward pass of a step's last micro-batch sums gradients over ranks."""
        quiet: AbstractContextManager[None] = nullcontext() if is_last else self._wrapped.no_sync()
        with quiet:
            result: torch.Tensor = self._wrapped(microbatch)
        return result


class _LossOf(torch.nn.Module):
    """The module that the reducer wraps: it watches one forward call, and that must be the loss's."""

    def __init__(self, model: torch.nn.Module, loss: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, microbatch: Any) -> torch.Tensor:
        return self._loss(self.model, microbatch)


def _summed(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
    return summed
