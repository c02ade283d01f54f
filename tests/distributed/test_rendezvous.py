"""The ranks find each other, or exactly one goes on, or all stop; real processes with launch variables of their own."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from finetune.distributed import rendezvous
from finetune.distributed.environment import read_environment
from finetune.distributed.network import PROBE_SECONDS, own_address_towards, probe_store
from finetune.distributed.rendezvous import Rendezvous, Verdict
from finetune.errors import LaunchError
from tests.launches import REPOSITORY, free_port, place_variables, wait_until
from tests.scenes import Scenes

pytestmark = [pytest.mark.slow, pytest.mark.warm]
SCRIPT = Path(__file__).with_name("joining.py")


class Play:
    """Ranks of one launch as processes, with the variables of a launcher that nobody knows."""

    def __init__(self, folder, python, variables):
        self.folder = folder
        self._python = python
        self._variables = variables
        self._started = []

    def start(self, rank, port, *, world_size=2, folder="", **wish):
        """Start one rank, which reports into `folder`; `joining.py` says what it may wish for."""
        place = place_variables(rank, world_size, port) | {"MASTER_ADDR": wish.pop("address", "127.0.0.1")}
        if not wish.pop("counts_here", True):
            del place["LOCAL_WORLD_SIZE"]
        process = subprocess.Popen(
            [self._python, str(SCRIPT), str(self.folder / folder), json.dumps(wish)],
            env={**self._variables, "PYTHONPATH": str(REPOSITORY), **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def launch(self, world_size, **wish):
        """Start all ranks of a world on a free port, and wait for their ends."""
        port = free_port()
        return self.ends([self.start(rank, port, world_size=world_size, **wish) for rank in range(world_size)])

    def ends(self, processes):
        """Exit codes, reports by rank (None where a rank left none) and outputs."""
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        files = [self.folder / f"rank-{rank}.json" for rank in range(len(processes))]
        reports = [json.loads(file.read_text()) if file.exists() else None for file in files]
        return [process.returncode for process in processes], reports, outputs

    def stop(self):
        """End what a failed scene left."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


SCENES = Scenes(at_a_time=6)
"""Most of them wait for a timeout, the first one longest."""


@pytest.fixture(scope="module", autouse=True)
def scenes(request, tmp_path_factory):
    """The scenes run while the other tests of this file do."""
    python, variables = sys.executable, dict(os.environ)
    with SCENES.running(request, tmp_path_factory, lambda folder, _: Play(folder, python, variables)) as started:
        yield started


@SCENES.add
def a_store_that_is_silent_for_longer_than_a_probe_is_found(play):
    """As with a slow name server: the store looks up each connection, also of probes that nobody waits for any more."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as slow:
        threading.Thread(target=pass_on_slowly, args=(slow, server.port, PROBE_SECONDS * 1.25), daemon=True).start()
        output, _ = play.start(1, slow.getsockname()[1], timeout=10).communicate(timeout=240)
    report = json.loads((play.folder / "rank-1.json").read_text())
    assert report["error"] == "LaunchError", output
    assert re.search(r"got no answer from rank 0 of 2 .* although a store is open there", report["text"])
    assert report["seconds"] < 20


@SCENES.add
def ranks_listen_on_loopback_or_at_the_address_that_others_need(play):
    """A launcher that counts the processes of this machine says that there are no others."""
    own = own_address_towards("192.0.2.1")
    if own is None or sys.platform != "linux":
        pytest.skip("no network, or no /proc to find listening sockets in")
    for counts_here, expected in ((True, "127.0.0.1"), (False, own)):
        codes, reports, outputs = play.launch(2, address=own, counts_here=counts_here)
        assert codes == [0, 0], outputs
        assert [report["listens"] for report in reports] == [[expected]] * 2
        assert [(report["sum"], report["clean"]) for report in reports] == [(3.0, True)] * 2


@SCENES.add
def processes_that_leave_a_world_can_join_the_next(play):
    """Whoever is early for the second rendezvous must neither walk into the first nor find its port shut."""
    codes, reports, outputs = play.launch(3, worlds=3)
    assert codes == [0, 0, 0], outputs
    assert [(r["world_size"], r["sum"], r["fallbacks"], r["clean"]) for r in reports] == [(3, 6.0, [], True)] * 3
    assert "[Distributed] Initialized with backend=gloo rank=0 world_size=3" in outputs[0]


@SCENES.add
def if_one_never_comes_rank_0_goes_on_alone_and_the_others_leave_with_its_word(play):
    port = free_port()
    codes, reports, outputs = play.ends([play.start(rank, port, world_size=3, timeout=6, lasts=1) for rank in (0, 1)])
    assert codes == [0, 0], outputs
    assert (reports[0]["world_size"], reports[0]["distributed"], reports[0]["clean"]) == (1, False, True)
    assert reports[0]["seconds"] < 6 + 10
    (fallback,) = reports[0]["fallbacks"]
    assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("ddp", "3 processes", "one process")
    assert f"rank 2 of 3 did not join at 127.0.0.1:{port} within 6 s (joined: ranks 0, 1)" in fallback["why"]
    assert "[Trainer] Warning: DDP was requested but rank 2 of 3" in outputs[0]
    assert "the curve stays the same, only slower" in outputs[0]
    assert reports[1]["error"] == "LeftToMain"
    assert "[Distributed] rank 0 trains alone: rank 1 of 3 leaves" in outputs[1]


@SCENES.add
def a_late_rank_hears_that_rank_0_trains_alone(play):
    port = free_port()
    first = play.start(0, port, timeout=1, lasts=60)
    wait_until(lambda: probe_store("127.0.0.1", port) is None, "the store of rank 0", 60)
    time.sleep(1.5)
    late = play.start(1, port, timeout=20)
    late.wait(240)
    (play.folder / "over").touch()
    codes, _, outputs = play.ends([first, late])
    assert codes == [0, 0], outputs
    assert "rank 1 of 2 leaves" in outputs[1]


@SCENES.add
def a_strict_run_is_refused_on_all_ranks(play):
    port = free_port()
    processes = [play.start(rank, port, world_size=3, timeout=6, strict=True) for rank in (0, 1)]
    codes, reports, outputs = play.ends(processes)
    assert codes == [2, 2], outputs
    for report in reports:
        assert report["error"] == "LaunchError"
        assert "rank 2 of 3 did not join" in report["text"]
        assert report["text"].endswith("No rank goes on alone.")
        assert report["seconds"] < 6 + 10
        assert report["fallbacks"] == []


@SCENES.add
def without_rank_0_nobody_goes_on(play):
    port = free_port()
    output, _ = play.start(1, port, timeout=2).communicate(timeout=240)
    report = json.loads((play.folder / "rank-1.json").read_text())
    assert report["error"] == "LaunchError", output
    assert f"rank 1 did not find rank 0 of 2 at 127.0.0.1:{port} within 2 s (spawn): Connection" in report["text"]
    assert report["seconds"] < 2 + 10


@SCENES.add
def a_wrong_address_is_named_on_both_sides(play):
    port, address = free_port(), "no-such-host.invalid"
    codes, reports, outputs = play.ends([play.start(rank, port, timeout=2, address=address) for rank in range(2)])
    assert codes == [0, 2], outputs
    why = reports[0]["fallbacks"][0]["why"]
    assert f"rank 1 of 2 did not join at {address}:{port}" in why
    assert "this address does not belong to rank 0's machine" in why
    assert f"the name {address} cannot be resolved here" in reports[1]["text"]
    assert all(report["seconds"] < 2 + 10 for report in reports)


@SCENES.add
def a_port_in_use_lets_rank_0_go_on_and_refuses_the_others(play):
    """Another server is there, which answers whatever it is sent, as web servers do."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as other:
        threading.Thread(target=answer_as_a_web_server, args=(other,), daemon=True).start()
        port = other.getsockname()[1]
        codes, reports, outputs = play.ends([play.start(rank, port, timeout=2) for rank in range(2)])
    assert codes == [0, 2], outputs
    assert f"rank 0 cannot open port {port}" in reports[0]["fallbacks"][0]["why"]
    assert "the port is in use" in reports[0]["fallbacks"][0]["why"]
    assert "something other than a torch store listens there" in reports[1]["text"]
    assert "frame #" not in outputs[1], "torch's own client prints its stack and tries again"


@SCENES.add
def two_launches_on_one_port_never_mix(play):
    """The second launch has another world size; its rank 1 comes to the first one's store."""
    port = free_port()
    (play.folder / "b").mkdir()
    first = play.start(0, port, timeout=30)  # longer than two processes need to start, one after the other
    wait_until(lambda: probe_store("127.0.0.1", port) is None, "the store of rank 0", 60)
    stranger = play.start(1, port, folder="b", world_size=3, timeout=6)
    output, _ = stranger.communicate(timeout=240)
    assert stranger.returncode == 2, output
    assert "found another launch" in output or "found another launch" in (play.folder / "b/rank-1.json").read_text()
    codes, _, outputs = play.ends([first, play.start(1, port, timeout=30)])
    assert codes == [0, 0], outputs


@SCENES.add
def a_rank_that_was_started_twice_is_refused(play):
    port = free_port()
    (play.folder / "twin").mkdir()
    twins = [play.start(1, port, folder=folder, world_size=3, timeout=8) for folder in ("", "twin")]
    first = play.start(0, port, world_size=3, timeout=8)
    outputs = [process.communicate(timeout=240)[0] for process in (*twins, first)]
    assert sorted(process.returncode for process in twins) == [0, 2], outputs
    assert sum("has already joined" in file.read_text() for file in play.folder.rglob("rank-1.json")) == 1


@SCENES.add
def gloo_takes_over_from_an_nccl_that_does_not_start(play):
    """This build of torch has no nccl: the very failure that a broken driver gives."""
    codes, reports, outputs = play.launch(2, backend="nccl")
    assert codes == [0, 0], outputs
    for report in reports:
        assert (report["backend"], report["world_size"], report["sum"]) == ("gloo", 2, 3.0)
        (fallback,) = report["fallbacks"]
        assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("parallel.backend", "nccl", "gloo")
        assert "nccl did not start" in fallback["why"]


@SCENES.add
def ranks_on_different_kinds_of_device_are_refused_before_a_backend_starts(play):
    """A broken driver leaves one node with its CPU. Its gloo and the others' nccl would wait for each other."""
    port = free_port()
    kinds = ["nccl", "gloo", "nccl"]
    processes = [play.start(rank, port, world_size=3, backend=backend) for rank, backend in enumerate(kinds)]
    codes, reports, outputs = play.ends(processes)
    assert codes == [2, 2, 2], outputs
    for report in reports:
        assert report["error"] == "LaunchError"
        assert "cpu with nccl (ranks 0, 2), cpu with gloo (rank 1)" in report["text"]
        assert report["seconds"] < 10
        assert report["clean"]


def answer_as_a_web_server(listener):
    with suppress(OSError):  # the test is over
        while True:
            with listener.accept()[0] as connection:
                connection.recv(64)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def pass_on_slowly(listener, port, seconds):
    """Connect each connection with the port, one after the other, each after so many seconds."""
    with suppress(OSError):  # the test is over
        while True:
            theirs = listener.accept()[0]
            time.sleep(seconds)
            ours = socket.create_connection(("127.0.0.1", port))
            for pair in ((theirs, ours), (ours, theirs)):
                threading.Thread(target=pass_on, args=pair, daemon=True).start()


def pass_on(source, target):
    with source, suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_store_is_told_from_another_server():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        problem = probe_store("127.0.0.1", silent.getsockname()[1], 0.5)
        assert problem == "something other than a torch store listens there"
    for use_libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=5), wait_for_workers=False, use_libuv=use_libuv)
        assert [probe_store("127.0.0.1", store.port) for _ in range(3)] == [None] * 3


def test_a_store_that_goes_away_is_a_launch_error():
    port = free_port()
    places = [place_variables(rank, 2, port) for rank in range(2)]
    first, second = (Rendezvous(read_environment(place), timedelta(seconds=5)) for place in places)
    verdict = threading.Timer(0.3, first.share_verdict, [Verdict("together", "all are here")])
    verdict.start()
    assert second.share_verdict(Verdict("refused")) == Verdict("together", "all are here")
    verdict.join()
    first.leave()
    del verdict, first
    rendezvous._stores.clear()
    with pytest.raises(LaunchError, match="lost the store"):
        second.share_verdict(Verdict("together"))


@pytest.mark.parametrize("act", SCENES.params)
def test_scene(scenes, act):
    scenes[act].result()
