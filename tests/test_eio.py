"""A disk that fails for real (EIO) while a checkpoint is saved: the earlier ones are whole, and the run goes on later.

The disk is a block device of two layers, as a thin volume on a full pool is: a small memory file system holds the image
of a disk, a file in it is the image of the disk that the run is on. Where the pool has no block left the lower disk
loses what was written, and the upper one answers the next sync with an input/output error of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.runs.folder import RunFolder
from finetune.runs.verification import newest_valid
from tests.crash import IS_FULL
from tests.crash.runs import Ended, Nursery, assert_same_end, explained

WORDS = ["training.max_steps=12", "checkpoint.save_total_limit=9", "training.log_every=1"]
TOOLS = ("mkfs.ext2", "e2fsck", "mount", "umount", "fallocate", "sync")
_MEGABYTE = 1 << 20
_STEP_KILOBYTES = 8 if IS_FULL else 40

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk that is to fail"),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS), reason=f"one of {', '.join(TOOLS)} is not installed"
    ),
]


class FailingDisk:
    """A disk of 16 MiB on a pool that has room for a part of it."""

    def __init__(self, folder: Path) -> None:
        self._pool, self._lower, self.path = (folder / name for name in ("pool", "lower", "disk"))
        for place in (self._pool, self._lower, self.path):
            place.mkdir()
        self._lower_image, self._image = self._pool / "lower.img", self._lower / "disk.img"

    def mount(self) -> None:
        """A new disk, whose pool is large."""
        tool("mount", "-t", "tmpfs", "-o", "size=48m", "none", self._pool)
        self._make(self._lower_image, 40)
        tool("mount", "-o", "loop", self._lower_image, self._lower)
        # Every block of it has its place in the lower disk: only what is written there can be lost, nothing about it.
        self._image.write_bytes(bytes(16 * _MEGABYTE))
        self._make(self._image, 16)
        tool("mount", "-o", "loop", self._image, self.path)

    def leave_room_for(self, kilobytes: int) -> None:
        """Let the pool have as much room and no more for blocks that were never used."""
        for place in (self.path, self._lower):
            tool("sync", "--file-system", place)
        tool("fallocate", "--dig-holes", self._lower_image)
        used = self._lower_image.stat().st_blocks // 2
        tool("mount", "-o", f"remount,size={used + kilobytes}k", self._pool)

    def mend(self) -> None:
        """Enlarge the pool, and start the disk again: what counts is what lies on it, not what memory holds of it."""
        tool("mount", "-o", "remount,size=48m", self._pool)
        tool("umount", self.path)
        done = subprocess.run(["e2fsck", "-fy", str(self._image)], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout
        tool("mount", "-o", "loop", self._image, self.path)

    def unmount(self) -> None:
        """Take all of it away; safe to call twice."""
        for place in (self.path, self._lower, self._pool):
            while os.path.ismount(place):
                tool("umount", place)

    @staticmethod
    def _make(image: Path, megabytes: int) -> None:
        with image.open("ab") as file:
            file.truncate(megabytes * _MEGABYTE)
        tool("mkfs.ext2", "-q", "-F", "-m", "0", image)


def tool(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("eio"))
    yield nursery
    nursery.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    disk = FailingDisk(tmp_path)
    try:
        disk.mount()
    except OSError as error:
        disk.unmount()
        pytest.skip(f"no disk in two layers can be made here: {error}")
    yield disk
    disk.unmount()


def assert_told(ended: Ended, folder: RunFolder) -> None:
    """One line with the path, the reason and the room there, and no traceback."""
    assert ended.status == 3, ended.screen
    assert "Traceback" not in ended.screen, ended.screen
    told = [line for line in ended.screen.splitlines() if line.startswith("finetune: RunFailedError")]
    assert len(told) == 1, ended.screen
    assert str(folder.path) in told[0]
    assert "Input/output error (EIO)" in told[0]
    assert "bytes are free there" in told[0]
    assert "resume=auto" in told[0]


def test_a_disk_that_fails(nursery: Nursery, disk: FailingDisk, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(disk.path / "run")
    nursery.run = folder.path
    words = [*WORDS, f"output_dir={folder.path}"]
    ended = nursery.train(*words)
    assert ended.status == 0, ended.screen
    whole = nursery.keep("whole")
    disk.unmount()

    committed = []
    for room in range(32, 16 << 10, _STEP_KILOBYTES):
        disk.mount()
        disk.leave_room_for(room)
        ended = nursery.train(*words)
        if ended.status == 0:
            break  # there is room for all of it
        with explained(f"{room} KiB"):
            assert_told(ended, folder)
            disk.mend()
            if ended.committed:
                newest = newest_valid(folder)
                assert newest is not None
                assert newest >= folder.checkpoint(ended.committed)
            again = nursery.train(*words)
            assert again.resumed_from >= ended.committed
            assert_same_end(again, folder.path, whole)
            committed.append(ended.committed)
        disk.unmount()
    assert len(set(committed)) >= (4 if IS_FULL else 2), f"the disk failed in few places: behind steps {committed}"
    with capsys.disabled():
        sys.stdout.write(f"\n{len(committed)} places of EIO, behind steps {sorted(set(committed))}: none lost\n")
