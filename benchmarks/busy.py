"""How a run trains beside other busy processes, with one setting of OpenMP against another.

    python -m benchmarks.busy --settings "" GOMP_SPINCOUNT=300000 OMP_WAIT_POLICY=passive
    python -m benchmarks.busy --settings "" GOMP_SPINCOUNT=300000 --size real --steps 6

Each run is a process of its own. The settings take turns in every round, since a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench import ROOT, Bench
from benchmarks.job import SIZES, Job
from benchmarks.summary import figures_of
from benchmarks.worker import Order

_WARMUP = 10
_RUN = ("testing.num_samples=0", "testing.metrics=[]", "testing.compare_base=false", "checkpoint.save_every_epochs=9")


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """A block beside processes that each keep a core busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def train_quickstart(setting: str, folder: Path, steps: int) -> float:
    """Train the quickstart and return its tokens per second after the warm-up.

    Args:
        setting: environment variables, ``NAME=value`` and spaces between them.
        folder: for the run.
        steps: optimizer steps.
    """
    place = [f"output_dir={folder}/run", f"data.cache_dir={folder}/cache", f"training.max_steps={steps}"]
    _python(setting, "-m", "finetune", "train", "quickstart", *_RUN, *place)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "step"][_WARMUP:]
    tokens = sum(event["num_tokens"] for event in events)
    return float(tokens / sum(event["num_tokens"] / event["tokens_per_second"] for event in events))


def train_size(setting: str, folder: Path, size: str, steps: int) -> float:
    """Train the benchmark's job with `ours`, for the other arguments as `train_quickstart` does.

    Args:
        setting: environment variables.
        folder: for the run.
        size: a key of `SIZES`.
        steps: optimizer steps, of which two warm up.
    """
    job = Job(size=size, steps=steps, warmup_steps=2)
    base = Bench(ROOT / "runs" / "benchmarks").base(job)
    order = Order(engine="ours", job=job, base=str(base), folder=str(folder))
    _python(setting, *order.command())
    return figures_of(job, order.reports())["tokens_per_second"]


def _python(setting: str, *arguments: str) -> None:
    variables = dict(word.split("=", 1) for word in setting.split())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def main(words: Sequence[str]) -> int:
    """Print a table: tokens per second of each setting, the median over the rounds with the least and the most."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description="A run beside busy processes")
    parser.add_argument("--settings", nargs="+", default=[""], help="variables, as in `NAME=value NAME=value`")
    parser.add_argument("--beside", nargs="+", type=int, default=[0, 1], help="numbers of busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps; the first are not counted")
    parser.add_argument("--size", choices=list(SIZES), help="train the benchmark's job and not the quickstart")
    wish = parser.parse_args(words)
    speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number in range(wish.rounds):
        for count in wish.beside:
            turn = number % len(wish.settings)
            for setting in (*wish.settings[turn:], *wish.settings[:turn]):
                with busy_processes(count), tempfile.TemporaryDirectory() as name:
                    speed = (
                        train_size(setting, Path(name), wish.size, wish.steps)
                        if wish.size
                        else train_quickstart(setting, Path(name), wish.steps)
                    )
                speeds[setting, count].append(speed)
                sys.stderr.write(
                    f"beside {count}: {speeds[setting, count][-1]:,.0f} tokens/s, {setting or 'finetune'}\n"
                )
    sys.stdout.write(f"| setting | {' | '.join(f'beside {count}' for count in wish.beside)} |\n")
    sys.stdout.write(f"|---{'|---:' * len(wish.beside)}|\n")
    for setting in wish.settings:
        cells = " | ".join(_cell(speeds[setting, count]) for count in wish.beside)
        sys.stdout.write(f"| {f'`{setting}`' if setting else 'as finetune sets it'} | {cells} |\n")
    return 0


def _cell(speeds: Sequence[float]) -> str:
    return f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
