"""The ranks find each other, or exactly one goes on, or all stop; real processes with launch variables of their own."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
from torch.distributed import PrefixStore, TCPStore

from finetune.distributed import rendezvous
from finetune.distributed.environment import read_environment
from finetune.distributed.network import PROBE_SECONDS, what_answers
from finetune.distributed.rendezvous import Rendezvous, Verdict
from finetune.errors import LaunchError
from tests.launches import REPOSITORY, free_port, place_variables, wait_until

pytestmark = [pytest.mark.launch, pytest.mark.warm]
SCRIPT = Path(__file__).with_name("joining.py")


def start(folder, rank, port, *, world_size=2, **wish):
    """One rank as a process; its variables are those of a launcher that nobody knows."""
    variables = place_variables(rank, world_size, port) | {"MASTER_ADDR": wish.pop("address", "127.0.0.1")}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(wish)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(processes, folder):
    """Exit codes, reports by rank (None where a rank left none) and outputs."""
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    files = [folder / f"rank-{rank}.json" for rank in range(len(processes))]
    reports = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return [process.returncode for process in processes], reports, outputs


def test_all_present_are_one_world(tmp_path):
    port = free_port()
    codes, reports, outputs = ends([start(tmp_path, rank, port, world_size=3) for rank in range(3)], tmp_path)
    assert codes == [0, 0, 0], outputs
    assert [(r["world_size"], r["sum"], r["backend"], r["clean"]) for r in reports] == [(3, 6.0, "gloo", True)] * 3
    assert "[Distributed] Initialized with backend=gloo rank=0 world_size=3" in outputs[0]


def test_processes_that_leave_a_world_can_join_the_next(tmp_path):
    """Whoever is early for the second rendezvous must neither walk into the first nor find its port shut."""
    port = free_port()
    codes, reports, outputs = ends([start(tmp_path, rank, port, worlds=4) for rank in range(2)], tmp_path)
    assert codes == [0, 0], outputs
    assert [(r["world_size"], r["sum"], r["fallbacks"], r["clean"]) for r in reports] == [(2, 3.0, [], True)] * 2


def test_if_one_never_comes_rank_0_goes_on_alone_and_the_others_leave_with_its_word(tmp_path):
    port = free_port()
    processes = [start(tmp_path, rank, port, world_size=3, timeout=3, lasts=1) for rank in (0, 1)]
    codes, reports, outputs = ends(processes, tmp_path)
    assert codes == [0, 0], outputs
    assert (reports[0]["world_size"], reports[0]["distributed"], reports[0]["clean"]) == (1, False, True)
    assert reports[0]["seconds"] < 3 + 10
    (fallback,) = reports[0]["fallbacks"]
    assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("ddp", "3 processes", "one process")
    assert f"rank 2 of 3 did not join at 127.0.0.1:{port} within 3 s (joined: ranks 0, 1)" in fallback["why"]
    assert "[Trainer] Warning: DDP was requested but rank 2 of 3" in outputs[0]
    assert "the curve stays the same, only slower" in outputs[0]
    assert reports[1]["error"] == "LeftToMain"
    assert "[Distributed] rank 0 trains alone: rank 1 of 3 leaves" in outputs[1]


def test_a_late_rank_hears_that_rank_0_trains_alone(tmp_path):
    port = free_port()
    first = start(tmp_path, 0, port, timeout=1, lasts=60)
    wait_until(lambda: what_answers("127.0.0.1", port) is None, "the store of rank 0", 60)
    time.sleep(1.5)
    late = start(tmp_path, 1, port, timeout=20)
    late.wait(240)
    (tmp_path / "over").touch()
    codes, _, outputs = ends([first, late], tmp_path)
    assert codes == [0, 0], outputs
    assert "rank 1 of 2 leaves" in outputs[1]


def test_a_strict_run_is_refused_on_all_ranks(tmp_path):
    port = free_port()
    processes = [start(tmp_path, rank, port, world_size=3, timeout=2, strict=True) for rank in (0, 1)]
    codes, reports, outputs = ends(processes, tmp_path)
    assert codes == [2, 2], outputs
    for report in reports:
        assert report["error"] == "LaunchError"
        assert "rank 2 of 3 did not join" in report["text"]
        assert report["text"].endswith("No rank goes on alone.")
        assert report["seconds"] < 2 + 10
        assert report["fallbacks"] == []


def test_without_rank_0_nobody_goes_on(tmp_path):
    port = free_port()
    process = start(tmp_path, 1, port, timeout=2)
    output, _ = process.communicate(timeout=240)
    report = json.loads((tmp_path / "rank-1.json").read_text())
    assert process.returncode == 2, output
    assert report["error"] == "LaunchError"
    assert (
        f"rank 1 did not find rank 0 of 2 at 127.0.0.1:{port} within 2 s (spawn): Connection refused" in report["text"]
    )
    assert report["seconds"] < 2 + 10


def test_a_wrong_address_is_named_on_both_sides(tmp_path):
    port, address = free_port(), "no-such-host.invalid"
    processes = [start(tmp_path, rank, port, timeout=2, address=address) for rank in range(2)]
    codes, reports, outputs = ends(processes, tmp_path)
    assert codes == [0, 2], outputs
    why = reports[0]["fallbacks"][0]["why"]
    assert f"rank 1 of 2 did not join at {address}:{port}" in why
    assert "this address does not belong to rank 0's machine" in why
    assert f"the name {address} cannot be resolved here" in reports[1]["text"]
    assert all(report["seconds"] < 2 + 10 for report in reports)


def test_ddp_false_lets_exactly_rank_0_go_on(tmp_path):
    port = free_port()
    codes, reports, outputs = ends(
        [start(tmp_path, rank, port, world_size=3, flag=False) for rank in range(3)], tmp_path
    )
    assert codes == [0, 0, 0], outputs
    assert [report.get("world_size") for report in reports] == [1, None, None]
    assert [report.get("error") for report in reports] == [None, "LeftToMain", "LeftToMain"]
    assert "ddp=False" in reports[0]["fallbacks"][0]["why"]
    assert all(report["seconds"] < 10 for report in reports)


def test_a_port_in_use_lets_rank_0_go_on_and_refuses_the_others(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        codes, reports, outputs = ends([start(tmp_path, rank, port, timeout=2) for rank in range(2)], tmp_path)
    assert codes == [0, 2], outputs
    assert f"rank 0 cannot open port {port}" in reports[0]["fallbacks"][0]["why"]
    assert "the port is in use" in reports[0]["fallbacks"][0]["why"]
    assert "something other than a torch store listens there" in reports[1]["text"]


def test_two_launches_on_one_port_never_mix(tmp_path):
    """The second launch has another world size; its rank 1 comes to the first one's store."""
    port = free_port()
    (tmp_path / "b").mkdir()
    first = start(tmp_path, 0, port, timeout=30)  # longer than two processes need to start, one after the other
    wait_until(lambda: what_answers("127.0.0.1", port) is None, "the store of rank 0", 60)
    stranger = start(tmp_path / "b", 1, port, world_size=3, timeout=6)
    output, _ = stranger.communicate(timeout=240)
    assert stranger.returncode == 2, output
    assert "found another launch" in output or "found another launch" in (tmp_path / "b" / "rank-1.json").read_text()
    codes, _, outputs = ends([first, start(tmp_path, 1, port, timeout=30)], tmp_path)
    assert codes == [0, 0], outputs


def test_a_rank_that_was_started_twice_is_refused(tmp_path):
    port = free_port()
    (tmp_path / "twin").mkdir()
    processes = [
        start(tmp_path, 1, port, world_size=3, timeout=5),
        start(tmp_path / "twin", 1, port, world_size=3, timeout=5),
    ]
    first = start(tmp_path, 0, port, world_size=3, timeout=5)
    outputs = [process.communicate(timeout=240)[0] for process in (*processes, first)]
    assert sorted(process.returncode for process in processes) == [0, 2], outputs
    assert sum("has already joined" in file.read_text() for file in tmp_path.rglob("rank-1.json")) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_gloo_takes_over_from_an_nccl_that_does_not_start(tmp_path, strict):
    """This build of torch has no nccl: the very failure that a broken driver gives."""
    port = free_port()
    processes = [start(tmp_path, rank, port, backend="nccl", strict=strict) for rank in range(2)]
    codes, reports, outputs = ends(processes, tmp_path)
    if strict:
        assert codes == [2, 2], outputs
        assert all("nccl did not start on 2 of 2 ranks" in report["text"] for report in reports)
        return
    assert codes == [0, 0], outputs
    for report in reports:
        assert (report["backend"], report["world_size"], report["sum"]) == ("gloo", 2, 3.0)
        (fallback,) = report["fallbacks"]
        assert (fallback["what"], fallback["wanted"], fallback["used"]) == ("parallel.backend", "nccl", "gloo")
        assert "nccl did not start" in fallback["why"]


def test_ranks_on_different_kinds_of_device_are_refused_before_a_backend_starts(tmp_path):
    """A broken driver leaves one node with its CPU. Its gloo and the others' nccl would wait for each other."""
    port = free_port()
    kinds = ["nccl", "gloo", "nccl"]
    processes = [start(tmp_path, rank, port, world_size=3, backend=backend) for rank, backend in enumerate(kinds)]
    codes, reports, outputs = ends(processes, tmp_path)
    assert codes == [2, 2, 2], outputs
    for report in reports:
        assert report["error"] == "LaunchError"
        assert "cpu with nccl (ranks 0, 2), cpu with gloo (rank 1)" in report["text"]
        assert report["seconds"] < 10
        assert report["clean"]


def test_while_waiting_a_rank_says_who_is_missing(monkeypatch, caplog):
    monkeypatch.setattr(rendezvous, "REPORT_SECONDS", 0.2)
    port = free_port()
    waiting = Rendezvous(read_environment(place_variables(0, 3, port)), timedelta(seconds=1))
    why = waiting.wait_for_all()
    waiting.leave()
    assert why is not None
    assert f"rank 0 of 3 has waited at 127.0.0.1:{port} for 0 s (limit 1 s): missing: ranks 1, 2" in caplog.text


def test_what_answers_at_an_address_is_told_apart():
    assert what_answers("127.0.0.1", free_port()) == "Connection refused"
    assert str(what_answers("no-such-host.invalid", 80)) == "the name no-such-host.invalid cannot be resolved here"
    assert str(what_answers("node..1", 80)) == "the name node..1 cannot be resolved here"
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert what_answers("127.0.0.1", silent.getsockname()[1]) == "something other than a torch store listens there"
    for use_libuv in (True, False):
        store = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=5), wait_for_workers=False, use_libuv=use_libuv)
        for _ in range(3):
            assert what_answers("127.0.0.1", store.port) is None


def test_a_store_that_goes_away_is_a_launch_error():
    port = free_port()
    places = [place_variables(rank, 2, port) for rank in range(2)]
    first, second = (Rendezvous(read_environment(place), timedelta(seconds=5)) for place in places)
    word = threading.Timer(0.3, first.give_verdict, [Verdict("together")])
    word.start()
    assert second.read_verdict() == Verdict("together")
    word.join()
    first.leave()
    del word, first
    with pytest.raises(LaunchError, match="lost the store"):
        second.read_verdict()


class CountingStore(PrefixStore):
    """Counts the questions of all ranks, by thread."""

    asked: ClassVar[Counter[str]] = Counter()

    def __getattribute__(self, name):
        if name in ("add", "append", "check", "get", "set"):
            self.asked[threading.current_thread().name] += 1
        return super().__getattribute__(name)


def test_a_rank_asks_no_more_questions_in_a_larger_world(monkeypatch):
    world_size, port = 24, free_port()
    monkeypatch.setattr(rendezvous, "PrefixStore", CountingStore)
    monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.1)
    all_joined, found = threading.Barrier(world_size), {}

    def join(rank):
        joined = Rendezvous(read_environment(place_variables(rank, world_size, port)), timedelta(seconds=60))
        all_joined.wait(60)
        before = CountingStore.asked[f"rank {rank}"]
        notes = joined.exchange("notes", f"of rank {rank}\n", 60)
        found[rank] = notes, CountingStore.asked[f"rank {rank}"] - before, joined

    ranks = [threading.Thread(target=join, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    before = CountingStore.asked["rendezvous"]
    time.sleep(1.0)
    asked_meanwhile = CountingStore.asked["rendezvous"] - before
    for rank in reversed(range(world_size)):
        found[rank][2].leave()
    every = {rank: f"of rank {rank}\n" for rank in range(world_size)}
    assert all(notes == every and list(notes) == list(every) for notes, _, _ in found.values())
    assert max(asked for _, asked, _ in found.values()) < world_size
    assert asked_meanwhile <= 11, "rank 0 looks for each rank, as long as the run lasts"


def test_a_store_that_is_silent_for_longer_than_a_probe_is_found():
    """As with a slow name server: the store looks up each connection, also of probes that nobody waits for any more."""
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    server.set("finetune/identity", json.dumps({"launch_id": "", "world_size": 2}))
    with socket.create_server(("127.0.0.1", 0), backlog=64) as slow:
        threading.Thread(target=pass_on_slowly, args=(slow, server.port, PROBE_SECONDS * 1.25), daemon=True).start()
        place = place_variables(1, 2, slow.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(LaunchError, match=r"got no answer from rank 0 of 2 .* although a store is open there"):
            Rendezvous(read_environment(place), timedelta(seconds=10))
        assert time.monotonic() - began < 20


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
