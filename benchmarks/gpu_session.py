"""Measure on a GPU what no CPU can tell, part by part, and write each figure as it comes.

    python -m benchmarks.gpu_session figures.jsonl --budget 560        # and again, until nothing is left
    python -m benchmarks.gpu_session figures.jsonl --again gains       # repeat a part, or a task by its whole name
    python -m benchmarks.gpu_session figures.jsonl --device cpu --tiny # the same on a CPU, as far as that can go
    python -m benchmarks.gpu_session figures.jsonl --page              # put the figures into README.md, and run none

benchmarks/README.md says what each part tells. No torch is imported here: each part computes in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.bench import ONE_THREAD, QUIET, ROOT
from benchmarks.gpu.figures import Figures, Record, is_failed
from benchmarks.gpu.goals import standings
from benchmarks.gpu.page import render
from benchmarks.gpu.parts import Task, tasks, why_skipped
from benchmarks.gpu.session import Session
from benchmarks.machine import device_name, digest_of_code, versions
from benchmarks.results_page import put_into

README = ROOT / "benchmarks" / "README.md"
_LINES_SHOWN = 3
_SECONDS_TO_END = 20.0


class Start:
    """One start of the session: it runs the tasks that are not done.

    Args:
        session: where it computes.
        figures: what earlier starts wrote.
        command: the words that repeat a task, without its name.
        budget: seconds until the last task must have ended; None: no limit.
    """

    def __init__(self, session: Session, figures: Figures, command: str, budget: float | None) -> None:
        self._session = session
        self._figures = figures
        self._command = command
        self._end = None if budget is None else time.monotonic() + budget
        self._facts = {"device": device_name(session.device), "versions": versions(), "code": digest_of_code(ROOT)}
        self._worker: _Worker | None = None
        self.left: list[str] = []
        """Tasks that did not fit into the budget."""

    @property
    def other_device(self) -> str | None:
        """The device of the figures that are there, if it is not this one."""
        devices = {record["device"] for record in self._figures.records if "device" in record}
        return next(iter(devices - {self._facts["device"]}), None)

    def run(self, wanted: Sequence[Task]) -> None:
        """Run what is not done, in the order given."""
        part = None
        try:
            for task in wanted:
                if task.part != part or task.is_isolated:
                    self._end_worker()
                part = task.part
                if not self._figures.is_done(task.name):
                    self._once(task)
                if task.is_isolated:
                    self._end_worker()
        finally:
            self._end_worker()

    def _once(self, task: Task) -> None:
        """Run a task, unless it cannot run here or has no time."""
        reason = why_skipped(task, self._session)
        if reason is not None:
            last = self._figures.last(task.name)
            if last is None or last.get("skipped") != reason:
                self._figures.add(task.name, skipped=reason)
            _say(f"{task.name}: skipped, {reason}")
            return
        if self._end is not None and time.monotonic() + task.seconds > self._end:
            self.left.append(task.name)
            return
        started = time.monotonic()
        if self._worker is None:
            self._worker = _Worker(self._session, self._figures.path.with_suffix(".log"))
        outcome = self._worker.measure(task)
        if "error" in outcome:
            self._end_worker()
        record = self._figures.add(
            task.name,
            **outcome,
            **self._facts,
            command=f"{self._command} --again {task.name}",
            seconds=round(time.monotonic() - started, 3),
            at=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        )
        _say(_in_words(record))

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()


class _Worker:
    """A process of `benchmarks.gpu.worker`, whose own words go to a log."""

    def __init__(self, session: Session, log: Path) -> None:
        mine, its = Pipe()
        self._connection: Connection = mine
        self._log = log
        self._begins_at = log.stat().st_size if log.exists() else 0
        with log.open("a") as words:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.worker", str(its.fileno())],
                cwd=ROOT,
                env={**os.environ, **QUIET, **(ONE_THREAD if session.device == "cpu" else {})},
                stdin=subprocess.PIPE,  # its end tells the process that this one is gone
                stdout=words,
                stderr=subprocess.STDOUT,
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        its.close()
        self._send(session.as_record())

    def measure(self, task: Task) -> dict[str, Any]:
        """Return the figures of a task, or its error."""
        try:
            self._send({"function": task.function, "arguments": dict(task.arguments)})
            if self._connection.poll(task.seconds):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
            self._kill()
            return {"error": f"it took longer than {task.seconds} seconds"}
        except (EOFError, OSError):
            self._kill()
            return {"error": f"its process ended with exit code {self._process.returncode}: {self._last_words()}"}
        except BaseException:  # this process was told to stop
            self._kill()
            raise

    def end(self) -> None:
        """Let the process leave; end it if it does not."""
        self._connection.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._kill()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _kill(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def _last_words(self) -> str:
        text = self._log.read_bytes()[self._begins_at :].decode(errors="replace").strip()
        return " / ".join(text.splitlines()[-_LINES_SHOWN:])


def main(words: Sequence[str]) -> int:
    """Run what the words ask for and is not done. 1 if a task failed or gave a wrong result, 2 for a wrong word."""
    wish, parser = _read(words)
    session = Session(device=wish.device, is_tiny=wish.tiny)
    figures = Figures(wish.figures)
    if wish.page:
        put_into(README, render(figures), "gpu")
        return 0
    wanted = [task for task in tasks() if not wish.only or _is_among(task, wish.only, figures)]
    again = [task for task in tasks() if _is_among(task, wish.again, figures)]
    unknown = [name for name in (*wish.only, *wish.again) if not _is_known(name)]
    if unknown:
        known = ", ".join(dict.fromkeys(task.part for task in tasks()))
        parser.error(f"there is no part or task {', '.join(unknown)}. Parts: {known}; a task is PART/NAME, see --list")
    if wish.list:
        _say("\n".join(task.name for task in wanted))
        return 0
    if session.device == "cuda" and not device_name("cuda"):
        parser.error("--device cuda: nvidia-smi shows no GPU. On a CPU: --device cpu --tiny")
    command = " ".join(["python -m benchmarks.gpu_session", str(wish.figures), *session.as_words()])
    start = Start(session, figures, command, wish.budget)
    if start.other_device is not None:
        parser.error(f"{wish.figures} holds figures of {start.other_device}. Name another file for this device.")
    for task in again:
        figures.add(task.name, again=True)
    start.run(wanted)
    return _conclude(figures, wanted, start.left, session)


def _conclude(figures: Figures, wanted: Sequence[Task], left: Sequence[str], session: Session) -> int:
    last = {task.name: figures.last(task.name) or {} for task in wanted}
    failed = [name for name, record in last.items() if is_failed(record)]
    counts = {
        "with figures": sum("figures" in record for record in last.values()),
        "failed": len(failed),
        "skipped": sum("skipped" in record for record in last.values()),
        "left for the next start": len(left),
    }
    if not session.is_tiny:
        _say("\n".join(["", "Goals, set for an H200:", *standings(figures)]))
    _say(
        "".join(f"\nfailed: {name}" for name in failed) + "\n" + ", ".join(f"{n} {what}" for what, n in counts.items())
    )
    return 1 if failed else 0


def _is_among(task: Task, names: Sequence[str], figures: Figures) -> bool:
    is_failure = "failed" in names and is_failed(figures.last(task.name) or {})
    return is_failure or task.part in names or task.name in names


def _is_known(name: str) -> bool:
    return name == "failed" or any(name in (task.part, task.name) for task in tasks())


def _in_words(record: Record) -> str:
    if "error" in record:
        said = f"failed: {record['error']}"
    else:
        said = ", ".join(f"{name} {_number(value)}" for name, value in record["figures"].items())
    return f"{record['task']}: {said} ({record['seconds']:.0f} s)"


def _number(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("figures", type=Path, help="the JSON Lines file of the figures; a second start goes on with it")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few repetitions: what a CPU can do")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="leave what may take longer to the next start")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these parts or tasks")
    parser.add_argument(
        "--again", nargs="+", default=[], metavar="NAME", help="repeat these, or `failed`: all that did"
    )
    parser.add_argument("--page", action="store_true", help="put the figures into benchmarks/README.md, and run none")
    parser.add_argument("--list", action="store_true", help="name the tasks and run none")
    return parser.parse_args(words), parser


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Told to stop, leave the way an error does: the process that measures is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
