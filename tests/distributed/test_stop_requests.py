"""Ranks that look in a store whether a signal asked any of them to stop."""

import signal
from types import SimpleNamespace

import torch.distributed as dist

from finetune.distributed import stop_requests
from finetune.distributed.stop_requests import StopRequests


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
