"""Ranks that wait at the barrier in orders that a busy machine brings about."""

import threading

import pytest
import torch.distributed as dist

from finetune.distributed.store_barrier import StoreBarrier
from finetune.errors import RunFailedError


class StoreOfABusyMachine(dist.HashStore):
    """Between two looks of the rank that waits, all else happens."""

    meanwhile = None

    def check(self, keys):
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            act()
        return super().check(keys)


def no_fault(_seconds):
    return None


def ranks_at(store):
    return [StoreBarrier(store, rank=rank, world_size=2) for rank in range(2)]


def test_a_rank_may_come_and_leave_while_another_looks_elsewhere():
    store = StoreOfABusyMachine()
    first, second = ranks_at(store)

    def come_and_leave():
        second.wait("the test phase", no_fault)
        second.leave()

    store.meanwhile = come_and_leave
    first.wait("the test phase", no_fault)
    with pytest.raises(RunFailedError, match=r"this rank is in another, but rank 1 has left"):
        first.wait("another", no_fault)


def test_rank_0_does_not_take_the_store_away_from_those_who_still_look():
    store = StoreOfABusyMachine()
    first, second = ranks_at(store)
    is_looking, has_left = threading.Event(), threading.Event()

    def look(_seconds):
        is_looking.set()
        assert not has_left.wait(0.3), "rank 0 has left before rank 1 had seen it"

    waiting = threading.Thread(target=second.wait, args=("the test phase", look))
    waiting.start()
    assert is_looking.wait(10)
    first.wait("the test phase", no_fault)
    first.leave()
    has_left.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert store.add("1/seen", 0) == 2
