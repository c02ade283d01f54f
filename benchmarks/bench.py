"""Where one benchmark keeps what it needs and what it finds; each run is processes of its own.

No torch is imported here: the processes that are measured shall not be weighed with what this one holds.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.clock import RankReport
from benchmarks.engines import ENGINES
from benchmarks.job import Job
from benchmarks.machine import digest_of_code
from benchmarks.summary import Run, figures_of, loss_difference
from benchmarks.worker import Order

ROOT = Path(__file__).resolve().parent.parent
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of every process that is measured."""
_PRINT_VERSIONS = "from benchmarks.machine import versions; print(versions())"
_HELP_TIMES = 5
_LIMIT_MINUTES = 60.0
_SECONDS_TO_END = 20.0
_LINES_SHOWN = 12


class StepFailedError(Exception):
    """A child process ended with an error; the message is the end of what it said."""


class Bench:
    """The folder of one benchmark, and what is done in it.

    Args:
        folder: base models, the engines' own output, runs.jsonl.
        unsloth: the Python of an environment with unsloth, or None.

    Raises:
        StepFailedError: that Python cannot run the benchmark's modules.
    """

    def __init__(self, folder: Path, unsloth: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "runs.jsonl"
        self._unsloth = str(unsloth.absolute()) if unsloth else sys.executable
        self.unsloth_versions = self._python("-c", _PRINT_VERSIONS, python=self._unsloth).strip() if unsloth else ""
        self.code = digest_of_code(ROOT, self.unsloth_versions)

    def runs(self) -> list[Run]:
        """What was measured so far with this code and these versions; of a run that was done again, the last."""
        if not self.log.exists():
            return []
        runs = [json.loads(line) for line in self.log.read_text().splitlines()]
        mine = [run for run in runs if run["code"] == self.code]
        return list({(run["job"], run["work"], run["engine"], run["round"]): run for run in mine}.values())

    def is_done(self, job: Job | None, engine: str, number: int) -> bool:
        """Whether a run is in the log without an error."""
        wanted = (job.fingerprint() if job else "", engine, number)
        return any((run["work"], run["engine"], run["round"]) == wanted and "error" not in run for run in self.runs())

    def note(self, job: Job | None, engine: str, number: int, **outcome: Any) -> None:
        """Add a run to the log."""
        run = {
            "job": job.name if job else engine,
            "work": job.fingerprint() if job else "",
            "engine": engine,
            "round": number,
            "code": self.code,
            **outcome,
        }
        with self.log.open("a") as log:
            log.write(json.dumps(run) + "\n")

    def base(self, job: Job) -> Path:
        """The folder of the job's base model, made on first use."""
        folder = self.folder / f"base-{job.size}-{job.seed}"
        if not (folder / "tokenizer_config.json").exists():  # written last
            self._python("-m", "benchmarks.base_model", json.dumps(asdict(job)), str(folder))
        return folder

    def measure_limit(self, job: Job) -> dict[str, float]:
        """How fast one process multiplies matrices just now."""
        return {"flops_per_second": float(self._python("-m", "benchmarks.limit", json.dumps(asdict(job))))}

    def measure_help(self) -> dict[str, float]:
        """Wall time of `finetune --help`."""
        seconds = []
        for _ in range(_HELP_TIMES):
            started = time.monotonic()
            self._python("-m", "finetune", "--help")
            seconds.append(time.monotonic() - started)
        return {"seconds": statistics.median(seconds)}

    def train(self, job: Job, engine: str, number: int) -> dict[str, float]:
        """Run one engine on one job in processes of its own."""
        folder = self.folder / "work" / f"{job.fingerprint()}-{number}-{time.time_ns()}"
        folder.mkdir(parents=True)
        try:
            reports = self._reports(job, engine, folder)
        finally:
            shutil.rmtree(folder)
        known = {} if job.objective == "dpo" else self._row_losses(job, reports)
        difference = loss_difference(reports, known, first=math.log(2) if job.objective == "dpo" else None)
        return {**figures_of(job, reports), "first_loss_difference": difference}

    def _reports(self, job: Job, engine: str, folder: Path) -> list[RankReport]:
        name, *words = engine.split()
        order = Order(engine=name, words=tuple(words), job=job, base=str(self.base(job)), folder=str(folder))
        python = self._unsloth if ENGINES[name].has_own_environment else sys.executable
        self._python(*order.command(), python=python)
        reports = order.reports()
        if len(reports) != job.processes:
            raise StepFailedError(f"{len(reports)} of {job.processes} ranks reported")
        return reports

    def _row_losses(self, job: Job, reports: Sequence[RankReport]) -> dict[int, tuple[float, int]]:
        """The base model's loss on the rows of the first step, computed once per row."""
        prompt = "-prompt" if job.has_shared_prompt else ""
        path = self.folder / f"row-losses-{job.size}-{job.seed}{prompt}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        missing = sorted({n for report in reports for n in report.first_rows if str(n) not in known})
        if missing:
            arguments = [json.dumps(asdict(job)), str(self.base(job)), json.dumps(missing)]
            known |= json.loads(self._python("-m", "benchmarks.base_model", *arguments))
            path.write_text(json.dumps(known))
        return {int(number): tuple(loss) for number, loss in known.items()}

    def _python(self, *arguments: str, python: str = sys.executable) -> str:
        """Run Python in a process of its own with one thread a process; what it wrote to stdout.

        Raises:
            StepFailedError: it failed, or took longer than an hour.
        """
        process = subprocess.Popen(
            [python, *arguments],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, **QUIET, "HF_HOME": str(self.folder / "hf"), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, complaints = process.communicate(timeout=_LIMIT_MINUTES * 60)
        except subprocess.TimeoutExpired as error:
            raise StepFailedError(f"{arguments[1]} took longer than {_LIMIT_MINUTES:g} minutes") from error
        finally:
            _end(process)
        if process.returncode != 0:
            raise StepFailedError("\n".join((output + complaints).strip().splitlines()[-_LINES_SHOWN:]))
        return output


def _end(process: subprocess.Popen[str]) -> None:
    """Leave nothing behind: a launcher that is told to stop ends its workers, one that is killed does not."""
    if process.poll() is not None:
        return
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=_SECONDS_TO_END)
    for one in alive:
        one.kill()
