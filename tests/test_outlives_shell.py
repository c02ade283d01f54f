"""What becomes of a run when its shell exits or its terminal is closed: with nohup it goes on, without it is saved."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launches import REPOSITORY, is_alive, wait_until
from tests.tiny_runs import random_model_words, write_base, write_rows

NUM_STEPS = 100
"""Some seconds of work: far more than it takes to close a terminal."""
LIMIT_SECONDS = 300.0
PREEMPTED = 75
_WITH_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("bash", "nohup", "ps"))), reason="there is no bash, nohup or ps"),
]


class Terminal:
    """A pseudo-terminal with a program that it controls, as a window on a screen or an SSH connection has."""

    def __init__(self, command: list[str]) -> None:
        self._master, slave = pty.openpty()
        self.screen = b""
        self._is_read = True
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WITH_A_TERMINAL, *command], stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def type(self, line: str) -> None:
        """A line of the keyboard."""
        os.write(self._master, line.encode() + b"\n")

    def hang_up(self) -> None:
        """Close the window, or cut the connection. Safe to call twice."""
        if self._is_read:
            self._is_read = False
            self._reader.join()
            os.close(self._master)

    def _read(self) -> None:
        """A terminal that shows nothing would stop who writes to it."""
        while self._is_read:
            if select.select([self._master], [], [], 0.05)[0]:
                try:
                    self.screen += os.read(self._master, 1 << 16)
                except OSError:  # nobody has it open any more
                    time.sleep(0.05)


class Run:
    """A run that is started in a terminal, seen through the files that it leaves."""

    def __init__(self, inputs: Path, folder: Path) -> None:
        self.folder = folder / "run"
        self.log = folder / "nohup.out"
        self.pid_file = folder / "pid"
        words = [
            *("task=finetune_lora", *random_model_words(inputs / "tokenizer"), f"output_dir={self.folder}"),
            *(f"data.path={inputs / 'rows'}", f"data.cache_dir={inputs / 'cache'}", "training.device=cpu"),
            *("training.batch_size=2", "training.global_batch_size=4", f"training.max_steps={NUM_STEPS}"),
            *("checkpoint.save_every=50", "checkpoint.save_every_epochs=null", "testing.num_samples=0"),
            "validation.validate_every=50",
        ]
        self.command = [sys.executable, "-m", "finetune", "train", *words]

    @property
    def step(self) -> int:
        """The last step that was told."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return max((event["step"] for event in events if event["event"] == "step"), default=0)

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_text()))

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def process(self) -> psutil.Process:
        wait_until(lambda: self.pid_file.exists() and self.pid_file.read_text().endswith("\n"), "its process id")
        return psutil.Process(int(self.pid_file.read_text()))

    def is_saved(self, step: int) -> bool:
        return (self.folder / f"checkpoints/step-{step:06d}/manifest.json").exists()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "tokenizer")
    write_rows(folder / "rows", validation=2, test=0)
    return folder


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Iterator[Run]:
    run = Run(inputs, tmp_path)
    yield run
    if run.pid_file.exists():
        with suppress(psutil.Error, ValueError):
            left = psutil.Process(int(run.pid_file.read_text()))
            for process in [*left.children(recursive=True), left]:
                process.kill()


@pytest.fixture
def open_terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_one(*command: str) -> Terminal:
        opened.append(Terminal(list(command) or ["bash", "--norc", "--noprofile", "-i"]))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.hang_up()
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait()


def has_terminal(process: psutil.Process) -> bool:
    """Whether it has a controlling terminal. psutil knows only the terminals of the time when it was first asked."""
    printed = subprocess.run(["ps", "-o", "tty=", "-p", str(process.pid)], capture_output=True, text=True, check=True)
    return "/" in printed.stdout or "tty" in printed.stdout


def start_in_background(run: Run, shell: Terminal, before: str, *words: str) -> psutil.Process:
    """What a user types; the run is training when this returns."""
    command = " ".join([before, shlex.join([*run.command, *words]), f"> {run.log} 2>&1 &"])
    for part in (command.strip(), f"echo $! > {run.pid_file}"):
        shell.type(part)
    process = run.process()
    wait_until(lambda: run.step > 0 or not process.is_running(), "its first step", told=run.text)
    assert has_terminal(process), "it should have the terminal that is to go"
    return process


def assert_completes(run: Run, process: psutil.Process) -> None:
    assert run.step < NUM_STEPS, "it was over before anything happened to its shell"
    wait_until(lambda: not is_alive(process), "its end", told=run.text)
    assert run.record["status"] == "completed", run.text()
    assert run.step == NUM_STEPS
    assert run.is_saved(NUM_STEPS)
    assert (run.folder / "adapter/adapter_model.safetensors").exists()
    assert "Traceback" not in run.text(), run.text()


def test_with_nohup_it_outlives_its_terminal(run: Run, open_terminal: Callable[..., Terminal]) -> None:
    """The shell passes the hang-up on to its jobs; the launcher of a local spawn must not end its workers then."""
    shell = open_terminal()
    process = start_in_background(run, shell, "nohup")
    shell.hang_up()
    shell.process.wait(LIMIT_SECONDS)
    assert_completes(run, process)


def test_without_nohup_a_closed_terminal_stops_it_after_its_step(
    run: Run, open_terminal: Callable[..., Terminal]
) -> None:
    """It runs in front, and what it would say cannot be shown any more: neither may cost a step that was trained."""
    terminal = open_terminal(*run.command, "parallel.num_processes=2")
    run.pid_file.write_text(f"{terminal.process.pid}\n")
    wait_until(
        lambda: run.step > 0 or terminal.process.poll() is not None, "its first step", told=terminal.screen.decode
    )
    assert terminal.process.poll() is None, terminal.screen.decode()
    terminal.hang_up()
    code = terminal.process.wait(LIMIT_SECONDS)
    log = (run.folder / "log.txt").read_text()
    assert code == PREEMPTED, log
    assert run.record["status"] == "preempted"
    assert f"stopped at step {run.step} as asked by SIGHUP" in run.record["result"]["why"]
    assert run.step < NUM_STEPS
    assert run.is_saved(run.step), "no step is trained and thrown away"


def test_a_job_in_the_background_goes_on_when_its_shell_exits(run: Run, open_terminal: Callable[..., Terminal]) -> None:
    """Without nohup and with the terminal as its screen: a shell that exits tells its jobs nothing, the screen goes."""
    shell = open_terminal()
    shell.type(f"{shlex.join(run.command)} &")
    shell.type(f"echo $! > {run.pid_file}")
    process = run.process()
    wait_until(lambda: run.step > 0 or not is_alive(process), "its first step", told=shell.screen.decode)
    shell.type("exit")
    shell.process.wait(LIMIT_SECONDS)
    assert process.ppid() != shell.process.pid
    shell.hang_up()
    assert_completes(run, process)
