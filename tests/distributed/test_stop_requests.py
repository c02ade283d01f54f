"""Ranks that look in a store whether a signal asked any of them to stop."""

import signal
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from finetune.distributed import stop_requests
from finetune.distributed.stop_requests import StopRequests
from finetune.signals import Terminated


def test_a_request_to_stop_ends_with_the_run_that_it_stopped(monkeypatch):
    store, collectives = dist.HashStore(), SimpleNamespace(context=SimpleNamespace(distributed=True))
    monkeypatch.setattr(stop_requests, "rendezvous_store", lambda: store)
    signals = [signal.SIGTERM]
    monkeypatch.setattr(stop_requests, "received_stop_signal", lambda: signals[0])
    stopped = StopRequests(collectives, None)
    assert stopped.is_on_any_rank()
    signals[0] = None  # as on another rank
    stopped._next_look = 0.0
    assert stopped.is_on_any_rank()
    assert not StopRequests(collectives, None).is_on_any_rank(), "the next run in the same world"


@pytest.fixture
def rank_beside(monkeypatch):
    """Return a function that makes the requests of a rank in a world of two, and a list with its signal."""
    signals = [None]
    monkeypatch.setattr(stop_requests, "received_stop_signal", lambda: signals[0])
    collectives = SimpleNamespace(context=SimpleNamespace(distributed=True))
    return lambda: StopRequests(collectives, None), signals


def test_one_process_asks_nobody_else(rank_beside):
    make, signals = rank_beside
    alone = make()
    alone._collectives.context.distributed = False
    assert not alone.is_on_any_rank()
    signals[0] = signal.SIGTERM
    assert alone.is_on_any_rank()


def test_the_store_is_asked_twice_a_second_and_told_at_once(rank_beside, monkeypatch):
    make, signals = rank_beside
    store = dist.HashStore()
    monkeypatch.setattr(stop_requests, "rendezvous_store", lambda: store)
    times = iter([100.0, 100.1, 100.2, 100.8])
    monkeypatch.setattr(stop_requests, "time", SimpleNamespace(monotonic=lambda: next(times)))
    requests = make()
    assert not requests.is_on_any_rank()
    store.set(requests._key, "")  # by another rank
    assert not requests.is_on_any_rank(), "a tenth of a second later"
    store.delete_key(requests._key)
    signals[0] = signal.SIGTERM
    assert requests.is_on_any_rank()
    signals[0] = None
    assert requests.is_on_any_rank(), "what this rank has said holds for it too"


def test_a_store_that_is_gone_hides_no_signal_of_this_rank(rank_beside, monkeypatch):
    make, signals = rank_beside

    class Gone(dist.HashStore):
        def check(self, keys):
            raise RuntimeError("connection reset")

    gone = Gone()
    monkeypatch.setattr(stop_requests, "rendezvous_store", lambda: gone)
    requests = make()
    assert not requests.is_on_any_rank()
    signals[0] = signal.SIGTERM
    assert requests.is_on_any_rank()


def test_a_sharded_model_stops_on_all_ranks_before_the_same_forward_pass_and_only_inside_the_block(rank_beside):
    make, _ = rank_beside
    requests, heard, other_ranks = make(), [], [0.0]
    requests._collectives.sum = lambda values: [sum(values) + other_ranks[0]]
    requests._collectives.synchronize = heard.append
    requests._liveness = SimpleNamespace(is_timed=False, enter_phase=lambda phase: heard.append(f"enter {phase}"))
    requests.is_forward_collective = True
    with requests.stopping_together("validation"):
        requests.before_sharded_forward()
        assert heard[0] == "enter validation"
        other_ranks[0] = 1.0  # the signal came to another rank
        with pytest.raises(Terminated):
            requests.before_sharded_forward()
    heard.clear()
    requests.before_sharded_forward()
    assert heard == ["a forward pass"]
    requests._liveness.is_timed = True  # inside a step, which has its own order
    requests.before_sharded_forward()
    assert heard == ["a forward pass"]
