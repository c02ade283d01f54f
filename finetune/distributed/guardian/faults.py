"""Where a rank is, and what can go wrong there in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from finetune.distributed.guardian.limits import LOST_SECONDS

_MOST_NAMED = 8

REMEDY = (
    "Let the nodes of this run connect to each other by TCP (a firewall, a container without the host's network?), and "
    "give a MASTER_ADDR that every node reaches."
)


@dataclass
class Place:
    """Where a rank is, as it said last."""

    phase: str = "set-up"
    step: int | None = None
    timed: bool = False
    waiting: str | None = None
    """The collective that it waits in."""
    moves: int = 0
    age: float = 0.0
    """Seconds since it last moved."""

    def __str__(self) -> str:
        return self.phase if self.step is None else f"{self.phase}, step {self.step}"

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Place:
        """Read what `asdict` wrote; a key that is not known is left out."""
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})


def last_line(fault: str) -> str:
    """What a rank that ends with a fault says last."""
    return f"finetune stops: {fault}\n"


def lost_guardian(rank: int, place: Place) -> str:
    """The fault where a guardian ended before its worker; that worker says the same of itself."""
    return f"rank {rank} was lost during {place}: its guardian process was killed, alone or with its worker"


def unreachable(rank: int, place: Place) -> str:
    """The fault where nothing is heard of a rank."""
    return (
        f"rank {rank} cannot be reached during {place}: its process, its machine or the network between is gone "
        f"(nothing heard for {LOST_SECONDS:g} s)"
    )


def describe_late(places: dict[int, Place], limit: float) -> str | None:
    """The fault where a step takes too long; None where none does.

    A rank that waits in a collective is late because of another one: it is named as waiting, and is a culprit only when
    no rank is left to wait for. A rank at work in a phase without a limit may be waited for as long as it takes.
    """
    late = {rank: place for rank, place in sorted(places.items()) if place.timed and place.age > limit}
    culprits = {rank: place for rank, place in late.items() if place.waiting is None}
    waiting = {rank: place for rank, place in sorted(places.items()) if place.waiting is not None}
    if culprits:
        text = _in_words({rank: f"has been in {p}, for {p.age:.0f} s" for rank, p in culprits.items()})
        if waiting:
            verb = "waits" if len(waiting) == 1 else "wait"
            collectives = ", ".join(sorted({str(place.waiting) for place in waiting.values()}))
            text += f" while {ranks_in_words(waiting)} {verb} for it in {collectives}"
    elif late and len(waiting) == len(places):
        text = _in_words({r: f"has waited in {p.waiting} during {p}, for {p.age:.0f} s" for r, p in waiting.items()})
        text += " and no rank is left to wait for (the network is stuck, or the ranks are not in the same collective)"
    else:
        return None
    return f"{text}: the step timeout is {limit:g} s"


def _in_words(words: dict[int, str]) -> str:
    text = "; ".join(f"rank {rank} {words[rank]}" for rank in list(words)[:_MOST_NAMED])
    return text + (f"; so have {len(words) - _MOST_NAMED} others" if len(words) > _MOST_NAMED else "")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``."""
    numbers = sorted(ranks)
    more = f" and {len(numbers) - _MOST_NAMED} others" if len(numbers) > _MOST_NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_MOST_NAMED]))}{more}"
