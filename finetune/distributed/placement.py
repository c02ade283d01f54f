"""Place a model's weights on the devices of the ranks, and compute its loss and gradients there.

`Placement` moves or shards a model, computes forward and backward passes in the run's precision, and sums the
gradients over ranks: in one all-reduce after the backward passes, by torch's reducer, or as FSDP2 does.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from finetune.distributed.accelerate_library import Accelerator
from finetune.distributed.collectives import Collectives
from finetune.distributed.device import Precision, convert_weights
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.liveness import Liveness
from finetune.distributed.stop_requests import StopRequests
from finetune.engine.products import WITHOUT_FLOAT64
from finetune.runs.tensors import is_sharded, local_shard
from finetune.threads import is_for_one_thread

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.distributed.gradients import Reducer
    from finetune.distributed.sharding import ShardedModel
    from finetune.engine.loss import LossFunction

Value = TypeVar("Value")

_log = logging.getLogger(__name__)
_PIECE = 65_536
"""Values that a core's cache holds in float64."""


class Placement:
    """The model's weights on this rank's device, and the forward and backward passes over them.

    The accelerator is for the autocast and the backward pass. It scales and accumulates nothing. Every `model` that a
    method takes is placed or sharded already, except that of `place` and `shard`.

    Attributes:
        gathered_bytes: see `ShardedModel`; 0 if nothing is sharded.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: Config,
        precision: Precision,
        *,
        liveness: Liveness,
        collectives: Collectives,
        stop_requests: StopRequests,
    ) -> None:
        self._accelerator = accelerator
        self._parallel = config.parallel
        self._is_full = config.training.method == "full"
        self._precision = precision
        self._liveness = liveness
        self._collectives = collectives
        self._stop_requests = stop_requests
        self._reducer: Reducer | None = None
        self._sharded: ShardedModel | None = None
        self.gathered_bytes = 0

    @property
    def context(self) -> ProcessContext:
        """This process's rank, world size and device."""
        return self._liveness.context

    def fit_threads(self, model: torch.nn.Module) -> None:
        """Let one thread compute a narrow model on the CPU, until this run leaves."""
        width, before = getattr(getattr(model, "config", None), "hidden_size", None), torch.get_num_threads()
        if self.context.device.type == "cpu" and before > 1 and is_for_one_thread(width, os.environ):
            _log.info("one thread computes this model of width %s; OMP_NUM_THREADS sets another number", width)
            torch.set_num_threads(1)
            self._liveness.on_close(lambda _: torch.set_num_threads(before))

    def place(self, model: torch.nn.Module) -> None:
        """Move a model to this process's device and convert its weights to the types of the run.

        Trained weights are fp32 always; frozen ones take the precision of the run. Collective: rank 0's trained weights
        are copied to all, so that every rank starts equal whatever its own random numbers were.
        """
        convert_weights(model, self._precision, self.context.device)
        self._accelerator.prepare_model(model, evaluation_mode=True)
        if self.context.distributed:
            from finetune.distributed.sharding import copy_trained_from_main

            with self._liveness.collective("copying rank 0's weights"):
                copy_trained_from_main(model.parameters())

    def shard(self, model: torch.nn.Module) -> None:
        """Do as `place`, and shard the weights over the ranks (`parallel.sharding`); see `ShardedModel`.

        From here on `apply`, `forward` and `loss` are the only ways through the model. Collective.
        """
        from finetune.distributed.sharding import ShardedModel

        assert self.shard_size is not None
        self._collectives.start_store_barrier()
        with self._liveness.collective("sharding the model"):
            self._sharded = ShardedModel(
                model,
                self._parallel,
                precision=self._precision,
                device=self.context.device,
                world_size=self.context.world_size,
                shards_trained=self._is_full,
            )
        self.gathered_bytes = self._sharded.gathered_bytes
        self._stop_requests.is_forward_collective = True
        weights = "all weights" if self._is_full else "the frozen weights"
        _log.info("%s are sharded over %d processes, layer by layer", weights, self.shard_size)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand an optimizer to Accelerate. The learning rate is never handed over: it is a function of the step."""
        prepared: torch.optim.Optimizer = self._accelerator.prepare_optimizer(optimizer)
        return prepared

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context in which a forward pass computes in the run's precision."""
        if self._precision == "fp16":
            return torch.autocast(self.context.device.type, dtype=torch.float16)
        context: AbstractContextManager[None] = self._accelerator.autocast()
        return context

    @property
    def uses_reducer(self) -> bool:
        """Whether torch's reducer sums the gradients (`parallel.gradient_sync=ddp`)."""
        return self._parallel.gradient_sync == "ddp" and self.context.distributed

    @property
    def shard_size(self) -> int | None:
        """Number of processes that share one copy of the weights; None: each has a copy of its own."""
        if self._parallel.sharding == "none" or not self.context.distributed:
            return None
        return self._parallel.shard_size or self.context.world_size

    @property
    def shards_trained(self) -> bool:
        """Whether the trained weights are sharded, with their gradients and optimizer state."""
        return self.shard_size is not None and self._is_full

    @property
    def needs_equal_microbatches(self) -> bool:
        """Whether every rank needs the same number of micro-batches: torch's reducer and sharded weights do."""
        return self.uses_reducer or self.shard_size is not None

    def forward(
        self, compute: Callable[[torch.nn.Module, Any], Value], model: torch.nn.Module, microbatch: Any
    ) -> Value:
        """Compute something of a micro-batch in the run's precision.

        Collective if the model is sharded: all ranks call it equally often.
        """
        there = microbatch.to(self.context.device)
        with self.autocast():
            return self.apply(lambda full_model: compute(full_model, there), model)

    def apply(self, compute: Callable[[Any], Value], model: torch.nn.Module) -> Value:
        """Compute something of a model, which may run it several times.

        Collective if the model is sharded: all ranks call it equally often.
        """
        if self._sharded is None:
            return compute(model)
        self._stop_requests.before_sharded_forward()
        with self._all_gathering("forward"):
            return self._sharded.apply(compute)

    def loss(self, compute: LossFunction, model: torch.nn.Module, microbatch: Any, *, is_last: bool) -> torch.Tensor:
        """Compute a micro-batch's loss in the run's precision. The last backward pass may sync the gradients.

        Collective if `needs_equal_microbatches`: every rank, equally often in a step.
        """
        if not self.uses_reducer:
            with self._liveness.range("forward"):
                return self.forward(compute, model, microbatch)
        there = microbatch.to(self.context.device)
        with self._liveness.range("forward"), self.autocast():
            if self._reducer is None or self._reducer.model is not model:
                from finetune.distributed.gradients import Reducer

                with self._liveness.collective("making torch's reducer"):
                    self._reducer = Reducer(
                        model,
                        compute,
                        device=self.context.device,
                        output_device=self._parallel.output_device,
                        find_unused_parameters=self._parallel.find_unused_parameters,
                    )
            return self._reducer.loss(there, is_last=is_last)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add a loss's gradients to this rank's own; `sync_gradients` sums them over ranks.

        Collective if the weights are sharded; and with `parallel.gradient_sync=ddp`, where the step's last backward
        pass sums them.
        """
        waiting: AbstractContextManager[None] = nullcontext()
        if self._sharded is not None:
            waiting = self._all_gathering("backward")
        elif is_last and self._reducer is not None:
            # This rank computes in the block too, so the block has no range of its own and no wait before it.
            waiting = self._liveness.collective("backward", is_named=False, waits_before=False)
        with self._liveness.range("backward"), waiting:
            self._accelerator.backward(loss)

    def sync_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients over ranks, unless the backward passes have done so.

        A parameter without a gradient counts as zero, also in a world of one, so that the optimizer does the same
        everywhere. A GPU sums them while the host goes on to `sum_and_read`, which waits.

        Collective: every rank, once per step, with the same parameters, after `let_device_finish`.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.context.distributed and self._reducer is None and not self.shards_trained:
            from finetune.distributed.gradients import sum_flat

            with self._liveness.collective("sync_gradients", waits_before=False, waits_after=False):
                sum_flat(parameters)

    def unscale_gradients(self, parameters: Sequence[torch.nn.Parameter], loss_scale: int) -> None:
        """Divide gradients by the factor of the loss. It is a power of two, so that no bit of a gradient changes."""
        if loss_scale != 1:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            torch._foreach_mul_(gradients, 1 / loss_scale)

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients down to `max_norm` > 0 (None: only measure), and return their norm before that.

        After `sync_gradients` the norm is equal on all ranks. It is a scalar on their device. The device may still
        compute it, so that reading it makes the host wait.

        Collective if `shards_trained`.
        """
        if self._sharded is None or not self._sharded.shards_trained:
            norm = gradient_norm(parameters)
        else:
            with self._liveness.collective("gradient norm", waits_before=False, waits_after=False):
                norm = gradient_norm(parameters, over=self._sharded.group)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.float())
        return norm

    @contextmanager
    def full_tensors(self, tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Yield a function that returns the full tensor for a sharded one. Only the main process calls this function.

        It calls the function once for each of `tensors`, in their order. If it leaves some out, for example because its
        disk failed, all ranks all-gather these at the end of the block. Otherwise the other ranks would wait for ever.

        Collective: every rank enters the block, with the same tensors in the same order.
        """
        left = deque(tensor for tensor in tensors if is_sharded(tensor))

        def read_full(tensor: torch.Tensor) -> torch.Tensor:
            if not is_sharded(tensor):
                return tensor
            assert left.popleft() is tensor, "the ranks gather in one order"
            with self._liveness.collective("gathering weights (saving)", is_named=False):
                gathered: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
                return gathered

        try:
            yield read_full
        except Exception:
            while left:
                read_full(left[0])
            raise
        while left:
            read_full(left[0])

    def forget_model(self) -> None:
        """Drop what refers to the model and to groups, when the run leaves."""
        self._reducer = self._sharded = None
        self._accelerator.free_memory()

    def _all_gathering(self, activity: str) -> AbstractContextManager[None]:
        """Return a block in which this rank computes and all-gathers weights: without a range or a wait of its own."""
        activity = f"gathering weights ({activity})"
        return self._liveness.collective(activity, is_named=False, waits_before=False, waits_after=False)


def gradient_norm(parameters: Sequence[torch.nn.Parameter], *, over: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Compute the norm of all gradients together, in float64 if their device has it: a scalar there.

    In fp32 the norm of 200 million values changes in the fourth digit with the order in which they are added up, and so
    from one number of ranks to another; clipping would carry that into the weights.

    Collective with a group, for its ranks: those over which the gradients are sharded. Without one, each rank has the
    full gradients.
    """
    gradients = [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    device_type = gradients[0].device.type
    if device_type == "cpu":  # where torch takes ten times as long to convert each value as it is added
        pieces = (piece for gradient in gradients for piece in torch.split(gradient.reshape(-1), _PIECE))
        norms = [torch.linalg.vector_norm(piece.double()) for piece in pieces]
    else:
        norms = list(
            torch._foreach_norm(gradients, 2, torch.float32 if device_type in WITHOUT_FLOAT64 else torch.float64)
        )
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    if over is None:
        return norm
    squared = norm.square()
    dist.all_reduce(squared, group=over)
    return squared.sqrt()
