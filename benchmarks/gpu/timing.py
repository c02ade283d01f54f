"""Times and memory of work on a device, and the rows that parts share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.clock import forget_peak, peak_memory, peak_reserved
from benchmarks.gpu.session import Session
from benchmarks.job import Row


class Cost(NamedTuple):
    """The cost of one piece of work: medians over repetitions, after a warm-up."""

    seconds: float
    host_seconds: float
    """Until the last kernel was launched; the GPU may still compute."""
    peak_allocated: int
    """Bytes; of a process's resident memory on a CPU."""
    peak_reserved: int


def measure(session: Session, work: Callable[[], object]) -> Cost:
    """Time a piece of work again and again."""
    warmups, repetitions = (1, 2) if session.is_tiny else (3, 10)
    for _ in range(warmups):
        work()
    forget_peak(session.device)
    host, whole = [], []
    for _ in range(repetitions):
        synchronize(session)
        started = time.perf_counter()
        work()
        host.append(time.perf_counter() - started)
        synchronize(session)
        whole.append(time.perf_counter() - started)
    allocated, reserved = peak_memory(session.device), peak_reserved(session.device)
    return Cost(statistics.median(whole), statistics.median(host), allocated, reserved)


def synchronize(session: Session) -> None:
    """Wait for the device."""
    if session.device == "cuda":
        torch.cuda.synchronize()


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """Capture work as a CUDA graph, and return a function that replays it and returns what the captured call returned.

    The work is done once before, because libraries allocate and kernels are compiled in the first pass.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def as_tensors(row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a row as `finetune.engine.layout.pack` takes it."""
    return torch.tensor(row.ids), torch.tensor(row.is_target)


def with_adapter(model: Any, precision: str) -> Any:
    """Give a model the adapter of the job, one that changes its results, and the weights' types of a run."""
    from peft import get_peft_model

    from benchmarks.engines.transformers_trainer import lora_config
    from finetune.distributed.device import convert_weights

    adapted = get_peft_model(model, lora_config(model.config.model_type))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    convert_weights(adapted, "bf16" if precision == "bf16" else "fp32")
    return adapted.train()
