"""What a run costs, measured alike in every engine: at the end of each call of an optimizer's `step`."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.job import Job, RowShape

_STATUS = Path("/proc/self/status")


class Mark(NamedTuple):
    """The end of an optimizer step."""

    wall: float
    """Seconds since the benchmark started the command."""
    cpu: float
    """CPU seconds of this process and, after the warm-up and at the end, of those it started."""


@dataclass
class RankReport:
    """What one rank of one run says of itself."""

    rank: int = 0
    marks: list[Mark] = field(default_factory=list)
    rows: list[list[RowShape]] = field(default_factory=list)
    """For each step, the rows that this rank answers for."""
    first_rows: list[int] = field(default_factory=list)
    """Which rows of the job were in the first step."""
    losses: dict[int, float] = field(default_factory=dict)
    """Nats per target, by step. The engines that log seldom give the mean since the line before."""
    finished: float = 0.0
    """Seconds from the start of the command until the adapter was on disk."""
    peak_memory: int = 0
    """Bytes; of the device where it has memory of its own."""
    timed_peak_memory: int = 0
    """The same after the warm-up. Resident memory has one peak for the whole process."""
    loading_peak_memory: int = 0
    """Until the base was loaded; 0 unless it was quantized."""
    peak_reserved: int = 0
    """Bytes that torch has taken from the device, in use or not; 0 on the CPU."""

    def save(self, folder: Path) -> None:
        """Write the report where the benchmark looks for it."""
        (folder / f"rank-{self.rank}.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> RankReport:
        """Read a report back."""
        fields = json.loads(path.read_text())
        fields["marks"] = [Mark(*mark) for mark in fields["marks"]]
        fields["rows"] = [[RowShape(*row) for row in step] for step in fields["rows"]]
        fields["losses"] = {int(step): loss for step, loss in fields["losses"].items()}
        return cls(**fields)


class EnoughError(Exception):
    """All steps of the job are done, and the engine would only save what nobody reads."""


class StepClock:
    """Marks the end of every optimizer step, whatever engine calls it.

    If all weights train, EnoughError ends the step after the last one: a checkpoint of 3.8 billion parameters with
    AdamW's state would take minutes, and most of a disk.

    Args:
        job: how many steps there are.
        started: `time.monotonic()` of the benchmark when it started the command; the clock is the machine's.
    """

    def __init__(self, job: Job, started: float) -> None:
        self.marks: list[Mark] = []
        self.warmup_peak = 0
        """Bytes; see `peak_memory`."""
        self.loading_peak = 0
        """Bytes; see `loading_peak_memory`."""
        self._job = job
        self._started = started
        self._hook: Any = None

    def watch(self) -> None:
        """From now on mark the end of every step."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hook = register_optimizer_step_post_hook(self._after_step)

    def close(self) -> None:
        """Watch no more steps."""
        if self._hook is not None:
            self._hook.remove()

    def seconds(self) -> float:
        """Since the benchmark started the command."""
        return time.monotonic() - self._started

    def _after_step(self, optimizer: Any, args: Sequence[Any], keywords: dict[str, Any]) -> None:
        if optimizer.param_groups[0]["params"][0].is_meta:
            return  # no training: someone asks what an optimizer's state will take
        if self._job.device == "cuda":
            import torch

            torch.cuda.synchronize()
        if len(self.marks) == self._job.steps and self._job.method == "full":
            raise EnoughError
        cpu = time.process_time()
        if len(self.marks) + 1 in (self._job.warmup_steps, self._job.steps):
            cpu += _cpu_of_children()  # not at every step: it is a walk over all processes
        self.marks.append(Mark(self.seconds(), cpu))
        if len(self.marks) == self._job.warmup_steps:
            self.warmup_peak = peak_memory(self._job.device)
            forget_peak(self._job.device)


def peak_memory(device: str) -> int:
    """The most bytes this process has held so far: of the GPU's memory on `cuda`, else resident."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    if _STATUS.exists():  # ru_maxrss begins with what the parent held when it started this process
        return memory("VmHWM")
    in_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * in_bytes


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes: RssAnon is memory that is no page of a file."""
    lines = _STATUS.read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


class Peak:
    """The most anonymous memory that this process holds inside, read every so many seconds."""

    def __init__(self, every: float) -> None:
        self._every = every

    def __enter__(self) -> Peak:
        self.before = self.most = memory("RssAnon")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(self._every):
            self.most = max(self.most, memory("RssAnon"))


def peak_reserved(device: str) -> int:
    """The most bytes that torch has taken from the GPU so far, in use or not; 0 on the CPU."""
    if device != "cuda":
        return 0
    import torch

    return int(torch.cuda.max_memory_reserved())


def forget_peak(device: str) -> None:
    """Let the peak of allocated memory begin anew; that of resident memory cannot."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


def _cpu_of_children() -> float:
    """Of children that are gone and of those that work now."""
    gone = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = gone.ru_utime + gone.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return float(total)
