"""What a guardian concludes from its worker's messages and state, and what a worker tells it. No process is started."""

from __future__ import annotations

import json
import os
import signal
import socket
from io import BytesIO
from types import SimpleNamespace

import psutil
import pytest

from finetune.distributed import watchdog
from finetune.distributed.guardian import guardian as guardian_module
from finetune.distributed.guardian.faults import KILL_SECONDS, QUIT_SECONDS, STOPPED_SECONDS, Position, lost_rank
from finetune.distributed.guardian.guardian import Guardian, Worker
from finetune.distributed.guardian.link import Link, Peer
from finetune.distributed.watchdog import Watchdog
from finetune.errors import Fault
from finetune.runs import killed

WORKER = os.getppid()
"""The guardian is this process, and a guardian's parent is its worker."""
SETTINGS = {"rank": 1, "world_size": 2, "worker_pid": WORKER, "launcher_pid": None}
CAUSE = {"rank": 0, "summary": "rank 0 was killed"}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """The states and parents of processes, the kernel's kills for lack of memory, and the signals that were sent."""
    made = SimpleNamespace(states={}, parents={}, memory_kills=3, sent=[])

    def process(pid):
        return SimpleNamespace(status=lambda: made.states.get(pid), ppid=lambda: made.parents.get(pid))

    monkeypatch.setattr(psutil, "Process", process)
    monkeypatch.setattr(os, "kill", lambda pid, number: made.sent.append((pid, number)))
    monkeypatch.setattr(killed, "memory_kills", lambda: {"boot": made.memory_kills})
    monkeypatch.setattr(guardian_module, "memory_kills", killed.memory_kills)
    return made


@pytest.fixture
def worker_end(machine, monkeypatch):
    """The worker's end of the link to its guardian, which is the standard input and output of a real one."""
    init = Link.__init__
    near, far = socket.socketpair()
    with near, far:

        def connect(link, reader, writer):
            init(link, *([near.fileno()] * 2 if (reader, writer) == (0, 1) else [reader, writer]))

        monkeypatch.setattr(Link, "__init__", connect)
        yield Link(far.fileno(), far.fileno())


def say(link, *positions):
    for position in positions:
        link.send({"position": vars(position)})


def test_a_position_is_as_old_as_the_last_move_and_may_have_a_limit(worker_end):
    worker = Worker(SETTINGS)
    say(worker_end, Position("training", 12, True, moves=1))
    worker.read(10.0)
    say(worker_end, Position("training", 12, True, waiting="sum", moves=1))
    worker.read(14.0)
    assert (worker.position.waiting, worker.position.age) == ("sum", 4.0)
    say(worker_end, Position("rollout", 13, limit=5.0, late="a tool hangs", moves=2))
    worker.read(20.0)
    for now, fault in ((25.0, None), (25.1, Fault(rank=1, summary="a tool hangs"))):
        worker.read(now)
        assert worker.find_fault(now, is_beat=False) == fault


@pytest.mark.parametrize("waiting", [None, "sum"])
def test_only_an_error_in_a_collective_is_at_second_hand(worker_end, waiting):
    worker = Worker(SETTINGS)
    say(worker_end, Position("training", 12, waiting=waiting))
    worker_end.send({"failure": "DataError: row 7"})
    worker.read(0.0)
    assert worker.find_fault(0.0, is_beat=False) == Fault(
        rank=1,
        summary="rank 1 failed during training, step 12",
        error="DataError: row 7",
        is_second_hand=waiting is not None,
    )


def test_a_stopped_worker_is_a_fault_unless_its_whole_job_is_stopped(worker_end, machine):
    def faults(**settings):
        worker = Worker({**SETTINGS, **settings})
        times = (1.0, 0.9 + STOPPED_SECONDS, 1.0 + STOPPED_SECONDS)
        return [str(worker.find_fault(now, is_beat=True) or "").partition(" during")[0] for now in times]

    machine.states[WORKER], machine.parents[WORKER] = psutil.STATUS_STOPPED, 77
    assert faults() == faults(launcher_pid=77) == ["", "", "rank 1 is stopped (SIGSTOP)"]
    assert faults(world_size=1) == ["", "", ""], "nobody waits for it"
    machine.states[77] = psutil.STATUS_STOPPED
    assert faults(launcher_pid=77) == ["", "", ""]
    machine.states.clear()
    assert faults(launcher_pid=78) == ["rank 1 lost its launcher, process 78,"] * 3


def test_a_process_alone_is_not_late_for_the_time_in_which_it_is_stopped(worker_end, machine):
    worker = Worker({**SETTINGS, "world_size": 1})
    machine.states[WORKER] = psutil.STATUS_STOPPED
    say(worker_end, Position("rollout", 1, limit=5.0, late="a tool hangs", moves=1))
    for now in (0.0, 4.0, 8.0):
        worker.read(now)
        assert worker.find_fault(now, is_beat=True) is None


def test_a_lack_of_memory_is_the_reason_only_if_the_kernel_has_killed_meanwhile(worker_end, machine):
    worker = Worker({**SETTINGS, "worker_pid": 0})
    for kills, is_reason in ((3, False), (4, True)):
        machine.memory_kills = kills
        worker.read(0.0)
        summary = worker.find_fault(0.0, is_beat=False).summary
        assert "rank 1 was killed during set-up: process 0 on" in summary
        assert ("out-of-memory killer" in summary) == is_reason


def test_a_worker_is_asked_to_end_and_then_killed(worker_end, machine):
    worker = Worker(SETTINGS)
    for now in (1.0, 0.9 + QUIT_SECONDS, 1.0 + QUIT_SECONDS):
        worker.kill(now)
    assert machine.sent == [(WORKER, signal.SIGQUIT), (WORKER, signal.SIGKILL)]
    Worker({**SETTINGS, "worker_pid": 0}).kill(1.0)
    assert len(machine.sent) == 2, "its number may belong to another process by now"


class Watch:
    """A guardian of rank 1, its worker, its hub and its clock."""

    def __init__(self, worker_end, monkeypatch):
        self.worker = worker_end
        self._at = 0.0
        time = SimpleNamespace(monotonic=lambda: self._at, sleep=lambda seconds: None)
        monkeypatch.setattr(guardian_module, "time", time)
        near, self._far = socket.socketpair()
        self.hub = Link(self._far.fileno(), self._far.fileno())
        self.guardian = Guardian(SETTINGS, Peer(near), None)

    def turn(self, *seconds):
        for each in seconds:
            self._at += each
            self.guardian._turn()

    def hang_up(self):
        self._far.close()

    def close(self):
        self._far.close()
        self.guardian._link.connection.close()


@pytest.fixture
def watch(worker_end, monkeypatch):
    made = Watch(worker_end, monkeypatch)
    yield made
    made.close()


def faults_in(link):
    return [message["fault"]["rank"] for message in link.receive() if "fault" in message]


def test_time_in_which_the_machine_is_suspended_does_not_count(watch):
    say(watch.worker, Position("rollout", 1, limit=5.0, late="a tool hangs", moves=1))
    watch.turn(1.0, 1000.0, 1.0)
    assert faults_in(watch.hub) == []
    watch.turn(1.0, 1.0, 1.0, 1.0)
    assert faults_in(watch.hub) == [1]


@pytest.mark.parametrize("has_left", [True, False])
def test_a_rank_outlives_the_hub_only_if_rank_0_has_left_in_peace(watch, has_left):
    watch.hub.send({"ready": True})
    if has_left:
        watch.hub.send({"left": True})
    watch.turn(0.1)
    watch.hang_up()
    watch.turn(0.1, 0.1)
    assert faults_in(watch.worker) == [0] * (not has_left)


def test_a_rank_that_failed_waits_for_the_cause_before_it_ends_with_its_own_error(watch):
    """It said goodbye too: its error goes to the hub all the same."""
    watch.worker.send({"failure": "RuntimeError: closed by peer", "bye": True})
    watch.turn(0.1, 1.0, 1.0)
    assert faults_in(watch.worker) == []
    watch.turn(1.0)
    assert faults_in(watch.worker) == [1]
    assert faults_in(watch.hub) == [1]


def test_a_worker_that_stays_after_a_fault_is_ended(watch, machine):
    watch.hub.send({"ready": True})
    watch.hub.send({"fault": CAUSE})
    watch.turn(0.1)
    assert faults_in(watch.worker) == [0]
    watch.turn(*[1.0] * (int(KILL_SECONDS) - 1), 0.9)
    assert machine.sent == []
    watch.turn(0.2, *[1.0] * int(QUIT_SECONDS), 0.1)
    assert machine.sent == [(WORKER, signal.SIGQUIT), (WORKER, signal.SIGKILL)]


def test_a_stopped_worker_is_killed_at_once_after_a_fault(watch, machine):
    machine.states[WORKER] = psutil.STATUS_STOPPED
    watch.hub.send({"ready": True})
    watch.turn(1.0)
    watch.hub.send({"fault": CAUSE})
    watch.turn(0.1)
    assert machine.sent == [(WORKER, signal.SIGKILL)]


@pytest.mark.parametrize("has_spoken", [True, False])
def test_a_guardian_speaks_for_a_worker_that_could_not(watch, tmp_path, capfd, has_spoken):
    file = tmp_path / "run.json"
    file.write_text('{"status": "running"}')
    watch.hub.send({"ready": True})
    watch.hub.send({"fault": CAUSE})
    watch.turn(0.1)
    say(watch.worker, Position("rollout", record=str(file)))
    if has_spoken:
        watch.worker.send({"bye": True})
    watch.hang_up()
    watch.guardian._leave()
    record = json.loads(file.read_text())
    assert record["status"] == ("running" if has_spoken else "failed")
    assert has_spoken or record["result"] == {"error": "RunFailedError: rank 0 was killed"}
    assert ("finetune stops: rank 0 was killed\n" in capfd.readouterr().err) != has_spoken


@pytest.fixture
def dog(monkeypatch):
    """The worker's side. `told` are its messages to the guardian."""
    monkeypatch.setattr(Watchdog, "_connect", lambda *_: None)
    monkeypatch.setattr(watchdog.signal, "getsignal", lambda number: print)  # leave SIGQUIT as it is
    made = Watchdog(rank=1, world_size=2, master_addr="127.0.0.1", broadcast=print, last_words=print)
    made.told = []
    monkeypatch.setattr(made, "_tell", lambda message, **_: made.told.append(message))
    return made


def test_a_rank_tells_its_first_error_in_one_short_line(dog):
    dog.fail(f"DataError: row 7\n  is no conversation {'x' * 500}")
    dog.fail("ValueError: another")
    ((_, line),) = dog.told[0].items()
    assert len(dog.told) == 1
    assert line.startswith("DataError: row 7 is no conversation xxx")
    assert (len(line), line[-1]) == (400, "…")


def test_an_error_is_reported_elsewhere_if_another_rank_had_the_same_one_first(dog):
    dog.fail("DataError: row 7")
    dog._has_fault.set()
    for rank, error, expected in ((0, "DataError: row 7", True), (1, "DataError: row 7", False), (0, "x", False)):
        dog._fault = Fault(rank=rank, summary="", error=error)
        assert dog.is_reported_elsewhere == expected


def test_a_rank_counts_as_waiting_after_an_error_in_a_collective(dog):
    dog.enter_phase("training", 3)
    with dog.waiting("sum"):
        pass
    with pytest.raises(OSError, match="closed"), dog.waiting("sum"):
        raise OSError("closed")
    assert [message["position"]["waiting"] for message in dog.told] == [None, "sum", None, "sum"]
    with pytest.raises(OSError, match="late"), dog.deadline(5.0, "a tool hangs", "run.json"):
        raise OSError("late")
    assert [message["position"]["limit"] for message in dog.told[-2:]] == [5.0, None]


def test_a_forked_child_does_not_say_goodbye_for_its_parent(dog, monkeypatch):
    waited = []
    dog._released = SimpleNamespace(wait=waited.append)
    with monkeypatch.context() as in_child:
        in_child.setattr(dog, "_pid", 0)
        dog.close()
    assert (dog.told, waited) == ([], [])
    dog.close()
    assert (dog.told, len(waited)) == ([{"bye": True}], 1), "until the guardian has told the others"


@pytest.mark.parametrize(
    ("lines", "has_left", "faults"),
    [
        (b"", False, [lost_rank(1, Position(), "")]),
        (b"", True, []),
        (f"{json.dumps({'fault': CAUSE})}\n".encode(), True, [Fault(**CAUSE)]),
    ],
)
def test_a_rank_ends_without_its_guardian_and_with_a_fault_that_it_tells(dog, monkeypatch, lines, has_left, faults):
    ended = []
    monkeypatch.setattr(dog, "_end_with", ended.append)
    dog._guardian = SimpleNamespace(stdin=BytesIO(), stdout=BytesIO(lines), wait=lambda: None)
    if has_left:
        dog._closed.set()
    dog._listen()
    assert ended == faults
