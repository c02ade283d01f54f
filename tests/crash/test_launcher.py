"""The launcher is killed: its workers are gone within 10 s, and the next start ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.crash import IS_FULL
from tests.crash.runs import DATA_WORKERS, Ended, Nursery, assert_same_end, explained
from tests.launches import LAUNCHERS, REPOSITORY, alive_with

PROMISED_SECONDS = 10.0
START_SECONDS = 300.0
"""Until the first checkpoint, on a busy machine: two processes import everything."""
IMPORT_SECONDS = 30.0
"""More for a worker that has not met the others yet: it sees that its launcher is gone once everything is imported."""
KILLS = 6 if IS_FULL else 1
WORDS = ["training.max_steps=24", "checkpoint.save_every=3", "checkpoint.save_total_limit=2", *DATA_WORKERS]
COMMANDS = {
    "torchrun": [*LAUNCHERS["torchrun"], "-m", "finetune", "train"],
    "num_processes": [sys.executable, "-m", "finetune", "train", "parallel.num_processes=2"],
}
_MARK = "CRASH_SWEEP"

pytestmark = [pytest.mark.slow]


class Launch:
    """A real launch of two ranks; all its processes inherit a variable by which they are found."""

    def __init__(self, command: list[str], screen: Path) -> None:
        self.screen = screen
        self._mark = f"{screen}-{time.monotonic_ns()}"
        with screen.open("w") as log:
            self.launcher = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", _MARK: self._mark},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> Ended:
        """What it has said so far."""
        return Ended([], self.screen.read_text(), 0.0)

    def left(self) -> list[psutil.Process]:
        """What is still there: workers, their guardians and data workers."""
        return alive_with(_MARK, self._mark)

    def kill_launcher(self) -> None:
        self.launcher.kill()
        self.launcher.wait()


@contextmanager
def launched(command: list[str], screen: Path) -> Iterator[Launch]:
    launch = Launch(command, screen)
    try:
        yield launch
    finally:
        launch.kill_launcher()
        for process in launch.left():
            process.kill()


@pytest.mark.parametrize("name", COMMANDS if IS_FULL else ["torchrun"])
def test_the_launcher_is_killed(nursery: Nursery, tried: Callable[..., None], name: str) -> None:
    whole = nursery.whole(*WORDS, ranks=2)
    rng = random.Random(name)
    slowest = 0.0
    seconds_to_commit = START_SECONDS
    for number in range(KILLS):
        nursery.put(None)
        begun = time.monotonic()
        with launched([*COMMANDS[name], *nursery.words, *WORDS], nursery.folder / "launched.txt") as launch:
            if number % 2 == 0:  # in the middle of training
                while not launch.said.committed:
                    assert launch.launcher.poll() is None, launch.said.screen
                    assert time.monotonic() - begun < START_SECONDS, launch.said.screen
                    time.sleep(0.01)
                seconds_to_commit = min(seconds_to_commit, time.monotonic() - begun)
                time.sleep(rng.uniform(0, 0.1))
            else:  # at any time before
                time.sleep(rng.uniform(0, seconds_to_commit))
            assert launch.launcher.poll() is None, launch.said.screen
            launch.kill_launcher()
            limit = PROMISED_SECONDS + (0.0 if "Process 0/2 started" in launch.said.screen else IMPORT_SECONDS)
            killed_at = time.monotonic()
            # A new start at once, as a scheduler would: it waits for the lock of the one that is dying.
            started = nursery.start(*WORDS, ranks=2)
            while left := launch.left():
                with explained(launch.said.screen):
                    assert time.monotonic() - killed_at < limit, left
                time.sleep(0.02)
            if limit == PROMISED_SECONDS:
                slowest = max(slowest, time.monotonic() - killed_at)
            again = nursery.end(started)
            with explained(f"{launch.said.screen}\nand then:\n{again.screen}"):
                assert again.resumed_from >= launch.said.committed
                assert_same_end(again, nursery.run, whole)
    tried(f"{KILLS} launchers killed, workers gone within {slowest:.1f} s", random_kills=KILLS, resumes=KILLS)
