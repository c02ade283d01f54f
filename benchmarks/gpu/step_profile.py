"""Part `profile`: where the time of one micro-batch of Phi-4-mini goes, from few tokens to many."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.base_model import TORCH_TYPES, make_base
from benchmarks.flops import necessary_flops
from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import as_tensors, captured, measure, synchronize, with_adapter
from benchmarks.gpu.trace import read_trace, time_shares
from benchmarks.job import row_shape
from benchmarks.limit import matmul_rate
from finetune.data.encoded import EncodedExample
from finetune.engine.attention import prepared_by_the_host
from finetune.engine.fused import fused_or_not
from finetune.engine.layout import pack
from finetune.engine.loss import summed_cross_entropy
from finetune.engine.products import unchanged_weights

_COPIED_BYTES = 2**30


def limits(session: Session) -> dict[str, Any]:
    """Measure how fast the device multiplies matrices of Phi-4-mini's shapes, and how fast it copies."""
    source = torch.empty(2**20 if session.is_tiny else _COPIED_BYTES, dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    cost = measure(session, lambda: target.copy_(source))
    rate = matmul_rate(session.job("mini"), seconds_each=0.002 if session.is_tiny else 0.1)
    return {"matmul_flops_per_second": rate, "copied_bytes_per_second": 2 * source.nbytes / cost.seconds}


def profile_microbatch(
    session: Session, tokens: int | None = None, *, way: Literal["run", "unfused", "graph"] = "run"
) -> dict[str, Any]:
    """Time forward and backward of one micro-batch as a run computes it, and say what kind of operation takes the time.

    Args:
        session: where to compute.
        tokens: of the micro-batch, in rows of at most 4,096 (with tiny models fewer of both). None: the chat rows of
            one step.
        way: as a run computes it, without fused functions, or as one CUDA graph, which shows what the host costs.
    """
    job = session.job("chat" if tokens is None else "mini")
    if tokens is None:
        rows = job.rows()[: job.global_batch]
    else:
        tokens = max(8, tokens // 64) if session.is_tiny else tokens
        rows = [row._replace(ids=row.ids[:tokens], is_target=row.is_target[:tokens]) for row in job.rows()]
        rows = rows[: math.ceil(tokens / job.longest)]
    model = _model(session)
    device, dtype = torch.device(session.device), TORCH_TYPES[job.precision]
    examples = [EncodedExample(*as_tensors(row)) for row in rows]
    microbatch = pack(examples, prepare_attention=prepared_by_the_host(device, dtype)).to(device)
    num_tokens, num_targets = microbatch.num_tokens, microbatch.num_targets

    def work() -> None:
        with unchanged_weights(), fused_or_not(session.device == "cuda" and way != "unfused"):
            with torch.autocast(session.device, dtype=torch.bfloat16, enabled=job.precision == "bf16"):
                loss = summed_cross_entropy(model, microbatch)
            (loss / num_targets).backward()
        for parameter in model.parameters():
            parameter.grad = None

    if way == "graph":
        work = captured(work)
    cost = measure(session, work)
    kinds, launches = _profile(session, work)
    return {
        "tokens": num_tokens,
        "median_ms": 1e3 * cost.seconds,
        "host_ms": 1e3 * cost.host_seconds,
        "tokens_per_second": num_tokens / cost.seconds,
        "flops_per_second": necessary_flops(job.shape, map(row_shape, rows)) / cost.seconds,
        "peak_allocated_bytes": cost.peak_allocated,
        "peak_reserved_bytes": cost.peak_reserved,
        "launches": launches,
        **{f"{kind}, ms": 1e3 * seconds for kind, seconds in kinds.items()},
    }


def _profile(session: Session, work: Any) -> tuple[dict[str, float], int]:
    """Return the seconds of each kind of operation, and how many kernels (operators on a CPU) were launched."""
    synchronize(session)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if session.device == "cuda" else [])]
    for _ in range(2):  # the first profile of a process waits for the profiler's own libraries
        with profile(activities=activities) as profiled:
            work()
            synchronize(session)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        trace = read_trace(path)
    spent = time_shares(trace)
    seconds = {kind: share * spent.seconds_per_step for kind, share in spent.shares.items()}
    launched = "kernel" if session.device == "cuda" else "cpu_op"
    return seconds, sum(event.get("cat") == launched for event in trace["traceEvents"])


@cache
def _model(session: Session) -> Any:
    job = session.job("mini")
    return with_adapter(make_base(job, job.shape, dtype=TORCH_TYPES[job.precision]), job.precision)
