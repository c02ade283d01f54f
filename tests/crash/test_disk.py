"""A disk that is full or became read-only ends the run in one line, and what was committed before stays whole."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune.runs.folder import RunFolder
from finetune.runs.verification import newest_valid
from tests.crash import IS_FULL
from tests.crash.runs import Ended, Nursery, assert_same_end, explained

PAGE_KILOBYTES = 4
EVERY = 1 if IS_FULL else 17
WORDS = ["training.max_steps=12", "checkpoint.save_total_limit=9", "training.log_every=1"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount the small disks that are to be filled"),
]


@pytest.fixture
def disk(nursery: Nursery) -> Iterator[Path]:
    """A folder on which a test mounts a small disk; what is mounted there is taken away at the end."""
    folder = nursery.folder / "disk"
    folder.mkdir(exist_ok=True)
    yield folder
    unmount(folder)


def mount(folder: Path, kilobytes: int) -> None:
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")


def remount(folder: Path, option: str) -> subprocess.CompletedProcess[str]:
    command = ["mount", "-o", f"remount,{option}", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def unmount(folder: Path) -> None:
    while os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def assert_ended_by_the_disk(ended: Ended, folder: RunFolder, symbol: str) -> None:
    assert ended.status == 3, ended.screen
    assert "Traceback" not in ended.screen, ended.screen
    told = [line for line in ended.screen.splitlines() if line.startswith("finetune: RunFailedError")]
    assert len(told) == 1, ended.screen
    assert str(folder.path) in told[0]
    assert f"({symbol})" in told[0]
    assert "bytes are free there" in told[0]
    if ended.committed:
        assert newest_valid(folder) == folder.checkpoint(ended.committed)


def test_a_disk_that_fills_up(nursery: Nursery, disk: Path, tried: Callable[..., None]) -> None:
    folder = RunFolder(disk / "run")
    words = [*WORDS, f"output_dir={folder.path}"]
    mount(disk, 8 << 10)
    ended = nursery.train(*words)
    assert ended.status == 0, ended.screen
    used = sum(file.stat().st_blocks * 512 for file in disk.rglob("*")) >> 10
    nursery.run, kept = folder.path, nursery.run
    whole = nursery.keep("on-disk")
    nursery.run = kept
    unmount(disk)

    full = 0
    steps = set()
    sizes = range(PAGE_KILOBYTES, used + 64, PAGE_KILOBYTES * EVERY)
    for size in sizes:
        mount(disk, size)
        ended = nursery.train(*words)
        with explained(f"{size} KiB"):
            if ended.status != 0:
                full += 1
                steps.add(ended.committed)
                assert_ended_by_the_disk(ended, folder, "ENOSPC")
            assert remount(disk, "size=8m").returncode == 0
            again = nursery.train(*words)
            assert again.resumed_from >= ended.committed
            assert_same_end(again, folder.path, whole)
        unmount(disk)
    assert len(steps) >= (5 if IS_FULL else 3), "the disk filled up in few places"
    tried(
        f"{full} sizes of a disk at which it filled up, behind steps {sorted(steps)}; all went on once there was room",
        resumes=len(sizes),
    )


def test_a_disk_that_became_read_only(nursery: Nursery, disk: Path) -> None:
    """Only the checkpoints lie on it: the system refuses to take a disk from files that are being written."""
    folder = RunFolder(disk / "run")
    folder.checkpoints.mkdir(parents=True)
    mount(folder.checkpoints, 8 << 10)
    words = ["training.max_steps=60", f"output_dir={folder.path}"]
    started = nursery.start(*words)
    screen = started.screen
    deadline = time.monotonic() + 30
    while not (screen.exists() and "committed step=4" in screen.read_text()) and time.monotonic() < deadline:
        time.sleep(0.005)
    while remount(folder.checkpoints, "ro").returncode and time.monotonic() < deadline:
        time.sleep(0.005)  # busy: a checkpoint is just being written
    ended = nursery.end(started)
    try:
        assert ended.committed >= 4
        assert_ended_by_the_disk(ended, folder, "EROFS")
        assert remount(folder.checkpoints, "rw").returncode == 0
        again = nursery.train(*words)
        assert again.status == 0, again.screen
        assert again.resumed_from >= ended.committed
    finally:
        unmount(folder.checkpoints)
