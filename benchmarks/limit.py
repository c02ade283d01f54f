"""The machine's limit, measured on the spot: how fast one process multiplies matrices of the model's own shapes."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.job import Job

_TOKENS = {"cpu": 1024, "cuda": 8192}
"""Enough for each to reach its full speed."""
_REPEATS = 5


def matmul_rate(job: Job, seconds_each: float = 0.1) -> float:
    """Floating-point operations a second: of CPU time on the CPU, of the wall on a GPU.

    Each linear layer and the head, as they stand in a training step (``x Wᵀ`` forward, ``dy W`` backward), weighed by
    their share in a step.

    Args:
        job: the model's shape, the precision and the device.
        seconds_each: how long one product is repeated in each of five rounds, of which the median counts.
    """
    size, tokens = job.shape, _TOKENS[job.device]
    counted = [(shape, float(size.layers)) for shape in size.linear_shapes]
    counted.append(((size.hidden, size.vocabulary), 1.0 if size.row_tokens else 0.4))
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    flops = seconds = 0.0
    for (width_in, width_out), count in counted:
        weight = torch.randn(width_out, width_in, dtype=dtype, device=job.device)
        inputs = torch.randn(tokens, width_in, dtype=dtype, device=job.device)
        gradients = torch.randn(tokens, width_out, dtype=dtype, device=job.device)
        work = 2.0 * tokens * width_in * width_out
        flops += 2 * count * work
        seconds += count * _seconds(lambda x=inputs, w=weight: x @ w.t(), job.device, seconds_each)  # type: ignore[misc]
        seconds += count * _seconds(lambda dy=gradients, w=weight: dy @ w, job.device, seconds_each)  # type: ignore[misc]
    return flops / seconds


def _seconds(multiply: Callable[[], torch.Tensor], device: str, seconds_each: float) -> float:
    """Of one product: the median of several rounds."""
    now = _synchronised_clock if device == "cuda" else time.process_time
    multiply()
    start = now()
    multiply()
    times = max(1, round(seconds_each / max(now() - start, 1e-6)))
    rounds = []
    for _ in range(_REPEATS):
        start = now()
        for _ in range(times):
            multiply()
        rounds.append((now() - start) / times)
    return statistics.median(rounds)


def _synchronised_clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(matmul_rate(Job(**json.loads(sys.argv[1])))))
