"""Report this rank's phase and failure to the other ranks, and choose the error with which this rank ends.

`Liveness` owns the rank's watchdog. Everything that waits for other ranks does so in `Liveness.collective`, which names
a rank that is gone within seconds instead of waiting for it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from finetune.distributed.environment import LaunchEnvironment, launcher_pid
from finetune.distributed.joined_world import ProcessContext
from finetune.errors import Fault, FinetuneError, PeerFailedError, PreemptedError, RunFailedError, first_line
from finetune.signals import Terminated, received_stop_signal

if TYPE_CHECKING:
    from finetune.distributed.watchdog import Watchdog

_log = logging.getLogger(__name__)

_FAULT_SECONDS = 2.0
"""torchrun ends a rank by SIGTERM as soon as another is gone, perhaps before this one learns which and why."""
LATE_FAULT_SECONDS = 5.0
"""A broken collective is noticed before this rank learns why."""
# The backends have no error type for a lost rank, and the CPU has none for a lack of memory.
_SIGNS_OF_LOSS = ("closed by peer", "Connection reset", "Broken pipe", "Timed out", "timed out", "NCCL", "Socket")
_SIGNS_OF_NO_MEMORY = (
    *("out of memory", "can't allocate memory", "Cannot allocate memory", "not enough memory", "bad_alloc"),
    *("CUBLAS_STATUS_ALLOC_FAILED", "can't start new thread"),
    *("could not create a primitive\n", "could not create a memory"),  # oneDNN's
)

_PLACE_IN_TORCH = re.compile(r"^\[enforce fail at \S+\] ((data|err == 0)\. )?")


class Liveness:
    """A rank's phases, its watchdog, and the error with which it ends.

    Attributes:
        context: this process's rank, world size and device.
        watchdog: this rank's link to the world's first fault; None in a world of one, before `start_watchdog`, and
            from `leaving` on.
        is_timed: whether the step timeout counts in the current phase.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.watchdog: Watchdog | None = None
        self.is_timed = False
        self._lone_watchdog: Watchdog | None = None
        """Watches over the deadlines of a world of one, once there is one."""
        self._where: tuple[str, int | None] = ("set-up", None)
        self._closing: list[Callable[[BaseException | None], None]] = []
        self._make_range: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self._phase = ExitStack()

    def start_watchdog(
        self, environment: LaunchEnvironment, *, step_timeout_minutes: float, broadcast: Callable[[Any], Any]
    ) -> None:
        """Watch over all ranks from here on. Collective, as `broadcast` is: it returns rank 0's value on every rank."""
        from finetune.distributed.network import address_of_rank_0  # one process needs no address

        self.watchdog = self._make_watchdog(
            master_addr=address_of_rank_0(environment),
            launcher_pid=launcher_pid(os.environ, environment),
            step_timeout_seconds=60 * step_timeout_minutes,
            broadcast=broadcast,
        )

    def _make_watchdog(self, **settings: Any) -> Watchdog:
        from finetune.distributed.watchdog import Watchdog  # one process has nothing to watch but deadlines

        return Watchdog(
            rank=self.context.rank,
            world_size=self.context.world_size,
            last_words=lambda fault: self.run_closing_actions(RunFailedError(str(fault), fault=fault)),
            **settings,
        )

    def deadline(self, seconds: float, late: str, record: str = "") -> AbstractContextManager[None]:
        """Return a block that ends all ranks with the fault `late` if it takes longer, even in a C call.

        This rank's guardian then records the fault in the run.json `record`, because a C call may hold Python's lock.
        """
        if self.watchdog is None and self._lone_watchdog is None and hasattr(os, "fork"):
            lone = self._lone_watchdog = self._make_watchdog(master_addr="127.0.0.1", broadcast=lambda value: value)
            self.on_close(lambda _: lone.close())
            lone.enter_phase(*self._where, timed=False)
        watchdog = self.watchdog or self._lone_watchdog
        return nullcontext() if watchdog is None else watchdog.deadline(seconds, late, record)

    def enter_phase(self, phase: str, step: int | None = None, *, timed: bool = True) -> None:
        """Report where this rank is. If the phase is `timed`, `parallel.step_timeout_minutes` starts anew."""
        self.is_timed, self._where = timed, (phase, step)
        if (watchdog := self.watchdog or self._lone_watchdog) is not None:
            watchdog.enter_phase(phase, step, timed=timed and watchdog is self.watchdog)
        self._phase.close()
        self._phase.enter_context(self.range(phase if step is None else f"step {step}: {phase}"))

    def name_ranges(self, make_range: Callable[[str], AbstractContextManager[Any]]) -> None:
        """Call `make_range(name)` around every phase, forward pass, backward pass and collective from here on.

        A profiler shows these ranges."""
        self._phase.close()
        self._make_range = make_range

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Return a block that a profiler shows under this name."""
        return self._make_range(name)

    def waiting(self, activity: str) -> AbstractContextManager[None]:
        """Return a context in which this rank waits for others. On a timeout, a rank that is not waiting is blamed."""
        return nullcontext() if self.watchdog is None else self.watchdog.waiting(activity)

    def first_fault(self, wait_seconds: float) -> Fault | None:
        """Return the world's first fault, or None if this rank does not learn of one in time."""
        return None if self.watchdog is None else self.watchdog.first_fault(wait_seconds)

    def let_device_finish(self) -> None:
        """Wait for a GPU's queued work. Otherwise it waits in a collective, and a fault names a wrong rank."""
        if self.context.device.type == "cuda":
            torch.cuda.current_stream(self.context.device).synchronize()

    @contextmanager
    def collective(
        self, activity: str, *, waits_before: bool = True, waits_after: bool = True, is_named: bool = True
    ) -> Iterator[None]:
        """Run a block that waits for the other ranks. If one of them is gone, a RunFailedError says which and where.

        With `waits_before`, the device finishes first: a rank that still computes does not count as waiting. With
        `waits_after`, it finishes in the block too: nccl's calls return before the other ranks have come. If the block
        `is_named`, a profiler shows it as a range.
        """
        if waits_before:
            self.let_device_finish()
        try:
            with self.range(f"collective: {activity}") if is_named else nullcontext(), self.waiting(activity):
                yield
                if waits_after:
                    self.let_device_finish()
        except RuntimeError as error:
            fault = self.first_fault(LATE_FAULT_SECONDS)
            is_loss = isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS_OF_LOSS)
            if fault is None and not is_loss:
                raise
            _log.debug("%s: %s", activity, error)
            cause = str(fault) if fault is not None else f"another rank left during {activity}: {error}"
            raise RunFailedError(cause, fault=fault) from error

    def on_close(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` when the run leaves this world, with the error that ends it or None."""
        self._closing.append(action)

    def run_closing_actions(self, error: BaseException | None) -> None:
        """Call the actions of `on_close`, the last one first."""
        while self._closing:
            self._closing.pop()(error)

    @contextmanager
    def leaving(self, error: BaseException | None) -> Iterator[None]:
        """Run the block that ends what was opened, after the others learn of the error and before the watchdog ends."""
        watchdog, self.watchdog = self.watchdog, None
        # Where the ranks agreed on the failure, the rank that prints the error tells the world too.
        is_agreed = isinstance(error, FinetuneError) and error.is_reported_elsewhere
        is_expected = is_agreed or isinstance(error, PreemptedError)
        try:
            if watchdog is not None and error is not None and not is_expected:
                watchdog.fail(in_a_line(error))
            yield
        finally:
            if watchdog is not None:
                if isinstance(error, FinetuneError) and not is_expected:
                    error.is_reported_elsewhere = watchdog.is_reported_elsewhere
                watchdog.close()


def explain(error: BaseException, watchdog: Watchdog | None) -> BaseException:
    """Return the error to end with: the cause of this one if it is known, with a note of rank and phase."""
    is_terminated = isinstance(error, Terminated) or isinstance(error.__cause__, Terminated)
    if is_terminated and watchdog is not None and (fault := watchdog.first_fault(_FAULT_SECONDS)) is not None:
        return RunFailedError(str(fault), fault=fault)
    if isinstance(error, PreemptedError):
        return error
    fault = error.fault if isinstance(error, RunFailedError) else None
    if fault is not None and fault.error == KeyboardInterrupt.__name__ and received_stop_signal() == signal.SIGINT:
        return KeyboardInterrupt()  # the second Ctrl-C was for this rank too, which waited in a collective
    error = as_out_of_memory(error) or _as_lost_data_worker(error) or error
    if watchdog is not None and fault is None and not isinstance(error, PeerFailedError):
        error.add_note(watchdog.whereabouts)
    return error


def _as_lost_data_worker(error: BaseException) -> RunFailedError | None:
    """Return the error to report if a data worker was killed; None otherwise. torch raises what its queues raised."""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    is_of_queue = "_try_get_data" in functions or "in pin memory thread" in str(error)
    if not isinstance(error, Exception) or not is_of_queue or "Too many open files" in str(error):
        return None
    return RunFailedError(
        f"a data worker was killed: {first_line(error)}. Often memory or /dev/shm has run out: lower num_workers in "
        "training, validation and testing; with 0, the run loads its rows itself. Committed checkpoints are intact: "
        "resume=auto"
    )


def in_a_line(error: BaseException) -> str:
    """Return type and text of an error. Keep only the end of a data loader worker's traceback."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        lines = text.strip().splitlines()
        text = f"{lines[0]} {lines[-1]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def as_out_of_memory(error: BaseException) -> RunFailedError | None:
    """Return the error to report if memory ran out, without the tensors that a traceback keeps; None otherwise."""
    if not (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(sign in f"{error}\n" for sign in _SIGNS_OF_NO_MEMORY))
    ):
        return None
    cause = _PLACE_IN_TORCH.sub("", str(error).strip().split("\n", 1)[0]).rstrip(".") or type(error).__name__
    return RunFailedError(
        f"out of memory: {cause}. Lower training.batch_size and keep training.global_batch_size (gradients are then "
        "accumulated and the curve stays), set training.max_tokens_per_microbatch for long rows, or "
        "training.gradient_checkpointing=true; in an evaluation lower its own batch_size. Committed checkpoints are "
        "intact: resume=auto"
    )
