"""A small wrapper over `Accelerator`: the only module that imports accelerate.

Our initialiser runs first and Accelerate adopts its group. The other order cannot work: on an unexpected launch
Accelerate does not fail, it answers "one process, main" on every rank. So the two worlds are compared before anything
is trained.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import DistributedType, broadcast_object_list, gather_object

from finetune import __version__
from finetune.distributed.accelerate_settings import refuse_another_precision
from finetune.distributed.ddp_init import ProcessContext, rendezvous_store
from finetune.distributed.ending import LATE_FAULT_SECONDS, as_lost_rank, explain, in_a_line
from finetune.distributed.environment import GLOO_INTERFACE_VARIABLE, LaunchEnvironment, launcher_pid
from finetune.distributed.gradients import LossFunction, Reducer, gradient_norm, sum_flat
from finetune.distributed.guardian.faults import ranks_in_words
from finetune.distributed.meeting import Meetings
from finetune.distributed.precision import choose_precision, convert_weights, has_bf16
from finetune.distributed.sharding import ShardedModel, copy_trained_from_main
from finetune.distributed.watchdog import Watchdog, WatchedRank
from finetune.errors import FinetuneError, LaunchError, PeerFailedError, PreemptedError, RunFailedError, first_line
from finetune.fallbacks import Fallbacks
from finetune.runs.tensors import lies_in_parts
from finetune.signals import Terminated, stop_signals_are_noted, told_to_stop
from finetune.threads import is_for_one_thread, settle_waiting

if TYPE_CHECKING:
    from finetune.config.schema import Config

Value = TypeVar("Value")

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_SAME_COMMAND = "Start every rank with the same command, the same config files and the same data."
_TOLD_TO_STOP = "told to stop"
_PLAIN_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Runtime:
    """The verbs a training step needs from the world of processes; no loop.

    Attributes:
        context: this process's rank, world size and device.
        environment: this process's place in the launch.
        fallbacks: every downgrade taken in this run.
        precision: ``fp32`` or ``bf16``, settled for this device.
    """

    def __init__(
        self,
        context: ProcessContext,
        environment: LaunchEnvironment,
        fallbacks: Fallbacks,
        config: Config,
        settled: Mapping[str, tuple[object, str]],
    ) -> None:
        self._settled = settled
        self.context = context
        self.environment = environment
        self.fallbacks = fallbacks
        self.precision = choose_precision(config.training.precision, has_bf16=has_bf16(context.device))
        self._parallel = config.parallel
        self._is_full = config.training.method == "full"
        self._is_set_up = False
        self._next_look = 0.0
        self._failed_beside: tuple[BaseException, str] | None = None
        self._closing: list[Callable[[BaseException | None], None]] = []
        self._reducer: Reducer | None = None
        self._sharded: ShardedModel | None = None
        self._meetings: Meetings | None = None
        self._stops_in: str | None = None
        self._is_timed = False
        self._watchdog: Watchdog | None = None
        self._named: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._phase = ExitStack()
        refuse_another_precision(self.precision, config.training.precision)
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)  # in a world of one, Accelerate takes the current one
        self._accelerator = Accelerator(
            cpu=context.device.type == "cpu",
            mixed_precision="bf16" if self.precision == "bf16" else "no",
            gradient_accumulation_steps=1,
        )
        self._compare_worlds()
        self._log_first_line()
        self._hosts: dist.ProcessGroup | None = None
        if context.distributed:
            self._watchdog = self._start_watchdog()  # before a group is made: it waits for a rank that is gone
            try:
                self._hosts = self._connect_hosts()
            except BaseException as error:
                self.close(error)
                raise

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

    @property
    def threads(self) -> dict[str, Any]:
        """How many threads compute on the CPU in this process, and how they wait, for run.json."""
        return {"count": torch.get_num_threads(), **settle_waiting()._asdict()}

    def settle(self, config: Config) -> Config:
        """Return the configuration with what the launcher has settled, see `settings_of_accelerate`."""
        return config.with_values(self._settled)

    def fit_threads(self, model: torch.nn.Module) -> None:
        """Let one thread compute a narrow model on the CPU, until this run leaves."""
        width, before = getattr(getattr(model, "config", None), "hidden_size", None), torch.get_num_threads()
        if self.device.type == "cpu" and before > 1 and is_for_one_thread(width, os.environ):
            _log.info("one thread computes this model of width %s; OMP_NUM_THREADS sets another number", width)
            torch.set_num_threads(1)
            self.on_close(lambda _: torch.set_num_threads(before))

    def place(self, model: torch.nn.Module) -> None:
        """Move a model to this process's device and settle the types of its weights.

        Trained weights are fp32 always; frozen ones take the precision of the run. Collective: rank 0's trained weights
        are copied to all, so that every rank starts equal whatever its own random numbers were.
        """
        convert_weights(model, self.precision, self.device)
        self._accelerator.prepare_model(model, evaluation_mode=True)
        if self.context.distributed:
            with self._collective("copying rank 0's weights"):
                copy_trained_from_main(model.parameters())

    def shard(self, model: torch.nn.Module) -> None:
        """Do as `place`, and share the weights out among the ranks (`parallel.sharding`); see `ShardedModel`.

        From here on `apply`, `forward` and `loss` are the only ways through the model. Collective.
        """
        assert self.shard_size is not None
        store, token = rendezvous_store(), self.broadcast_from_main(secrets.token_hex(8))
        if store is not None:
            self._meetings = Meetings(store, token, rank=self.rank, world_size=self.world_size)
        with self._collective("sharding the model"):
            self._sharded = ShardedModel(
                model,
                self._parallel,
                precision=self.precision,
                device=self.device,
                world_size=self.world_size,
                shards_trained=self._is_full,
            )
        what = "all weights" if self._is_full else "the frozen weights"
        _log.info("%s are shared out among %d processes, layer by layer", what, self.shard_size)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Hand an optimizer to Accelerate. The learning rate is never handed over: it is a function of the step."""
        prepared: torch.optim.Optimizer = self._accelerator.prepare_optimizer(optimizer)
        return prepared

    def autocast(self) -> AbstractContextManager[None]:
        """The context in which a forward pass computes in the run's precision."""
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
        return self._parallel.shard_size or self.world_size

    @property
    def shards_trained(self) -> bool:
        """Whether the trained weights lie in parts on the ranks, and gradients and optimizer with them."""
        return self.shard_size is not None and self._is_full

    @property
    def gathered_bytes(self) -> int:
        """See `ShardedModel`; 0 where nothing is sharded."""
        return 0 if self._sharded is None else self._sharded.gathered_bytes

    @property
    def received_bytes(self) -> int:
        """See `ShardedModel`; 0 where nothing is sharded."""
        return 0 if self._sharded is None else self._sharded.received_bytes

    @property
    def needs_even_shares(self) -> bool:
        """Whether every rank needs the same number of micro-batches: torch's reducer and sharded weights do."""
        return self.uses_reducer or self.shard_size is not None

    def forward(
        self, compute: Callable[[torch.nn.Module, Any], Value], model: torch.nn.Module, microbatch: Any
    ) -> Value:
        """Compute something of a micro-batch in the run's precision.

        Collective if the model is sharded: every rank, equally often.

        Args:
            compute: a function of the model and the micro-batch.
            model: placed, or sharded.
            microbatch: on any device.
        """
        there = microbatch.to(self.device)
        with self.autocast():
            return self.apply(lambda whole: compute(whole, there), model)

    def apply(self, compute: Callable[[Any], Value], model: torch.nn.Module) -> Value:
        """Compute something of a model, which may run it several times.

        Collective if the model is sharded: every rank, equally often.

        Args:
            compute: a function of the model.
            model: placed, or sharded.
        """
        if self._sharded is None:
            return compute(model)
        if self._stops_in is not None:
            self.at(self._stops_in)
            if self.is_anyone_told_to_stop():
                raise Terminated
        self._meet_between_phases()
        with self._gathering("forward"):
            return self._sharded.apply(compute)

    def loss(self, compute: LossFunction, model: torch.nn.Module, microbatch: Any, *, is_last: bool) -> torch.Tensor:
        """Compute a micro-batch's loss in the run's precision.

        Collective if `needs_even_shares`: every rank, equally often in a step.

        Args:
            compute: (model, micro-batch) to the loss.
            model: placed, or sharded.
            microbatch: on the CPU or on this rank's device.
            is_last: whether it is the step's last, whose backward pass may sync the gradients.
        """
        if not self.uses_reducer:
            with self._named("forward"):
                return self.forward(compute, model, microbatch)
        there = microbatch.to(self.device)
        with self._named("forward"), self.autocast():
            if self._reducer is None or self._reducer.model is not model:
                wish = self._parallel
                with self._collective("making torch's reducer"):
                    self._reducer = Reducer(
                        model,
                        compute,
                        device=self.device,
                        output_device=wish.output_device,
                        find_unused_parameters=wish.find_unused_parameters,
                    )
            return self._reducer.loss(there, is_last=is_last)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add a loss's gradients to this rank's own; `sync_gradients` sums them over ranks.

        Collective if the weights are sharded; and with `parallel.gradient_sync=ddp`, where the step's last backward
        pass sums them.

        Args:
            loss: of a micro-batch.
            is_last: whether it is the step's last.
        """
        waiting: AbstractContextManager[None] = nullcontext()
        if self._sharded is not None:
            waiting = self._gathering("backward")
        elif is_last and self._reducer is not None:
            # Without a range of its own and a wait before: this rank computes in the block too.
            waiting = self._collective("backward", is_named=False, waits_before=False)
        with self._named("backward"), waiting:
            self._accelerator.backward(loss)

    def sync_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients over ranks, where the backward passes have not done so.

        A parameter without a gradient counts as zero, in a world of one too, so that the optimizer does the same
        everywhere. A GPU sums them while the host goes on to `sum_and_read`, which waits.

        Collective: every rank, once per step, with the same parameters, after `let_device_finish`.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.context.distributed and self._reducer is None and not self.shards_trained:
            with self._collective("sync_gradients", waits_before=False, waits_after=False):
                sum_flat(parameters)

    def clip_grad_norm(self, parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
        """Scale gradients down to `max_norm` (None: only measure), and return their norm before that.

        After `sync_gradients` the norm is equal on all ranks. It is a scalar on their device, where it may still be
        computed: reading it makes the host wait.

        Collective if `shards_trained`.

        Args:
            parameters: each of which has a gradient.
            max_norm: positive.
        """
        if self._sharded is None or not self._sharded.shards_trained:
            norm = gradient_norm(parameters)
        else:
            with self._collective("gradient norm", waits_before=False, waits_after=False):
                norm = gradient_norm(parameters, over=self._sharded.group)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.float())
        return norm

    @contextmanager
    def gathering(self, tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """A block in which the main process makes whole tensors of those that lie in parts, one after the other.

        At the end all ranks gather what it has not asked for, because its disk failed for example: nobody waits for it.

        Collective: every rank enters it, with the same tensors in the same order, and only the main process calls the
        function that the block is given, with each of them in this order.
        """
        left = deque(tensor for tensor in tensors if lies_in_parts(tensor))

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            if not lies_in_parts(tensor):
                return tensor
            assert left.popleft() is tensor, "the ranks gather in one order"
            with self._collective("gathering weights (saving)", is_named=False):
                gathered: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
                return gathered

        try:
            yield whole
        except Exception:
            while left:
                whole(left[0])
            raise
        while left:
            whole(left[0])

    def sum(self, values: Iterable[float]) -> list[float]:
        """Add numbers over ranks, in float64, without the device. Collective: every rank, with equally many values."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        if self.context.distributed:
            with self._collective("sum", waits_before=False, waits_after=False):
                dist.all_reduce(numbers, group=self._hosts)
        summed: list[float] = numbers.tolist()
        return summed

    def sum_and_read(self, values: torch.Tensor, own: torch.Tensor) -> tuple[list[float], list[float]]:
        """Add a vector over ranks, and read it and this rank's own values, for which the host waits only once.

        Collective: every rank, with equally many values, after `let_device_finish` or `sync_gradients`.

        Args:
            values: float64, on this rank's device; a new tensor.
            own: like them, but not added over ranks.
        """
        if not self.context.distributed:
            read: list[float] = torch.cat([values, own]).tolist()
        else:
            with self._collective("sum", waits_before=False, waits_after=False):
                dist.all_reduce(values)
                read = torch.cat([values, own]).tolist()  # waits, inside the block, for this and for the gradients
        return read[: len(values)], read[len(values) :]

    def let_device_finish(self) -> None:
        """Wait for a GPU's queued work. The host would wait for it later, where a fault names the wrong rank."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def least(self, value: float) -> float:
        """The smallest of the values that the ranks give. Collective: every rank."""
        return min(self.sum([value * (rank == self.rank) for rank in range(self.world_size)]))

    def broadcast_from_main(self, value: Value) -> Value:
        """Rank 0's value on every rank. Collective."""
        if not self.context.distributed:
            return value
        box: list[Value] = [value]
        with self._collective("broadcast_from_main"):
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
        mine = (self.rank, code, f"{type(error).__name__}: {error}")
        with self._collective(f"agree on {during}"):
            failed = [entry for entry in gather_object([None if error is None else mine]) if entry is not None]
        if not failed:
            return
        rank, code, text = failed[0]
        if error is None:
            raise PeerFailedError(f"rank {rank} failed during {during}: {text}", exit_code=code)
        if isinstance(error, FinetuneError):
            error.is_reported_elsewhere = mine != failed[0] and mine[2] == text
        raise error

    @contextmanager
    def failing_together(self, during: str) -> Iterator[None]:
        """A block that fails on all ranks if it fails on one, as `agree` does. Collective: every rank enters it."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.agree(error, during)

    def fail_in_next_step(self, error: BaseException, during: str) -> None:
        """Let all ranks raise at the start of the next step, after a failure beside training. Not a collective."""
        self._failed_beside = (error, during)

    @property
    def has_failed_beside(self) -> bool:
        """Whether `fail_in_next_step` was called on this rank; `train_step` lets all ranks know."""
        return self._failed_beside is not None

    def agree_on_failure_beside(self) -> None:
        """Raise on all ranks the error that any gave to `fail_in_next_step`, as `agree` does. Collective."""
        error, during = self._failed_beside or (None, "work beside training")
        self.agree(error, during)

    def agree_set_up(self) -> None:
        """Wait until every rank has its model and data. Collective: once, before the first step."""
        if not self._is_set_up:
            self._is_set_up = True
            self.agree(None, during="set-up")

    def refuse_differences(self, what: str, digest: str, *, remedy: str = _SAME_COMMAND) -> None:
        """Refuse to train where ranks were given different things: their sum would mean nothing. Collective.

        Args:
            what: for the message, for example ``the training rows``.
            digest: equal on all ranks, or it is an error.
            remedy: a sentence for the message: what makes them equal.

        Raises:
            LaunchError: on all ranks.
        """
        if not self.context.distributed:
            return
        with self._collective(f"comparing {what}"):
            digests = gather_object([digest])
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise LaunchError(f"{what} of {ranks_in_words(different)} differs from that of rank 0. {remedy}")

    def at(self, phase: str, step: int | None = None, *, timed: bool = True) -> None:
        """Report where this rank is: a fault names it, and `parallel.step_timeout_minutes` starts anew.

        Args:
            phase: for example ``training``.
            step: the optimizer step, where there is one.
            timed: whether the step timeout counts from here on.
        """
        self._is_timed = timed
        if self._watchdog is not None:
            self._watchdog.at(phase, step, timed=timed)
        self._phase.close()
        self._phase.enter_context(self._named(phase if step is None else f"step {step}: {phase}"))

    def name_ranges(self, named: Callable[[str], AbstractContextManager[Any]]) -> None:
        """From here on, make a range of each phase, forward and backward pass and collective, for a profiler.

        Args:
            named: makes a range of a name; `nullcontext`: none.
        """
        self._phase.close()
        self._named = named

    @property
    def is_told_to_stop(self) -> bool:
        """Whether a signal told this process to stop after its step; `train_step` lets all ranks know."""
        return told_to_stop() is not None

    def is_anyone_told_to_stop(self) -> bool:
        """Whether any rank was told to stop, in a phase of many batches without a collective.

        Not a collective itself, unless the weights are sharded: then all ranks must leave before the same batch.
        Otherwise a rank that was told to stop passes it on through the store of the rendezvous, where the others look
        twice a second. In a group that others made there is no store: False, on the rank that was told too.
        """
        if not self.context.distributed:
            return self.is_told_to_stop
        if self._sharded is not None:
            self._meet_between_phases()
            return bool(sum(self.sum([float(self.is_told_to_stop)])))
        store, now = rendezvous_store(), time.monotonic()
        if store is None or (now < self._next_look and not self.is_told_to_stop):
            return False
        self._next_look = now + _LOOK_SECONDS
        try:
            if self.is_told_to_stop:
                store.set(_TOLD_TO_STOP, "")
            return bool(store.check([_TOLD_TO_STOP]))
        except RuntimeError:  # its process is gone: the next collective names it
            return self.is_told_to_stop

    @contextmanager
    def stopping_together(self, phase: str) -> Iterator[None]:
        """A block in which a signal ends all ranks before the same forward, with Terminated, if the model is sharded.

        Otherwise it changes nothing.

        Args:
            phase: as a fault names it; the step timeout counts for each forward.
        """
        if self._sharded is None:
            yield
            return
        with stop_signals_are_noted():
            self._stops_in = phase
            try:
                yield
            finally:
                self._stops_in = None

    def meet(self, what: str) -> None:
        """Wait for all ranks if the model is sharded, before they run it outside of a step.

        Collective then. In a group that others made there is no store to meet at: nothing is checked.

        Args:
            what: for the message, the same on all ranks.

        Raises:
            RunFailedError: another rank has left or waits elsewhere, so that this one would wait for ever.
        """
        if self._meetings is None:
            return
        watchdog = self._watchdog
        with watchdog.waiting(what) if watchdog is not None else nullcontext():
            self._meetings.meet(what, (lambda _: None) if watchdog is None else watchdog.first_fault)

    def _meet_between_phases(self) -> None:
        """Meet where the script decides what comes next, and the ranks may not come to the same."""
        if not self._is_timed:
            self.meet("a forward pass")

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.meet("barrier")
        with self._collective("barrier"):
            self._accelerator.wait_for_everyone()

    def on_close(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` when the run leaves this world, with the error that ends it or None."""
        self._closing.append(action)

    def explain(self, error: BaseException) -> BaseException:
        """The error to leave with instead of this one: its cause, and a note of where this rank was."""
        return explain(error, self._watchdog)

    def close(self, error: BaseException | None) -> None:
        """Leave: end what was opened, and tell the other ranks of an error. Not a collective."""
        watchdog, self._watchdog = self._watchdog, None
        is_expected = isinstance(error, PreemptedError)
        # Where `agree` has settled it, the rank that prints the error tells the world too.
        is_expected = is_expected or (isinstance(error, FinetuneError) and error.is_reported_elsewhere)
        try:
            if watchdog is not None and error is not None and not is_expected:
                watchdog.fail(in_a_line(error))
            if self._meetings is not None:
                self._meetings.leave()
            self._end_what_was_opened(error)
        finally:
            if watchdog is not None:
                if isinstance(error, FinetuneError) and not is_expected:
                    error.is_reported_elsewhere = watchdog.is_reported_elsewhere
                watchdog.close()
            # What refers to a group keeps its threads, and a process that ends with them is aborted now and then.
            self._reducer = self._sharded = self._hosts = self._meetings = None
            self._accelerator.free_memory()

    def _end_what_was_opened(self, error: BaseException | None) -> None:
        while self._closing:
            self._closing.pop()(error)

    def _start_watchdog(self) -> Watchdog:
        watched = WatchedRank(
            rank=self.rank,
            world_size=self.world_size,
            master_addr=self.environment.master_addr,
            launcher_pid=launcher_pid(os.environ, self.environment),
            step_timeout_seconds=60 * self._parallel.step_timeout_minutes,
        )
        return Watchdog(
            watched,
            share=self.broadcast_from_main,
            last_words=lambda fault: self._end_what_was_opened(RunFailedError(str(fault), fault=fault)),
        )

    def _connect_hosts(self) -> dist.ProcessGroup | None:
        """Make a group for numbers of the CPU where the backend takes none; None: it does. Collective.

        Raises:
            LaunchError: gloo does not connect the ranks.
            RunFailedError: one of them is gone.
        """
        if self.backend != "nccl":
            return None
        watchdog = self._watchdog
        try:
            timeout = timedelta(minutes=self._parallel.timeout_minutes)
            with watchdog.waiting("connecting the CPUs of all ranks") if watchdog is not None else nullcontext():
                group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
            return group
        except RuntimeError as error:
            fault = watchdog.first_fault(LATE_FAULT_SECONDS) if watchdog is not None else None
            if fault is not None:
                raise RunFailedError(str(fault), fault=fault) from error
            raise LaunchError(
                f"nccl connects the GPUs of {self.world_size} ranks, but gloo does not connect their CPUs "
                f"({first_line(error)}). Set {GLOO_INTERFACE_VARIABLE} to the network interface that leads to rank 0."
            ) from error

    @contextmanager
    def _collective(
        self, what: str, *, waits_before: bool = True, waits_after: bool = True, is_named: bool = True
    ) -> Iterator[None]:
        """A block that waits for the other ranks. If one of them is gone, a RunFailedError says which and where.

        Args:
            what: as a fault names it.
            waits_before: let the device finish first: a rank that still computes is not one that waits.
            waits_after: let it finish in the block too: nccl's calls return before the other ranks have come.
            is_named: it is a range of its own for a profiler.
        """
        watchdog = self._watchdog
        if waits_before:
            self.let_device_finish()
        try:
            named = self._named(f"collective: {what}") if is_named else nullcontext()
            with named, watchdog.waiting(what) if watchdog is not None else nullcontext():
                yield
                if waits_after:
                    self.let_device_finish()
        except RuntimeError as error:
            lost = as_lost_rank(error, what, watchdog)
            if lost is None:
                raise
            _log.debug("%s: %s", what, error)
            raise lost from error

    def _gathering(self, what: str) -> AbstractContextManager[None]:
        """A block in which this rank computes and gathers weights, so that it has no range and no wait of its own."""
        what = f"gathering weights ({what})"
        return self._collective(what, is_named=False, waits_before=False, waits_after=False)

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
                f"finetune and Accelerate see different worlds (launcher {self.environment.launcher}): "
                f"{'; '.join(different)}. Remove the ACCELERATE_* variables or the accelerate config file that ask for "
                "something else."
            )

    def _log_first_line(self) -> None:
        import transformers

        _log.info(
            "finetune %s, torch %s, transformers %s, Python %s; "
            "launcher %s, device %s, %s, world of %d; threads: %d, %s",
            __version__,
            torch.__version__,
            transformers.__version__,
            platform.python_version(),
            self.environment.launcher,
            self.device,
            self.precision,
            self.world_size,
            torch.get_num_threads(),
            settle_waiting(),
        )


def forget_accelerate() -> None:
    """Reset Accelerate's state, which is process-wide: the first caller's arguments would hold for ever."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def open_tracker(name: str, folder: Path, run: str, *, first_step: int) -> Any:
    """Start one of Accelerate's trackers, with `log`, `store_init_configuration` and `finish`.

    Args:
        name: Accelerate's name for it.
        folder: for the files of TensorBoard and wandb.
        run: the name of the run.
        first_step: number of steps done before; TensorBoard drops its events after them.
    """
    if name in ("tensorboard", "wandb"):  # the others have places of their own
        folder.mkdir(exist_ok=True)
    settings: dict[str, dict[str, Any]] = {
        "tensorboard": {"logging_dir": str(folder), "run_name": name, "purge_step": first_step + 1},
        "wandb": {"run_name": "finetune", "name": run, "dir": str(folder)},
        "trackio": {"run_name": "finetune", "name": run},
        "mlflow": {"experiment_name": "finetune", "run_name": run},
    }
    tracker = LOGGER_TYPE_TO_CLASS[name](**settings[name])
    if hasattr(tracker, "start"):  # older ones start when they are made
        tracker.start()
    return tracker


def _kind(kind: DistributedType) -> str:
    return "plain" if kind in _PLAIN_TYPES else str(kind.value)


def _device_name(device: torch.device) -> str:
    """`cpu` and `cpu:0` are one device, and `cuda` is the current GPU."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"
