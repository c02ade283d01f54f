"""Where the time of `ours` goes: the operators of its training steps, by kind.

    python -m benchmarks.profile_ours --sizes real s32k s100k

Shares are of the time of one process after the warm-up, on an otherwise idle core: the profiler reads the clock on the
wall. What it costs itself is in what is outside of operators. The whole is set against the machine's limit, measured
beside it, in CPU time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench import ROOT, Bench
from benchmarks.clock import StepClock
from benchmarks.engines import ENGINES, ours
from benchmarks.flops import necessary_flops
from benchmarks.job import SIZES, Job, row_shape
from benchmarks.limit import matmul_rate
from benchmarks.worker import Order

_KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::"),
    "attention": ("aten::_scaled_dot_product", "aten::_flash_attention"),
    "copies and gathers": (
        "aten::copy_",
        "aten::index",
        "aten::gather",
        "aten::scatter",
        "aten::cat",
        "aten::embedding",
    ),
    "optimizer": ("aten::_fused_adam", "aten::_foreach"),
}
"""Operators by how their names begin; what is in none of them works element by element, or along a row."""
_ELEMENTWISE = "elementwise and along rows"
_OUTSIDE = "outside of operators"
_WARMUP = 3


class _Profiler:
    """Profiles from the end of the warm-up to the end of the last step."""

    def __init__(self, job: Job) -> None:
        self.cpu_seconds = self.seconds = 0.0
        self.events: Any = None
        self._job = job
        self._steps = 0
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer.param_groups[0]["params"][0].is_meta:
            return  # no training: someone asks what an optimizer's state will take
        self._steps += 1
        if self._steps == self._job.warmup_steps:
            self._profile.start()
            self.cpu_seconds, self.seconds = -time.process_time(), -time.perf_counter()
        if self._steps == self._job.steps:
            self.cpu_seconds += time.process_time()
            self.seconds += time.perf_counter()
            self._profile.stop()
            self.events = self._profile.key_averages()

    def close(self) -> None:
        """Watch no more steps."""
        self._hook.remove()


def seconds_by_kind(events: Iterable[tuple[str, float]], all_seconds: float) -> dict[str, float]:
    """Put the self times of operators together.

    Args:
        events: operators, and the seconds of each without those that it called.
        all_seconds: what passed meanwhile; what no operator accounts for is Python, the data and the profiler.
    """
    kinds: dict[str, float] = defaultdict(float)
    for name, seconds in events:
        if name.startswith(("aten::", "mkldnn::")):
            kinds[next((kind for kind, starts in _KINDS.items() if name.startswith(starts)), _ELEMENTWISE)] += seconds
    kinds[_OUTSIDE] = max(0.0, all_seconds - sum(kinds.values()))
    return dict(kinds)


def profile_job(job: Job, base: Path) -> dict[str, float]:
    """Train the job with `ours` in this process: the share of each kind, and of the limit that the whole reaches."""
    with tempfile.TemporaryDirectory() as folder:
        profiler = _Profiler(job)
        order = Order(engine="ours", job=job, base=str(base), folder=folder)
        ours.train(order, ENGINES["ours"].options, StepClock(job, order.started))
        profiler.close()
    events = [(event.key, event.self_cpu_time_total / 1e6) for event in profiler.events]
    kinds = seconds_by_kind(events, profiler.seconds)
    rows = [row_shape(row) for row in job.rows()][job.warmup_steps * job.global_batch : job.steps * job.global_batch]
    at_the_limit = necessary_flops(job.shape, rows) / matmul_rate(job)
    shares = {kind: seconds / profiler.seconds for kind, seconds in kinds.items()}
    return {**shares, "of the limit, as a whole": at_the_limit / profiler.cpu_seconds}


def main(words: Sequence[str]) -> int:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_ours", description="Where the time of ours goes"
    )
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["real"])
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps, the first three of them to warm up")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "benchmarks", help="default: runs/benchmarks")
    wish = parser.parse_args(words)
    if wish.steps < 2:
        parser.error("--steps: at least 2, of which the first warms up")
    torch.set_num_threads(1)
    bench = Bench(wish.folder)
    kinds = [*_KINDS, _ELEMENTWISE, _OUTSIDE, "of the limit, as a whole"]
    sys.stdout.write(f"| size | {' | '.join(kinds)} |\n|---{'|---:' * len(kinds)}|\n")
    for size in wish.sizes:
        job = replace(
            Job(size=size), precision=wish.precision, steps=wish.steps, warmup_steps=min(_WARMUP, wish.steps - 1)
        )
        shares = profile_job(job, bench.base(job))
        cells = " | ".join(f"{shares.get(kind, 0.0):.0%}" for kind in kinds)
        sys.stdout.write(f"| `{size}` | {cells} |\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
