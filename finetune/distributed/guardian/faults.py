"""The position of a rank, the faults that can happen there, and the time until a guardian reports them."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.errors import Fault
from finetune.terminal import visible
from finetune.units import format_ranks

# In seconds. Together they keep the promise: every rank is gone 15 s after a fault.
TICK_SECONDS = 0.1
"""How often a guardian looks around. A worker may write thousands of lines a second, which are then read together."""
HEARTBEAT_SECONDS = 1.0
LOST_SECONDS = 8.0
"""A guardian that is silent for so long is gone, or the network to it is."""
STOPPED_SECONDS = 4.0
"""A process that is stopped for so long is a fault; a debugger or a short SIGSTOP is none."""
START_SECONDS = 15.0
"""For all guardians to connect, before anything is trained."""
GRACE_SECONDS = 3.0
"""After a fault: for the worker's main thread to leave."""
KILL_SECONDS = 6.0
"""After a fault: when its guardian ends a worker that is still there, with SIGQUIT, which gives it exit code 3."""
QUIT_SECONDS = 2.0
"""After SIGQUIT, the worker is killed. On a busy machine, it may take a while until a process gets its signal."""
SECOND_HAND_SECONDS = 1.5
"""For news of the cause, after an error that another rank may have caused."""
LINGER_SECONDS = 1.0
"""For the last messages to arrive."""

_MOST_NAMED = 8


@dataclass
class Position:
    """The position of a rank, as it reported it last."""

    phase: str = "set-up"
    step: int | None = None
    timed: bool = False
    waiting: str | None = None
    """The collective that it waits in."""
    moves: int = 0
    age: float = 0.0
    """Seconds since it last moved."""
    limit: float | None = None
    """The most seconds that it may last, whatever the step timeout is. Beyond, `late` is the fault."""
    late: str = ""
    record: str = ""
    """The run.json in which the guardian records that fault."""

    def __str__(self) -> str:
        return self.phase if self.step is None else f"{self.phase}, step {self.step}"


def line_of_fault(fault: Fault) -> str:
    """Return the line that a rank prints last when it ends with a fault."""
    return f"finetune stops: {visible(str(fault))}\n"


def found_at_start(summary: str) -> Fault:
    """Return the fault of guardians that do not reach each other."""
    remedy = (
        "Let the nodes of this run connect to each other over TCP (check firewalls, and containers without the host's "
        "network), and set MASTER_ADDR to an address that every node reaches."
    )
    return Fault(rank=None, summary=f"{summary}. {remedy}")


def lost_rank(rank: int, position: Position, end: str | None) -> Fault:
    """Describe the loss of a rank whose guardian cannot be reached any more.

    `end` says why the connection with the guardian has ended. It is empty if the reason is not known, and None if the
    guardian is silent but still connected.
    """
    if end is None:
        reason = f"its process, its machine or the network between is gone (nothing heard for {LOST_SECONDS:g} s)"
        return Fault(rank=rank, summary=f"rank {rank} cannot be reached during {position}: {reason}")
    reason = end or "was killed, alone or with its worker"
    return Fault(rank=rank, summary=f"rank {rank} was lost during {position}: its guardian process {reason}")


def describe_late(positions: dict[int, Position], limit: float) -> Fault | None:
    """Return the fault if a step takes too long, else None.

    A rank that waits in a collective is late because of another rank. It is named as waiting, and is a culprit only if
    no rank is left to wait for. The others may wait without a limit for a rank that works in a phase without a limit.
    """
    late = {rank: position for rank, position in sorted(positions.items()) if position.timed and position.age > limit}
    culprits = {rank: position for rank, position in late.items() if position.waiting is None}
    waiting = {rank: position for rank, position in sorted(positions.items()) if position.waiting is not None}
    if culprits:
        text = _describe({rank: f"has been in {p}, for {p.age:.0f} s" for rank, p in culprits.items()})
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            collectives = ", ".join(sorted({str(position.waiting) for position in waiting.values()}))
            text += f" while {format_ranks(waiting)} {verb} for it in {collectives}"
    elif late and len(waiting) == len(positions):
        text = _describe({r: f"has waited in {p.waiting} during {p}, for {p.age:.0f} s" for r, p in waiting.items()})
        text += " and no rank is left to wait for (the network is stuck, or the ranks are not in the same collective)"
    else:
        return None
    rank = next(iter(culprits)) if len(culprits) == 1 else None
    return Fault(rank=rank, summary=f"{text}: the step timeout is {limit:g} s")


def _describe(words: dict[int, str]) -> str:
    text = "; ".join(f"rank {rank} {words[rank]}" for rank in list(words)[:_MOST_NAMED])
    return text + (f"; so have {len(words) - _MOST_NAMED} others" if len(words) > _MOST_NAMED else "")
