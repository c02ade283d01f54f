"""Something goes wrong on one rank, for real: every process is gone within 15 seconds, and says which rank it was."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from finetune.distributed.guardian.faults import (
    GRACE_SECONDS,
    LOST_SECONDS,
    SECOND_HAND_SECONDS,
    START_SECONDS,
    Position,
    describe_late,
)
from finetune.distributed.guardian.hub import _HELLO_SECONDS, _MOST_UNAUTHENTICATED, Hub, hello
from finetune.distributed.guardian.link import Link, Peer
from finetune.errors import Fault
from tests.launches import REPOSITORY, alive_with, wait_until
from tests.scenes import Scenes

WORKER = Path(__file__).with_name("watched_worker.py")
PROMISED_SECONDS = 15.0
LONGER_THAN_GRACE = GRACE_SECONDS + 1.0
KILLED = -signal.SIGKILL
LAUNCHER = """
import json, subprocess, sys
processes = [subprocess.Popen(command) for command in json.loads(sys.argv[1])]
[process.wait() for process in processes]
"""
IN_THE_BACKGROUND = ["sh", "-c", "trap '' INT QUIT; exec \"$@\"", "sh"]
"""Starts a command as a script starts a job with `&`: both signals of the keyboard are ignored."""


class Play:
    """Ranks as processes of this test; each has a part to play, see `watched_worker.py`."""

    def __init__(self, folder, world_size):
        self.folder = folder
        self.world_size = world_size
        self.ranks = {}
        self.starter = []
        self.began = time.monotonic()
        # Inherited by the guardians, which have nothing of this play in their command lines.
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "WATCHED_PLAY": str(folder)}

    def command(self, rank, part, **options):
        words = [f"{key}={value}" for key, value in options.items()]
        return [sys.executable, str(WORKER), str(self.folder), str(rank), str(self.world_size), part, *words]

    def start(self, *parts, first_rank=0, **options):
        """Start one rank for each part; a part may be a pair of its name and options of its own."""
        for rank, part in enumerate(parts, start=first_rank):
            name, own = part if isinstance(part, tuple) else (part, {})
            self.start_process(rank, self.command(rank, name, **options | own))
        return self

    def start_process(self, rank, command):
        with (self.folder / f"stderr-{rank}").open("w") as stderr:
            self.ranks[rank] = subprocess.Popen(
                [*self.starter, *command], env=self.environment, stderr=stderr, cwd=self.folder
            )

    def wait_for(self, name):
        wait_until((self.folder / name).exists, name, 20.0)
        return (self.folder / name).read_text()

    def let_go(self, name):
        """Let ranks go on that wait for a file of this name."""
        (self.folder / f".{name}").write_text("true")
        (self.folder / f".{name}").rename(self.folder / name)

    def pid(self, rank, whose="worker"):
        return json.loads(self.wait_for(f"pids-{rank}"))[whose]

    def wait_for_all(self):
        """Every guardian is connected, and the hub knows where each worker is."""
        for rank in range(self.world_size):
            self.pid(rank)
        time.sleep(2.0)  # they tell each other once a second
        self.began = time.monotonic()

    def end(self, within=PROMISED_SECONDS):
        """Wait until all is over; the exit codes in order of rank."""
        end = self.began + within
        codes = [process.wait(max(0.1, end - time.monotonic())) for _, process in sorted(self.ranks.items())]
        wait_until(lambda: not self.left(), "the end of all", end - time.monotonic())
        self.seconds = time.monotonic() - self.began
        return codes

    def left(self):
        """Processes of this play that are still there, guardians and children too."""
        return alive_with("WATCHED_PLAY", str(self.folder))

    def last_lines(self, ranks=None):
        texts = [(self.folder / f"stderr-{rank}").read_text() for rank in (self.ranks if ranks is None else ranks)]
        return {text.splitlines()[-1] if text else "" for text in texts}

    def stop(self):
        """End what a failed test left; after a good one there is nothing."""
        for process in self.left():
            process.kill()
        for process in self.ranks.values():
            process.wait()


SCENES = Scenes(at_a_time=10)
"""All of them wait most of the time, the first two longest."""


def scene(world_size):
    """Add a scene of this many ranks; one of them shows the promise."""

    def add(act):
        act.world_size = world_size
        marks = [pytest.mark.promise] if act.__name__ == "an_exception_on_one_rank" else []
        return SCENES.add(act, *marks)

    return add


@pytest.fixture(scope="module")
def scenes(request, tmp_path_factory):
    with SCENES.running(request, tmp_path_factory, lambda folder, act: Play(folder, act.world_size)) as started:
        yield started


def the_only(lines):
    assert len(lines) == 1, lines
    return lines.pop()


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


@scene(world_size=3)
def a_rank_that_never_comes_is_named(play):
    play.start("leave", "leave")
    assert play.end(25) == [2, 2]
    for line in play.last_lines():
        assert line.startswith(
            "LaunchError: The ranks cannot watch over each other: no guardian of rank 2 reached the guardian of "
            "rank 0 at 127.0.0.1 port "
        )
        assert "firewall" in line


@scene(world_size=2)
def a_hub_that_cannot_be_reached_is_named(play):
    (play.folder / "share").write_text(json.dumps([{"addresses": ["127.0.0.1"], "port": 1, "token": "x"}, ""]))
    play.start("leave", first_rank=1)
    assert play.end(25) == [2]
    line = the_only(play.last_lines())
    assert "rank 1 could not reach the guardian of rank 0 at port 1 within 15 s (127.0.0.1: " in line
    assert "Connection refused" in line
    assert "firewall" in line


@scene(world_size=3)
def an_exception_on_one_rank(play):
    play.start("wait_in_sum", "fail", "wait_in_sum")
    assert play.end() == [3, 2, 3]
    line = "finetune stops: rank 1 failed during evaluation, step 40: DataError: row 7 is no conversation"
    assert the_only(play.last_lines()) == line
    assert json.loads((play.folder / "last-words-0").read_text()) == line.removeprefix("finetune stops: ")


@scene(world_size=2)
def a_killed_process_that_is_rank_0(play):
    play.start("wait_in_sum", "wait_in_sum")
    play.wait_for_all()
    kill(play.pid(0))
    assert play.end() == [KILLED, 3]
    line = the_only(play.last_lines())
    assert line.startswith("finetune stops: rank 0 was killed during training, step 12: process ")
    assert play.seconds < 6


@scene(world_size=3)
def the_cause_is_named_and_not_who_spoke_first(play):
    play.start("wait_in_sum", "hang", ("fail_at_second_hand", {"after": "go"}))
    play.wait_for_all()
    play.let_go("go")
    time.sleep(0.3)
    kill(play.pid(1))
    assert play.end() == [3, KILLED, 3]
    assert "rank 1 was killed during training, step 12" in the_only(play.last_lines())


@scene(world_size=2)
def an_error_in_a_collective_is_named_where_no_other_cause_is_found(play):
    play.start("wait_in_sum", "fail_at_second_hand")
    assert play.end() == [3, 3]
    assert the_only(play.last_lines()).endswith("rank 1 failed during training, step 12: connection closed by peer")


@scene(world_size=2)
def a_stopped_process(play):
    play.start("wait_in_sum", "hang")
    play.wait_for_all()
    kill(play.pid(1), signal.SIGSTOP)
    assert play.end() == [3, KILLED]
    assert the_only(play.last_lines()).startswith(
        "finetune stops: rank 1 is stopped (SIGSTOP) during training, step 12"
    )


@scene(world_size=3)
def a_hang_names_the_rank_that_the_others_wait_for(play):
    play.start("wait_in_sum", "hang", "wait_in_sum", step_timeout=2)
    assert play.end() == [3, 3, 3]
    assert re.fullmatch(
        r"finetune stops: rank 1 has been in training, step 12, for \d s while ranks 0, 2 wait for it in sum: "
        "the step timeout is 2 s",
        the_only(play.last_lines()),
    )


@scene(world_size=2)
def a_hang_that_no_thread_of_the_process_could_notice(play):
    play.starter = IN_THE_BACKGROUND
    play.start("wait_in_sum", ("hold_all_threads", {"seconds": 40}), step_timeout=2)
    assert play.end() == [3, 3]
    assert "rank 1 has been in training, step 12" in the_only(play.last_lines())


@scene(world_size=2)
def a_long_c_call_is_not_taken_for_a_stopped_process(play):
    play.start(*[("hold_all_threads", {"seconds": 6})] * 2)
    assert play.end() == [0, 0]
    assert play.last_lines() == {""}


@scene(world_size=2)
def a_killed_guardian_of_rank_0(play):
    play.start("wait_in_sum", "wait_in_sum")
    play.wait_for_all()
    kill(play.pid(0, "guardian"))
    assert play.end() == [3, 3]
    assert the_only(play.last_lines()) == (
        "finetune stops: rank 0 was lost during training, step 12: its guardian process was killed, alone or "
        "with its worker"
    )


@scene(world_size=2)
def a_rank_may_leave_before_the_others(play):
    play.start("leave_when_told", "leave", step_timeout=1)
    play.ranks[1].wait(10)
    wait_until(lambda: len(play.left()) == 2, "the end of its guardian", 3)
    time.sleep(LONGER_THAN_GRACE)
    assert play.ranks[0].poll() is None, "nobody is missed who has said goodbye"
    play.let_go("leave-now")
    assert play.end() == [0, 0]
    assert play.last_lines() == {""}


@scene(world_size=3)
def rank_0_may_leave_first_and_the_others_are_still_watched(play):
    play.start("leave_and_live_on", "hang", "wait_in_sum")
    play.wait_for("left-0")
    play.wait_for_all()
    kill(play.pid(1))
    assert play.ranks[2].wait(PROMISED_SECONDS) == 3
    assert play.ranks[0].poll() is None, "what happens after rank 0 has left does not touch it"
    play.let_go("leave-now")
    assert play.end() == [0, KILLED, 3]
    assert "rank 1 was killed during training, step 12" in the_only(play.last_lines([1, 2]))
    assert play.last_lines([0]) == {""}


@scene(world_size=2)
def a_forked_child_neither_speaks_for_its_parent_nor_hides_its_death(play):
    play.start("wait_in_sum", ("fork_a_data_loader", {"seconds": 1.5}))
    play.wait_for("is-settled")
    play.wait_for_all()
    kill(play.pid(1))
    assert play.end() == [3, KILLED], "and the child does not live on"
    assert "rank 1 was killed during training, step 12" in the_only(play.last_lines())


@scene(world_size=2)
def a_worker_without_stdin_stdout_and_stderr(play):
    """A pipe with the number of one of them would be written into by whoever prints."""
    play.start("leave_when_told", "leave_when_told", streams="closed")
    play.wait_for_all()
    time.sleep(LONGER_THAN_GRACE)
    play.let_go("leave-now")
    assert play.end() == [0, 0]


@scene(world_size=2)
def a_job_that_is_stopped_as_a_whole_goes_on_later(play):
    commands = [play.command(rank, "leave_when_told", launched="yes") for rank in (0, 1)]
    play.start_process(0, [sys.executable, "-c", LAUNCHER, json.dumps(commands)])
    play.wait_for_all()
    job = [play.ranks[0].pid, play.pid(0), play.pid(1)]
    for pid in job:
        kill(pid, signal.SIGSTOP)
    time.sleep(7)
    for pid in job:
        kill(pid, signal.SIGCONT)
    play.let_go("leave-now")
    assert play.end() == [0]
    assert play.last_lines() == {""}


def send_and_wait_for_the_end(port, data):
    """Whether the hub hangs up on this."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(data)
            return connection.recv(100) == b""
        except ConnectionError:
            return True


@scene(world_size=2)
def peers_without_the_token_are_disconnected(play):
    play.start("leave")
    hub = json.loads(play.wait_for("share"))[0]
    letters = [
        b"GET / HTTP/1.1\r\nHost: localhost:8000\r\n\r\n",
        os.urandom(3000),
        b"x" * 5_000_000,
        hello("0" * 32, 1),
        hello(hub["token"], 2),
        hello(hub["token"], 0),
        hello(hub["token"], 1).replace(b"00000001", b"\xb9      1"),
    ]
    for letter in letters:
        assert send_and_wait_for_the_end(hub["port"], letter), letter[:50]
    # More than the hub keeps: the oldest ones make room.
    silent = [socket.create_connection(("127.0.0.1", hub["port"])) for _ in range(200)]
    play.start("leave", first_rank=1)
    assert play.end() == [0, 0]
    assert play.last_lines() == {""}
    for connection in silent:
        connection.close()


@scene(world_size=2)
def a_flood_before_the_token(play):
    """Connections that never end to send: the hub reads no more than a short line of each, and keeps its pace."""
    play.start("leave")
    hub = json.loads(play.wait_for("share"))[0]
    is_over = threading.Event()

    def send_without_end(data):
        while not is_over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", hub["port"]), timeout=10) as connection:
                while not is_over.is_set():
                    connection.sendall(data)
                    time.sleep(0.01)

    floods = [threading.Thread(target=send_without_end, args=(data,)) for data in (b"x" * 64, b" ", b"{}\n" * 50_000)]
    for flood in floods:
        flood.start()
    try:
        time.sleep(1.0)
        (guardian,) = psutil.Process(play.ranks[0].pid).children()
        used = guardian.memory_info().rss
        time.sleep(2.0)
        assert guardian.memory_info().rss - used < 10_000_000
        play.start("leave", first_rank=1)
        assert play.end() == [0, 0]
    finally:
        is_over.set()
        for flood in floods:
            flood.join()
    assert play.last_lines() == {""}


@scene(world_size=2)
def a_rank_that_the_hub_had_no_room_for_tries_again(play):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        place = {"addresses": ["127.0.0.1"], "port": listener.getsockname()[1], "token": "x"}
        (play.folder / "share").write_text(json.dumps([place, ""]))
        play.start("leave", first_rank=1)
        for _ in range(3):
            listener.accept()[0].close()
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b'\n{"ready": true}\n')
            assert play.end() == [0]
    assert play.last_lines() == {""}


@scene(world_size=2)
def garbage_with_the_token_ends_in_a_sentence(play):
    play.start("leave_when_told")
    hub = json.loads(play.wait_for("share"))[0]
    with socket.create_connection(("127.0.0.1", hub["port"]), timeout=10) as connection:
        connection.sendall(hello(hub["token"], 1))
        play.pid(0)  # it is ready
        connection.sendall(b'{"position": {"phase": 7, "age": "old"}}\n')
        assert play.end() == [3]
    assert the_only(play.last_lines()) == (
        "finetune stops: rank 1 was lost during set-up: its guardian process sent a message that cannot be read "
        "(ValueError)"
    )


@pytest.mark.parametrize(
    "garbage",
    [b"\x80\n", b"[1, 2]\n", b"\n", b"[" * 30_000 + b"\n", b"x" * 70_000],
    ids=["not-utf-8", "a-list", "empty", "deep", "long"],
)
def test_a_link_refuses_what_is_no_line_of_an_object(garbage):
    near, far = socket.socketpair()
    with near, far:
        link = Link(near.fileno(), near.fileno())
        far.sendall(garbage)
        with pytest.raises(ValueError, match=r"."):
            receive_all(link)


def test_a_link_whose_reader_is_slow_keeps_whole_messages_and_not_all_of_them():
    near, far = socket.socketpair()
    with near, far:
        link, reader = Link(near.fileno(), near.fileno()), Link(far.fileno(), far.fileno())
        for number in range(100):
            link.send({"number": number, "text": "x" * 50_000})
        received = []
        while messages := reader.receive():
            received += messages
            link.send()
        assert received == [{"number": number, "text": "x" * 50_000} for number in range(len(received))]
        assert 2 < len(received) < 50


def test_a_position_of_other_types_ends_the_connection_in_a_sentence():
    near, far = socket.socketpair()
    with near, far:
        far.sendall(b'{"position": {"phase": 7, "age": "old"}}\n')
        peer = Peer(near)
        assert peer.hear(0.0) == []
        assert peer.end == "sent a message that cannot be read (ValueError)"


def receive_all(link):
    while True:
        link.receive()


class Guardians:
    """A hub in this process, at whatever time a test says, and the connections of the guardians."""

    def __init__(self, world_size):
        settings = {"world_size": world_size, "step_timeout_seconds": None, "listen": "127.0.0.1"}
        self.hub = Hub(settings)
        self.peers = [self.hub.start({"addresses": ["127.0.0.1"]})]

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.hub.port), timeout=5)

    def connect_all(self):
        for rank in range(1, self.hub._world_size):
            connection = self.connect()
            connection.sendall(hello(self.hub.token, rank))
            self.hub.turn(0.0, is_beat=False)
            assert connection.recv(1) == b"\n"
            self.peers.append(Peer(connection))
        assert self.heard() == [[{"ready": True}]] * self.hub._world_size

    def heard(self):
        return [peer.hear(0.0) for peer in self.peers]

    def fault_at(self, now):
        self.hub.turn(now, is_beat=False)
        return self.hub.fault


@pytest.fixture
def guardians():
    made = []

    def make(world_size):
        made.append(Guardians(world_size))
        return made[-1]

    yield make
    for each in made:
        for peer in (*each.peers, *each.hub.peers.values()):
            peer.connection.close()
        if each.hub._listener is not None:
            each.hub._listener.close()


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_a_hub_keeps_silent_connections_for_a_while_and_not_too_many(guardians):
    there = guardians(2)
    most = _MOST_UNAUTHENTICATED + 2
    silent = [there.connect() for _ in range(most + 1)]
    for _ in range(2):
        there.hub.turn(1.0, is_beat=False)
    assert [is_open(connection) for connection in silent] == [False] + [True] * most
    there.hub.turn(1.0 + _HELLO_SECONDS, is_beat=False)
    assert is_open(silent[-1])
    there.hub.turn(1.1 + _HELLO_SECONDS, is_beat=False)
    assert not any(map(is_open, silent))
    for connection in silent:
        connection.close()


def test_a_hub_admits_each_missing_rank_once_and_only_with_the_token(guardians):
    there = guardians(3)
    token = there.hub.token
    letters = [hello(token, rank) for rank in (1, 1, 0, 3)] + [hello("0" * 32, 2)]
    connections = [there.connect() for _ in letters]
    for connection, letter in zip(connections, letters, strict=True):
        connection.sendall(letter)
        there.hub.turn(0.0, is_beat=False)
    assert [is_open(connection) for connection in connections] == [True, False, False, False, False]
    assert set(there.hub.peers) == {0, 1}
    for connection in connections:
        connection.close()


def test_guardians_that_do_not_come_in_time_are_named(guardians):
    there = guardians(4)
    there.peers[0].send({})  # a sign of life
    assert there.fault_at(START_SECONDS) is None
    assert str(there.fault_at(START_SECONDS + 0.1)).startswith("no guardian of ranks 1, 2, 3 reached the guardian of")


def test_a_guardian_that_is_silent_or_gone_is_lost(guardians):
    for ends, reason in ((False, "cannot be reached during set-up: "), (True, "was lost during set-up: its guardian")):
        there = guardians(3)
        there.connect_all()
        for peer in there.peers[:2]:
            peer.send({"position": vars(Position())})
        there.hub.turn(LOST_SECONDS, is_beat=True)
        assert there.hub.fault is None
        assert there.heard() == [[{"position": vars(Position())}]] * 3, "a sign of life"
        if ends:
            there.peers[2].connection.close()
        fault = there.fault_at(LOST_SECONDS if ends else LOST_SECONDS + 0.1)
        assert (fault.rank, str(fault).startswith(f"rank 2 {reason}")) == (2, True), fault
        assert there.peers[1].hear(0.0) == [{"fault": fault}]


def test_an_error_at_second_hand_is_taken_if_no_other_comes_soon(guardians):
    second = {"rank": 1, "summary": "rank 1 failed", "error": "closed by peer", "is_second_hand": True}
    cause = {"rank": 2, "summary": "rank 2 was killed"}
    for others in ([], [cause]):
        there = guardians(3)
        there.connect_all()
        for rank in (1, 2):
            there.peers[rank].send({"fault": second | {"rank": rank}})
            assert there.fault_at(1.0) is None
        for fault in others:
            there.peers[2].send({"fault": fault})
        if not others:
            assert there.fault_at(0.9 + SECOND_HAND_SECONDS) is None
        expected = cause if others else second | {"is_second_hand": False}
        assert there.fault_at(1.0 + SECOND_HAND_SECONDS) == Fault(**expected)
        assert there.heard() == [[{"fault": Fault(**expected)}]] * 3


def test_a_step_that_takes_longer_than_its_limit_is_a_fault(guardians):
    there = guardians(2)
    there.connect_all()
    there.peers[1].send({"position": vars(Position("training", 12, timed=True, age=31.0))})
    assert there.fault_at(1.0) is None, "there is no limit"
    there.hub._step_timeout = 30.0
    assert there.fault_at(1.0).rank == 1


def test_a_rank_that_said_goodbye_is_not_missed(guardians):
    there = guardians(3)
    there.connect_all()
    for rank, news in ((1, []), (0, [{"left": True}])):
        there.peers[rank].send({"bye": True})
        assert there.fault_at(1.0) is None
        assert there.peers[2].hear(0.0) == news
    assert list(there.hub.peers) == [2]
    assert there.fault_at(LOST_SECONDS + 0.1).rank == 2


@pytest.mark.slow
@pytest.mark.parametrize("act", SCENES.params)
def test_scene(scenes, act):
    scenes[act].result()


def position(**values):
    return Position(**{"phase": "training", "step": 12, "timed": True, "age": 31.0} | values)


def test_who_is_waited_for_in_a_phase_without_limit_is_not_late():
    saving = position(phase="saving", timed=False)
    assert describe_late({0: saving, 1: position(waiting="barrier"), 2: position(waiting="barrier")}, 30) is None
    assert describe_late({0: position(age=3.0), 1: position(waiting="barrier")}, 30) is None, "it moves"
    assert describe_late({0: position(age=29.0), 1: position(age=29.0)}, 30) is None


def test_all_late_ranks_are_named():
    fault = describe_late({0: position(), 1: position(phase="data", step=13), 2: position(waiting="sum")}, 30)
    assert fault.rank is None, "there are two"
    assert describe_late({0: position(waiting="sum"), 1: position()}, 30).rank == 1
    assert str(fault) == (
        "rank 0 has been in training, step 12, for 31 s; rank 1 has been in data, step 13, for 31 s "
        "while rank 2 waits for it in sum: the step timeout is 30 s"
    )


def test_ranks_that_all_wait_are_late():
    text = str(describe_late({0: position(waiting="sum"), 1: position(waiting="barrier", phase="evaluation")}, 30))
    assert text.startswith("rank 0 has waited in sum during training, step 12, for 31 s; rank 1 has waited in barrier")
    assert "and no rank is left to wait for" in text
    assert "so have 992 others" in str(describe_late({rank: position(waiting="sum") for rank in range(1000)}, 30))
