"""The errors of a run that was asked to stop. They name the signal, the ranks and the next command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGTERM, Signals
from typing import TYPE_CHECKING

from finetune.errors import PreemptedError
from finetune.signals import Terminated, received_stop_signal

if TYPE_CHECKING:
    from finetune.distributed.runtime import Runtime


def preempted_in_training(runtime: Runtime, step: int) -> PreemptedError:
    """Make the error that ends training, after the checkpoint of the step is committed. Collective."""
    signals = runtime.collectives.by_rank(float(received_stop_signal() or 0))
    stopped = {rank: Signals(int(signal)).name for rank, signal in enumerate(signals) if signal}
    by = f" by {next(iter(stopped.values()))}" if stopped else ""
    if stopped and runtime.world_size > 1:
        by += f" on rank{'s' if len(stopped) > 1 else ''} {', '.join(map(str, list(stopped)[:12]))}"
    error = PreemptedError(f"stopped at step {step} as asked{by}; checkpoint committed: go on with resume=auto")
    error.is_reported_elsewhere = not runtime.is_main_process
    return error


@contextmanager
def preempted_in_test(runtime: Runtime) -> Iterator[None]:
    """Run the test phase, and raise PreemptedError if this process was preempted.

    A signal ends it at once, or before it begins; with shards, before the next forward of all.
    """
    try:
        # A signal in the last step: do not begin what may take long.
        if runtime.stop_requests.is_on_this_rank and runtime.placement.shard_size is None:
            raise Terminated
        with runtime.stop_requests.stopping_together("testing"):
            yield
    except (Exception, Terminated, KeyboardInterrupt) as error:
        # A library may turn the exception of the signal into an error of its own.
        if not (runtime.stop_requests.is_on_this_rank or isinstance(error, (Terminated, KeyboardInterrupt))):
            raise
        signal = received_stop_signal()
        by = f" by {Signals(signal).name}" if signal else ""
        if by and runtime.world_size > 1:
            by += f" on rank {runtime.rank}" + " (launchers also send it when another rank ends)" * (signal == SIGTERM)
        raise PreemptedError(
            f"stopped in the test phase as asked{by}; training is complete: resume=auto measures again"
        ) from error
