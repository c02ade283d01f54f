"""Exchange values between ranks: sums, rank 0's value, and whether a rank has failed.

Every method of `Collectives` that says "Collective" must be called by all ranks in the same order. In a world of one
each returns at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from finetune.distributed.accelerate_library import broadcast_object_list, gather_object
from finetune.distributed.ddp_init import rendezvous_store
from finetune.distributed.environment import GLOO_INTERFACE_VARIABLE
from finetune.distributed.joined_world import ProcessContext
from finetune.distributed.liveness import LATE_FAULT_SECONDS, Liveness
from finetune.errors import FinetuneError, LaunchError, PeerFailedError, RunFailedError, first_line
from finetune.units import format_ranks

if TYPE_CHECKING:
    from finetune.distributed.store_barrier import StoreBarrier

Value = TypeVar("Value")
_SAME_COMMAND = "Start every rank with the same command, the same config files and the same data."


class Collectives:
    """The values that ranks exchange, and the failures on which they agree.

    While the others wait for a rank that is gone, `liveness` names it.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._is_set_up = False
        self._failed_beside: tuple[BaseException, str] | None = None
        self._hosts: dist.ProcessGroup | None = None
        self._barrier: StoreBarrier | None = None

    @property
    def context(self) -> ProcessContext:
        """This process's rank, world size and device."""
        return self._liveness.context

    @property
    def backend(self) -> str:
        """``nccl``, ``gloo``, or ``none`` in a world of one."""
        return str(dist.get_backend()) if self.context.distributed else "none"

    def connect_hosts(self, timeout_minutes: float) -> None:
        """Make a group for numbers on the CPU if the backend is nccl, which takes none. Collective."""
        if self.backend != "nccl":
            return
        try:
            with self._liveness.waiting("connecting the CPUs of all ranks"):
                self._hosts = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        except RuntimeError as error:
            fault = self._liveness.first_fault(LATE_FAULT_SECONDS)
            if fault is not None:
                raise RunFailedError(str(fault), fault=fault) from error
            raise LaunchError(
                f"nccl connects the GPUs of {self.context.world_size} ranks, but gloo does not connect their CPUs "
                f"({first_line(error)}). Set {GLOO_INTERFACE_VARIABLE} to the network interface that leads to rank 0."
            ) from error

    def sum(self, values: Iterable[float]) -> list[float]:
        """Add numbers over ranks, in float64, without the device. Collective: every rank, with equally many values."""
        numbers = torch.tensor(list(values), dtype=torch.float64)
        if self.context.distributed:
            with self._liveness.collective("sum", waits_before=False, waits_after=False):
                dist.all_reduce(numbers, group=self._hosts)
        summed: list[float] = numbers.tolist()
        return summed

    def sum_and_read(
        self, summed: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]
    ) -> dict[str, list[float]]:
        """Return the sums of vectors over ranks, and this rank's own vectors, for which the host waits only once.

        All vectors are float64, on this rank's device.

        Collective: every rank, with equally many values, after `let_device_finish` or `sync_gradients`.
        """
        sums, others = torch.cat([*summed.values()]), [*own.values()]
        if not self.context.distributed:
            numbers: list[float] = torch.cat([sums, *others]).tolist()
        else:
            with self._liveness.collective("sum", waits_before=False, waits_after=False):
                dist.all_reduce(sums)
                numbers = torch.cat([sums, *others]).tolist()  # waits, inside the block, for this and for the gradients
        rest = iter(numbers)
        return {name: list(islice(rest, len(vector))) for name, vector in {**summed, **own}.items()}

    def by_rank(self, value: float) -> list[float]:
        """Return the values that the ranks give, in the order of the ranks. Collective: every rank."""
        return self.sum(value if rank == self.context.rank else 0.0 for rank in range(self.context.world_size))

    def broadcast_from_main(self, value: Value) -> Value:
        """Return rank 0's value on every rank. Collective."""
        if not self.context.distributed:
            return value
        box: list[Value] = [value]
        with self._liveness.collective("broadcast_from_main"):
            broadcast_object_list(box, from_process=0)
        return box[0]

    def agree(self, error: BaseException | None, during: str) -> None:
        """Raise on all ranks if one has an error: its own there, PeerFailedError on the others. Collective."""
        if not self.context.distributed:
            if error is not None:
                raise error
            return
        code, saves_first = (error.exit_code, error.saves_first) if isinstance(error, FinetuneError) else (1, False)
        own_failure = (self.context.rank, code, f"{type(error).__name__}: {error}", saves_first)
        with self._liveness.collective(f"agree on {during}"):
            failed = [entry for entry in gather_object([None if error is None else own_failure]) if entry is not None]
        if not failed:
            return
        rank, code, text, _ = failed[0]
        if error is None:
            error = PeerFailedError(f"rank {rank} failed during {during}: {text}", exit_code=code)
        elif isinstance(error, FinetuneError):
            error.is_reported_elsewhere = own_failure != failed[0] and own_failure[2] == text
        if isinstance(error, FinetuneError):
            error.saves_first = all(each[-1] for each in failed)
        raise error

    @contextmanager
    def failing_together(self, during: str) -> Iterator[None]:
        """Run a block that fails on all ranks if it fails on one, as `agree` does. Collective: every rank enters it."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.agree(error, during)

    def fail_in_next_step(self, error: BaseException, during: str) -> None:
        """Make all ranks raise at the start of the next step, after a failure beside training. Not a collective."""
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

    def refuse_differences(self, subject: str, digest: str, *, remedy: str = _SAME_COMMAND) -> None:
        """Raise LaunchError on all ranks if their digests of a subject differ: a sum over them would mean nothing.

        `remedy` is a sentence for the message. Collective.
        """
        if not self.context.distributed:
            return
        with self._liveness.collective(f"comparing {subject}"):
            digests = gather_object([digest])
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise LaunchError(f"{subject} of {format_ranks(different)} differs from rank 0's. {remedy}")

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.synchronize("barrier")
        with self._liveness.collective("barrier"):
            if self.context.distributed:
                device = self.context.device
                # By its own index: Accelerate names the GPU with the local rank, which this process may not see.
                dist.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)

    def start_store_barrier(self) -> None:
        """Let `synchronize` wait at the rendezvous store, which a group that others made lacks. Collective."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, not in __all__

        from finetune.distributed.store_barrier import StoreBarrier

        store, token = rendezvous_store(), self.broadcast_from_main(secrets.token_hex(8))
        if store is not None:
            self._barrier = StoreBarrier(
                PrefixStore(token, store), rank=self.context.rank, world_size=self.context.world_size
            )

    def synchronize(self, activity: str) -> None:
        """Wait for all ranks after `start_store_barrier`, before they run a sharded model outside of a step.

        Collective then, with the same text on all ranks. Before `start_store_barrier`, and in a group that others made,
        nothing is checked.

        Raises:
            RunFailedError: another rank has left or waits elsewhere, so that this one would wait for ever.
        """
        if self._barrier is not None:
            with self._liveness.waiting(activity):
                self._barrier.wait(activity, self._liveness.first_fault)

    def leave(self) -> None:
        """Show the ranks that wait at the store barrier that this rank does not come. Not a collective."""
        if self._barrier is not None:
            self._barrier.leave()

    def forget_groups(self) -> None:
        """Drop references to groups. A group keeps threads, and a process that ends with them is sometimes aborted."""
        self._hosts = self._barrier = None
