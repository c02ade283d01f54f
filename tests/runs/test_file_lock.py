from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from finetune.runs import file_lock as locks
from finetune.runs.file_lock import describe_holder, file_lock, is_held, is_held_here, try_file_lock
from tests.without_posix import locking

AS_WINDOWS = "from tests.without_posix import lock_as_windows\nlock_as_windows()\n"

HOLD = """
import sys, time
from pathlib import Path
from finetune.runs.file_lock import file_lock
with file_lock(Path(sys.argv[1]), waiting_for="the test"):
    print("held", flush=True)
    time.sleep(60)
"""
HOLD_WITH_CHILD = """
import os, sys, time
from pathlib import Path
from finetune.runs.file_lock import file_lock
with file_lock(Path(sys.argv[1]), waiting_for="the test"):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""
COUNT = """
import sys
from pathlib import Path
from finetune.runs.file_lock import file_lock
lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(25):
    with file_lock(lock, waiting_for="the counter"):
        counter.write_text(str(int(counter.read_text()) + 1))
"""


@pytest.fixture(params=["flock", "windows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the first lines of the scripts of a test, which choose the lock."""
    if request.param == "flock":
        return ""
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", types.SimpleNamespace(LK_NBLCK=2, locking=locking), raising=False)
    return AS_WINDOWS


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_one_holder_at_a_time(tmp_path: Path, way: str) -> None:
    path = tmp_path / "a.lock"
    with file_lock(path, waiting_for="it"):
        assert try_file_lock(path) is None
        assert f"process {os.getpid()} on" in describe_holder(path)
        assert is_held(path)
    assert [entry.name for entry in tmp_path.iterdir()] == (["a.lock"] if way else [])
    again = try_file_lock(path)
    assert again is not None
    again.release()
    again.release()
    assert not is_held(path)


def test_a_lost_lock_leaves_the_lock_of_the_next_holder_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.lock"
    path.parent.mkdir()
    with file_lock(path, waiting_for="it") as lock:
        assert not lock.is_lost()
        path.parent.rename(tmp_path / "moved")
        assert lock.is_lost()
        (tmp_path / "moved").rename(path.parent)
        assert not lock.is_lost()
        path.unlink()
        assert lock.is_lost()
        with file_lock(path, waiting_for="it"):
            lock.release()
            assert is_held(path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_no_other_user_may_lock_it_and_one_who_may_not_look_takes_it_for_held(tmp_path: Path) -> None:
    path, mask, user = tmp_path / "a.lock", os.umask(0), os.geteuid()
    try:
        lock = file_lock(path, waiting_for="it")
        assert path.stat().st_mode & 0o777 == 0o600
        lock.forget()
        assert not is_held(path)
        path.chmod(0)
        if user == 0:
            os.seteuid(65534)
        assert is_held(path)
    finally:
        os.seteuid(user)
        os.umask(mask)


def test_a_lock_is_held_here_while_its_holder_has_the_parent_that_started_it(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert not is_held_here(path)
    with file_lock(path, waiting_for="it"):
        written = path.read_text()
        assert is_held_here(path)
        holder = json.loads(written)
        for other in ({"host": "elsewhere"}, {"parent": os.getpid()}, {"pid": os.getppid()}):
            path.write_text(json.dumps(holder | other))
            assert not is_held_here(path), other
        path.write_text(written)
        lost = tmp_path / "lost.lock"
        path.rename(lost)
        path.write_text(written)  # nobody holds this one
        assert not is_held_here(path)
        lost.replace(path)


def test_a_long_wait_is_said_once_and_looks_twice_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    caplog.set_level(logging.INFO, "finetune.runs.file_lock")
    path, now, pauses = tmp_path / "a.lock", [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(locks, "time", types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with file_lock(path, waiting_for="it"), pytest.raises(TimeoutError, match="after 30 s"):
        file_lock(path, timeout_seconds=30, waiting_for="the data")
    assert 30 <= now[0] < 30.5
    assert max(pauses) == 0.5
    assert len(caplog.messages) == 1


@pytest.mark.process
def test_time_over_names_the_holder(
    tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("finetune"), "propagate", True)
    caplog.set_level(logging.INFO, "finetune.runs.file_lock")
    path = tmp_path / "a.lock"
    process = start(way + HOLD, path)
    try:
        assert first_line(process) == "held"
        with pytest.raises(
            TimeoutError, match=f"the data: process {process.pid} on .* still holds .*a.lock after 0.1 s"
        ):
            file_lock(path, timeout_seconds=0.1, waiting_for="the data")
        assert f"waiting for the data: process {process.pid} on" in caplog.messages[0]
    finally:
        kill(process)


@pytest.mark.process
def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    process = start(HOLD_WITH_CHILD, path)
    child = int(first_line(process))
    try:
        time.sleep(0.2)
        assert try_file_lock(path) is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.kill(child, 0)
        file_lock(path, timeout_seconds=5, waiting_for="it").release()
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


@pytest.mark.process
def test_no_turn_is_lost_between_processes(tmp_path: Path, way: str) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [start(way + COUNT, tmp_path / "a.lock", counter) for _ in range(4)]
    assert [process.wait(timeout=240) for process in processes] == [0] * 4
    for process in processes:
        process.communicate()
    assert counter.read_text() == "100"


def test_a_folder_that_is_missing_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        file_lock(tmp_path / "missing" / "a.lock", waiting_for="it")
