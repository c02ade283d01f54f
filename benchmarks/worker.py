"""One process of one run: it trains the job with one engine, and writes what that cost."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.clock import RankReport, StepClock, peak_memory, peak_reserved
from benchmarks.job import Job


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process is told to do.

    Attributes:
        engine: a key of `benchmarks.engines.ENGINES`.
        words: settings of the engine's own.
        job: the work.
        base: the folder of the base model.
        has_weights: False if the folder holds none, so that they are made at random on the device.
        folder: for the reports and whatever the engine writes.
        started: `time.monotonic()` at the start of the command.
    """

    engine: str
    words: tuple[str, ...]
    job: Job
    base: str
    folder: str
    started: float
    has_weights: bool = True

    @property
    def rank(self) -> int:
        """This process among those of the run."""
        return int(os.environ.get("RANK", "0"))

    def as_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Read back what `as_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "job": Job(**fields["job"]), "words": tuple(fields["words"])})


def carry_out(order: Order) -> RankReport:
    """Train the job with the engine that the order names."""
    from benchmarks.engines import ENGINES

    engine = ENGINES[order.engine]
    clock = StepClock(order.job, order.started)
    module = importlib.import_module(engine.module)
    try:
        report: RankReport = module.train(order, engine.options, clock)
    finally:
        clock.close()
    report.rank = order.rank
    report.finished = clock.seconds()
    report.marks = clock.marks
    report.timed_peak_memory = peak_memory(order.job.device)
    report.peak_memory = max(clock.warmup_peak, report.timed_peak_memory)
    report.peak_reserved = peak_reserved(order.job.device)
    return report


if __name__ == "__main__":
    given = Order.from_json(Path(sys.argv[1]).read_text())
    carry_out(given).save(Path(given.folder))
