"""One process of one run: it trains the job with one engine, and writes what that cost."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock, peak_memory, peak_reserved
from benchmarks.job import Job


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the processes of a run are told to do.

    Attributes:
        engine: a key of `benchmarks.engines.ENGINES`.
        job: the work.
        base: the folder of the base model.
        folder: for the reports and whatever the engine writes.
        words: settings of the engine's own.
        has_weights: False if the base has none, so that they are made at random on the device.
        started: `time.monotonic()` at the start of the command.
    """

    engine: str
    job: Job
    base: str
    folder: str
    words: tuple[str, ...] = ()
    has_weights: bool = True
    started: float = field(default_factory=time.monotonic)

    @property
    def rank(self) -> int:
        """This process among those of the run."""
        return int(os.environ.get("RANK", "0"))

    def command(self) -> list[str]:
        """Write the order into its folder, and return the arguments of Python with which all its processes run."""
        file = Path(self.folder) / "order.json"
        file.write_text(json.dumps(asdict(self)))
        launcher = torchrun(self.job.processes) if self.job.processes > 1 else []
        return [*launcher, "-m", "benchmarks.worker", str(file)]

    @classmethod
    def load(cls, file: Path) -> Order:
        """Read back what `command` wrote."""
        fields: dict[str, Any] = json.loads(file.read_text())
        return cls(**{**fields, "job": Job(**fields["job"]), "words": tuple(fields["words"])})

    def reports(self) -> list[RankReport]:
        """Read what the ranks have reported."""
        return [RankReport.load(path) for path in sorted(Path(self.folder).glob("rank-*.json"))]


def torchrun(processes: int) -> list[str]:
    """Return the arguments of Python that start so many ranks on this machine."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def carry_out(order: Order) -> RankReport:
    """Train the job with the engine that the order names."""
    from benchmarks.engines import ENGINES

    engine = ENGINES[order.engine]
    module = importlib.import_module(engine.module)
    return timed(order, lambda clock: module.train(order, engine.options, clock))


def timed(order: Order, train: Callable[[StepClock], RankReport]) -> RankReport:
    """Call a function that trains the job, and add times and memory to what it reports."""
    clock = StepClock(order.job, order.started)
    try:
        report = train(clock)
    finally:
        clock.close()
    report.rank = order.rank
    report.finished = clock.seconds()
    report.marks = clock.marks
    report.timed_peak_memory = peak_memory(order.job.device)
    report.peak_memory = max(clock.warmup_peak, report.timed_peak_memory)
    report.loading_peak_memory = clock.loading_peak
    report.peak_reserved = peak_reserved(order.job.device)
    return report


if __name__ == "__main__":
    given = Order.load(Path(sys.argv[1]))
    carry_out(given).save(Path(given.folder))
