"""A small wrapper over `Accelerator`: the only module that imports accelerate.

Our initialiser runs first and Accelerate adopts its group. The other order cannot work: on an unexpected launch
Accelerate does not fail, it answers "one process, main" on every rank. So the two worlds are compared before anything
is trained.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, broadcast_object_list, gather_object

from finetune import __version__
from finetune.distributed.ddp_init import ProcessContext
from finetune.distributed.environment import LaunchEnvironment, requested_engine, requested_precision
from finetune.errors import FinetuneError, LaunchError, PeerFailedError
from finetune.fallbacks import Fallbacks

Value = TypeVar("Value")
Precision = Literal["fp32", "bf16"]

_log = logging.getLogger(__name__)
_PLAIN_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Runtime:
    """The verbs a training step needs from the world of processes; no loop.

    Attributes:
        context: this process's rank, world size and device.
        environment: what the launcher said.
        fallbacks: every downgrade taken in this run.
        precision: ``fp32`` or ``bf16``, settled for this device.
    """

    def __init__(
        self,
        context: ProcessContext,
        environment: LaunchEnvironment,
        fallbacks: Fallbacks,
        *,
        precision: Literal["auto", "fp32", "bf16"] = "auto",
    ) -> None:
        self.context = context
        self.environment = environment
        self.fallbacks = fallbacks
        self.precision: Precision = _resolve_precision(precision, context.device)
        self._is_set_up = False
        self._closing: list[Callable[[BaseException | None], None]] = []
        engine = requested_engine(os.environ)
        if engine is not None:
            # To train as plain data parallelism then would be a quiet lie.
            raise LaunchError(
                f"accelerate launch asks for {engine} (ACCELERATE_USE_{engine}), which finetune does not support. "
                "Use a config file with distributed_type MULTI_GPU, MULTI_CPU or NO."
            )
        asked = requested_precision(os.environ)
        if asked not in (None, self.precision):
            raise LaunchError(
                f"accelerate launch asks for mixed precision {asked} (ACCELERATE_MIXED_PRECISION), but "
                f"training.precision {precision} means {self.precision} here. Set training.precision, or remove it "
                "from accelerate's config."
            )
        self._accelerator = Accelerator(
            cpu=context.device.type == "cpu",
            mixed_precision="bf16" if self.precision == "bf16" else "no",
            gradient_accumulation_steps=1,
        )
        self._compare_worlds()
        self._log_first_line()

    @property
    def rank(self) -> int:
        """This process's rank, 0 alone."""
        return self.context.rank

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return self.context.world_size

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.context.device

    @property
    def is_main_process(self) -> bool:
        """True on the one process that writes."""
        return self.context.rank == 0

    @property
    def backend(self) -> str:
        """``nccl``, ``gloo``, or ``none`` in a world of one."""
        return str(dist.get_backend()) if self.context.distributed else "none"

    def place(self, model: torch.nn.Module) -> None:
        """Move a model to this process's device and settle the types of its weights.

        Trained weights are fp32 always; frozen ones take the precision of the run. Collective: rank 0's trained weights
        are copied to all, so that every rank starts equal whatever its own random numbers were.
        """
        frozen = torch.bfloat16 if self.precision == "bf16" else torch.float32
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else frozen)
        self._accelerator.prepare_model(model, evaluation_mode=True)
        if self.context.distributed:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    dist.broadcast(parameter.data, src=0)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand an optimizer to Accelerate. The learning rate is never handed over: it is a function of the step."""
        prepared: torch.optim.Optimizer = self._accelerator.prepare_optimizer(optimizer)
        return prepared

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which a forward pass computes in the run's precision."""
        context: AbstractContextManager[None] = self._accelerator.autocast()
        return context

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradients to this rank's own; `sync_gradients` shares them."""
        self._accelerator.backward(loss)

    def sync_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients over ranks in one flat all-reduce.

        Parameters in their own order give one sum with the same bits after a restart, which DDP's rebuilt buckets do
        not; and a rank may come without any micro-batch. A parameter without a gradient counts as zero, in a world of
        one too, so that the optimizer does the same everywhere.

        Collective: every rank, once per step, with the same parameters.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if not self.context.distributed:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, shared in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(shared.view_as(gradient))

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> float:
        """Scale gradients down to `max_norm`; the norm before that is returned (None: only measure).

        After `sync_gradients` the norm is equal on all ranks: "not finite" needs no agreement.
        """
        limit = float("inf") if max_norm is None else max_norm
        norm = self._accelerator.clip_grad_norm_(parameters, limit)
        return float(norm) if norm is not None else 0.0

    def sum(self, values: Iterable[float]) -> list[float]:
        """Add numbers over ranks, in float64. Collective: every rank, with equally many values."""
        mine = torch.tensor(list(values), dtype=torch.float64)
        if not self.context.distributed:
            return [float(value) for value in mine]
        # The sums travel through the backend's own device: nccl knows no CPU tensors.
        there = mine.to(self.device)
        dist.all_reduce(there)
        return [float(value) for value in there.cpu()]

    def broadcast_from_main(self, value: Value) -> Value:
        """Rank 0's value on every rank. Collective."""
        if not self.context.distributed:
            return value
        box: list[Value] = [value]
        broadcast_object_list(box, from_process=0)
        return box[0]

    def agree(self, error: BaseException | None, during: str) -> None:
        """Raise on all ranks if one has an error. Collective.

        Raises:
            PeerFailedError: another rank failed; the ranks that failed raise their own error.
        """
        if not self.context.distributed:
            if error is not None:
                raise error
            return
        code = error.exit_code if isinstance(error, FinetuneError) else 1
        mine = None if error is None else (self.rank, code, f"{type(error).__name__}: {error}")
        failed = [entry for entry in gather_object([mine]) if entry is not None]
        if error is not None:
            raise error
        if failed:
            rank, code, text = failed[0]
            raise PeerFailedError(f"rank {rank} failed during {during}: {text}", exit_code=code)

    def agree_set_up(self) -> None:
        """Every rank has its model and data. Collective: once, before the first step."""
        if not self._is_set_up:
            self._is_set_up = True
            self.agree(None, during="set-up")

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self._accelerator.wait_for_everyone()

    def on_close(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` when the run leaves this world, with the error that ends it or None."""
        self._closing.append(action)

    def close(self, error: BaseException | None) -> None:
        """Leave: end what was opened, and tell the other ranks of an error while they can still hear it.

        Until `agree_set_up` every rank comes by there; after it, the launcher and the closed group tell them.
        """
        try:
            while self._closing:
                self._closing.pop()(error)
            if not self._is_set_up and isinstance(error, Exception):
                self._is_set_up = True
                self.agree(error, during="set-up")
        finally:
            self._accelerator.free_memory()

    def _compare_worlds(self) -> None:
        theirs = self._accelerator
        pairs = {
            "world size": (self.world_size, theirs.num_processes),
            "rank": (self.rank, theirs.process_index),
            "device": (_device_name(self.device), _device_name(theirs.device)),
            "precision": (self.precision, {"no": "fp32"}.get(theirs.mixed_precision, theirs.mixed_precision)),
            "gradient accumulation": (1, theirs.gradient_accumulation_steps),
            "kind of parallelism": ("plain", _kind(theirs.distributed_type)),
        }
        different = [f"{name}: ours {a}, Accelerate's {b}" for name, (a, b) in pairs.items() if a != b]
        if different:
            raise LaunchError(
                f"finetune and Accelerate see different worlds ({self.environment.launcher}): {'; '.join(different)}. "
                "Remove the ACCELERATE_* variables or the accelerate config file that ask for something else."
            )

    def _log_first_line(self) -> None:
        import transformers

        _log.info(
            "finetune %s, torch %s, transformers %s, Python %s; launcher %s, device %s, %s, world of %d",
            __version__,
            torch.__version__,
            transformers.__version__,
            platform.python_version(),
            self.environment.launcher,
            self.device,
            self.precision,
            self.world_size,
        )


def forget_accelerate() -> None:
    """Accelerate's state is process-wide: in it the first caller's arguments would win for ever."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _resolve_precision(wish: Literal["auto", "fp32", "bf16"], device: torch.device) -> Precision:
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if wish == "auto":
        return "bf16" if has_bf16 else "fp32"
    return wish


def _kind(kind: DistributedType) -> str:
    return "plain" if kind in _PLAIN_TYPES else str(kind.value)


def _device_name(device: torch.device) -> str:
    """`cpu` and `cpu:0` are one device, and so are `cuda` and `cuda:0`."""
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
