import json
import os
import sys
import threading
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from finetune import cleanup_ddp, initialize_ddp
from finetune.config.schema import Config
from finetune.distributed import process_group, rendezvous
from finetune.distributed.environment import LAUNCH_VARIABLES, read_environment, with_place
from finetune.distributed.joined_world import JoinedWorld
from finetune.distributed.process_group import (
    TrainsAloneError,
    compare_devices,
    obey,
    start_backend,
    verdict_on_failure,
)
from finetune.distributed.rendezvous import Rendezvous, Verdict
from finetune.errors import ConfigError, LaunchError, LeftToMain, RunFailedError
from finetune.fallbacks import Fallbacks
from tests.launches import free_port, place_variables, run_command, write_report


def launch_variables():
    return {name: os.environ[name] for name in LAUNCH_VARIABLES if name in os.environ}


def _spawned(rank, port, folder):
    """What one of two spawned processes sees; it has no launcher and says itself which one it is."""
    from finetune.distributed.launch import launch

    os.environ["MASTER_PORT"] = str(port)  # the user's own: not ours to remove
    context = initialize_ddp(rank=rank, worldsize=2, master_addr="127.0.0.1", master_port=str(port), device="cpu")
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    written = launch_variables()
    worlds = []
    for _ in range(2):  # a recipe adopts the group that is up, and leaves it to its owner
        with launch(Config.model_validate({"training": {"device": "cpu"}})) as runtime:
            worlds.append([runtime.rank, runtime.world_size, runtime.environment.launcher])
    is_up = dist.is_initialized()
    cleanup_ddp()
    cleanup_ddp()
    report = {
        "context": [context.distributed, context.rank, context.local_rank, context.world_size, str(context.device)],
        "sum": value.item(),
        "written": written,
        "worlds": worlds,
        "is_up": [is_up, dist.is_initialized()],
        "left": launch_variables(),
    }
    write_report(folder, rank, report)


@pytest.mark.slow
@pytest.mark.warm
def test_spawned_processes_that_are_told_their_rank_join_one_world(tmp_path):
    port = free_port()
    done = run_command([sys.executable, "-m", "tests.distributed.test_ddp_init", str(port), tmp_path])
    assert done.returncode == 0, done.stdout
    reports = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    for rank, report in enumerate(reports):
        assert report["context"] == [True, rank, rank, 2, "cpu"]
        assert report["sum"] == 3.0
        assert report["written"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        assert report["worlds"] == [[rank, 2, "spawn"]] * 2
        assert report["is_up"] == [True, False]
        assert report["left"] == {"MASTER_PORT": str(port)}


def test_a_world_of_one_needs_no_group_and_nothing_to_clean_up():
    before = dict(os.environ)
    cleanup_ddp()
    for context in (initialize_ddp(device="cpu"), initialize_ddp(rank=0, worldsize=1, device="cpu")):
        assert context == (False, 0, 0, 1, torch.device("cpu"))
    assert not dist.is_initialized()
    assert launch_variables() == {}
    cleanup_ddp()
    cleanup_ddp()
    assert dict(os.environ) == before


def test_one_process_that_should_be_several_says_so():
    fallbacks = Fallbacks()
    initialize_ddp(device="cpu", flag=True, fallbacks=fallbacks)
    assert [(taken.what, taken.used) for taken in fallbacks] == [("ddp", "one process")]
    with pytest.raises(ConfigError, match="The run is strict"):
        initialize_ddp(device="cpu", flag=True, fallbacks=Fallbacks(strict=True))
    cleanup_ddp()


def test_arguments_that_describe_no_world_are_refused():
    for given in ({"rank": 0}, {"worldsize": 2}):
        with pytest.raises(LaunchError, match="belong together"):
            initialize_ddp(**given)
    with pytest.raises(LaunchError, match="RANK=2, WORLD_SIZE=2"):
        initialize_ddp(rank=2, worldsize=2)
    with pytest.raises(LaunchError, match="backend=nccl needs a CUDA device"):
        initialize_ddp(rank=0, worldsize=2, backend="nccl", device="cpu")
    with pytest.raises(LaunchError, match=r"rank=0 and worldsize=4 were given, but the environment says RANK=1\."):
        with_place({"RANK": "1", "WORLD_SIZE": "4"}, 0, 4)


def test_if_nobody_comes_rank_0_trains_alone_and_leaves_nothing_behind():
    port = free_port()
    context = initialize_ddp(
        timedelta(seconds=0), rank=0, worldsize=2, master_addr="localhost", master_port=port, device="cpu"
    )
    assert context == (False, 0, 0, 1, torch.device("cpu"))
    assert set(launch_variables()) == {"MASTER_ADDR", "MASTER_PORT"}, "Accelerate must see one process"
    cleanup_ddp()
    assert not dist.is_initialized()
    assert launch_variables() == {}


def test_a_run_adopts_what_became_of_the_world_before_it():
    """A script joins first and builds its trainer then: run.json must say that it went on alone, and for how many."""
    from finetune.distributed.launch import launch

    config = Config.model_validate({"training": {"device": "cpu"}})
    initialize_ddp(timedelta(seconds=0), rank=0, worldsize=2, master_port=free_port(), device="cpu")
    for _ in range(2):
        with launch(config) as runtime:
            assert (runtime.world_size, runtime.environment.world_size) == (1, 2)
            assert [record["what"] for record in runtime.fallbacks.as_records()] == ["ddp"]
    assert initialize_ddp(device="cpu") == (False, 0, 0, 1, torch.device("cpu"))
    cleanup_ddp()
    with launch(config) as runtime:
        assert (runtime.environment.world_size, runtime.fallbacks.as_records()) == (1, [])


class OneRank:
    """The rendezvous of a world of one rank."""

    def __init__(self):
        self.environment = read_environment(with_place({}, 0, 1))
        self.seconds_left = 20.0
        self.store = dist.HashStore()

    def exchange(self, topic, note, seconds):
        return {0: note}


def test_why_a_backend_does_not_start_is_said_whatever_lines_its_error_has(monkeypatch):
    error = RuntimeError("NCCL error in: X.cpp:94\nncclSystemError: a call failed.\nLast error:\nno ib0")
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    why = start_backend(OneRank(), "gloo", timedelta(minutes=60), ExitStack())
    assert why == "gloo did not start on 1 of 1 ranks (rank 0: NCCL error in: X.cpp:94 no ib0)"


def test_a_start_that_is_interrupted_leaves_no_group_to_wait_for(monkeypatch):
    """Ctrl-C, or a store that is lost, while nccl hangs: destroying its group would wait for its collective."""
    rendezvous, given_up = OneRank(), []
    monkeypatch.setattr(process_group, "_abort_process_group", lambda: given_up.append("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: given_up.append("destroyed"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        start_backend(rendezvous, "nccl", timedelta(minutes=60), ExitStack())
    assert given_up == ["aborted"]


def test_a_collective_that_does_not_end_is_given_up_by_this_process_and_not_by_its_backend():
    with pytest.raises(RuntimeError, match="has not ended within 0 seconds"):
        process_group._finish(Mock(is_completed=lambda: False), 0.1)
    ended = Mock(is_completed=lambda: True)
    process_group._finish(ended, 60)
    ended.wait.assert_called_once_with()


def test_the_limit_for_the_start_holds_for_the_start_alone():
    rendezvous = OneRank()
    with ExitStack() as undo:
        assert start_backend(rendezvous, "gloo", timedelta(minutes=60), undo) is None
    assert not dist.is_initialized()
    assert rendezvous.store.timeout == timedelta(minutes=60), "groups that are made later wait at the same store"


def test_a_rank_that_does_not_answer_has_not_started(monkeypatch):
    for name in ("init_process_group", "barrier"):
        monkeypatch.setattr(dist, name, Mock())
    pair = OneRank()
    pair.environment = read_environment(with_place({}, 0, 2))
    why = start_backend(pair, "gloo", timedelta(minutes=60), ExitStack())
    assert why == "gloo did not start on 1 of 2 ranks (rank 1: no answer)"


def test_exactly_rank_0_goes_on_alone_and_none_of_a_strict_run():
    assert verdict_on_failure("rank 1 is missing", Fallbacks()) == Verdict("alone", "rank 1 is missing")
    refused = Verdict("refused", "rank 1 is missing. No rank goes on alone.")
    assert verdict_on_failure("rank 1 is missing", Fallbacks(strict=True)) == refused
    ends = {0: (TrainsAloneError, LaunchError), 1: (LeftToMain, LaunchError)}
    for rank, (alone, stopped) in ends.items():
        environment = SimpleNamespace(rank=rank, world_size=2)
        there = SimpleNamespace(environment=environment, share_verdict=lambda verdict: verdict)
        for decision, error in (("alone", alone), ("refused", stopped)):
            with pytest.raises(error):
                obey(there, Verdict(decision, "why"))
        obey(there, Verdict("together"))


def test_two_ranks_on_one_gpu_are_refused_before_a_backend_starts():
    def compare(*gpus):
        notes = {rank: json.dumps(["cuda with nccl", f"node {gpu}", None]) for rank, gpu in enumerate(gpus)}
        return compare_devices(SimpleNamespace(joined=lambda: notes))

    assert compare("GPU-a", "GPU-b") == Verdict("together")
    decision, reason = compare("GPU-a", "GPU-a")
    assert decision == "refused"
    assert "ranks 0, 1 (node GPU-a)" in reason


@pytest.fixture
def join(monkeypatch):
    """Return a function that lets a rank of two join at one port, and end all that was begun."""
    monkeypatch.setattr(rendezvous, "_stores", {})
    port, joined = free_port(), []

    def join(rank, **variables):
        environ = {**place_variables(rank, 2, port), **variables}
        joined.append(Rendezvous(read_environment(environ), timedelta(seconds=5)))
        return joined[-1]

    yield join
    for each in joined:
        each.leave()


def test_a_second_process_of_a_rank_and_a_rank_of_another_launch_are_refused(join):
    for rank in (0, 1):
        join(rank)
    with pytest.raises(LaunchError, match=r"rank 1 has already joined at .* two processes were started as this rank"):
        join(1)
    with pytest.raises(LaunchError, match=r"rank 1 found another launch .* id 'lab' here"):
        join(1, TORCHELASTIC_RUN_ID="lab")


def test_rank_0_waits_until_the_others_know_that_it_trains_alone(join):
    """The store ends with rank 0."""
    first, second = (join(rank) for rank in (0, 1))
    assert first.wait_for_all() is None
    telling = threading.Thread(target=first.share_verdict, args=[Verdict("alone", "why")])
    telling.start()
    telling.join(0.1)
    assert telling.is_alive()
    assert second.share_verdict(Verdict("together")) == Verdict("alone", "why")
    telling.join(5)
    assert not telling.is_alive()


def test_a_rank_ends_with_its_launcher_while_it_waits(join, monkeypatch):
    monkeypatch.setattr(rendezvous, "launcher_pid", lambda *_: 0)
    with pytest.raises(RunFailedError, match="rank 1 lost its launcher, process 0, before all ranks had joined"):
        join(1)


def test_a_variable_that_somebody_else_has_changed_is_not_restored(monkeypatch):
    world = JoinedWorld()
    for name in ("OURS", "THEIRS"):
        monkeypatch.setenv(name, "before")
        world.set_variable(name, "1")
    os.environ["THEIRS"] = "2"
    world.undo.close()
    assert (os.environ["OURS"], os.environ["THEIRS"]) == ("before", "2")


if __name__ == "__main__":
    torch.multiprocessing.spawn(_spawned, args=(int(sys.argv[1]), sys.argv[2]), nprocs=2)
