"""Measure the world that was formed: sums, latency, bandwidth, and how fast each rank and its link are."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from finetune.diagnose.folder_checks import remove_token, sees_token, write_token
from finetune.diagnose.world_judgement import Bandwidth, RankMeasurement
from finetune.distributed.ddp_init import ProcessContext

_SUM_LENGTHS = (1, 1_000, 1_000_003)
_BANDWIDTH_BYTES = (1_000_000, 16_000_000, 64_000_000)
_BANDWIDTH_SECONDS = 2.0
_MAX_REPEATS = 5
_NUM_PINGS = 9
_NUM_SMALL = 30
_NUM_PRODUCTS = 40
_WIDTH_ON_CPU, _WIDTH_ON_GPU = 768, 4096


class WorldMeasurement(NamedTuple):
    """The same on every rank."""

    ranks: list[RankMeasurement]
    latency_seconds: float
    bandwidths: list[Bandwidth]


def probe_world(context: ProcessContext, hosts: Sequence[str], output_dir: Path) -> WorldMeasurement:
    """Measure for a few seconds. Collective: every rank of the group.

    Args:
        context: this process's place.
        hosts: the machine of each rank.
        output_dir: the run's folder, which need not be there yet.

    Raises:
        RuntimeError: a rank stopped answering, or a collective took longer than the group's timeout.
    """
    pings = gather_json(_ping_all(context), context.device)[0]
    compute_seconds, compute_cpu_seconds = _measure_compute(context.device)
    own = {
        "host": hosts[context.rank],
        "device": str(context.device),
        "compute_seconds": compute_seconds,
        "compute_cpu_seconds": compute_cpu_seconds,
        "has_right_sum": _sums_are_right(context),
        "sees_output_dir": _is_shared(context, output_dir),
    }
    ranks = [
        RankMeasurement(rank=rank, round_trip_seconds=pings[rank][0], clock_offset_seconds=pings[rank][1], **facts)
        for rank, facts in enumerate(gather_json(own, context.device))
    ]
    latency = _slowest(median(_time_all_reduce(1, context) for _ in range(_NUM_SMALL)), context)
    return WorldMeasurement(ranks, latency, _measure_bandwidth(context))


def meet(timeout: timedelta) -> None:
    """Wait for all ranks that have joined. Collective.

    Raises:
        RuntimeError: ranks do not answer, and which. Only gloo can tell, so nccl gets a gloo group beside it.
    """
    group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    dist.monitored_barrier(group, timeout, wait_all_ranks=True)


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Every rank's value, in order of rank, as JSON in tensors. Collective."""
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)], dtype=torch.int64, device=device))
    sizes = [int(length.item()) for length in lengths]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(each[:size].tolist())) for each, size in zip(texts, sizes, strict=True)]


def _ping_all(context: ProcessContext) -> list[tuple[float, float]]:
    """On rank 0: seconds to each rank and back, and how far its clock is ahead. Collective; elsewhere empty."""
    if context.rank:
        _answer_pings(context.device)
        return []
    found = [(0.0, 0.0)]
    for rank in range(1, context.world_size):
        pings = [_ping(rank, context.device) for _ in range(_NUM_PINGS)]
        found.append((median(seconds for seconds, _ in pings), median(offset for _, offset in pings)))
    return found


def _ping(rank: int, device: torch.device) -> tuple[float, float]:
    clock = torch.zeros(1, dtype=torch.float64, device=device)
    sent, started = time.time(), time.perf_counter()
    dist.send(clock, rank)
    dist.recv(clock, rank)
    theirs = clock.item()
    seconds = time.perf_counter() - started
    return seconds, theirs - (sent + seconds / 2)


def _answer_pings(device: torch.device) -> None:
    clock = torch.zeros(1, dtype=torch.float64, device=device)
    for _ in range(_NUM_PINGS):
        dist.recv(clock, 0)
        dist.send(clock.fill_(time.time()), 0)


def _measure_compute(device: torch.device) -> tuple[float, float]:
    """Wall and processor seconds of a matrix product, while all ranks compute as they do in training.

    The mean of many in a row: a process that waits for its processor stands still only now and then, and a median
    would hide that.
    """
    width = _WIDTH_ON_CPU if device.type == "cpu" else _WIDTH_ON_GPU
    matrix = torch.ones(width, width, device=device)
    (matrix @ matrix)[0, 0].item()  # the first one allocates and chooses a kernel
    started, started_cpu = time.perf_counter(), time.process_time()
    for _ in range(_NUM_PRODUCTS):
        (matrix @ matrix)[0, 0].item()  # waits for a GPU
    return (time.perf_counter() - started) / _NUM_PRODUCTS, (time.process_time() - started_cpu) / _NUM_PRODUCTS


def _sums_are_right(context: ProcessContext) -> bool:
    expected = context.world_size * (context.world_size + 1) / 2
    results = []
    for length in _SUM_LENGTHS:
        numbers = torch.full((length,), context.rank + 1.0, device=context.device)
        dist.all_reduce(numbers)
        results.append(bool((numbers == expected).all()))
    return all(results)


def _is_shared(context: ProcessContext, output_dir: Path) -> bool | None:
    """Whether this rank sees a file that rank 0 writes; None: it cannot write one. Collective."""
    token = write_token(output_dir) if context.rank == 0 else None
    path = gather_json(str(token) if token else None, context.device)[0]
    is_seen = None if path is None else sees_token(Path(path))
    gather_json(None, context.device)  # all have looked
    if token is not None:
        remove_token(token)
    return is_seen


def _measure_bandwidth(context: ProcessContext) -> list[Bandwidth]:
    """All-reduces of rising size; a size that would not end within the budget is left out. Collective."""
    found: list[Bandwidth] = []
    for num_bytes in _BANDWIDTH_BYTES:
        if found and found[-1].seconds * num_bytes / found[-1].num_bytes > _BANDWIDTH_SECONDS:
            break
        length = num_bytes // 4
        spent = _slowest(_time_all_reduce(length, context), context)  # warm-up
        seconds: list[float] = []
        # Every rank sees the slowest rank's seconds, so all decide alike.
        while not seconds or (len(seconds) < _MAX_REPEATS and spent < _BANDWIDTH_SECONDS):
            seconds.append(_slowest(_time_all_reduce(length, context), context))
            spent += seconds[-1]
        found.append(Bandwidth(num_bytes, median(seconds), context.world_size))
    return found


def _time_all_reduce(length: int, context: ProcessContext) -> float:
    """Seconds of one all-reduce of fp32 numbers on this rank."""
    numbers = torch.ones(length, device=context.device)
    numbers[0].item()  # a GPU has made it by now
    started = time.perf_counter()
    dist.all_reduce(numbers)
    numbers[0].item()
    return time.perf_counter() - started


def _slowest(seconds: float, context: ProcessContext) -> float:
    there = torch.tensor([seconds], dtype=torch.float64, device=context.device)
    dist.all_reduce(there, op=dist.ReduceOp.MAX)
    return float(there.item())
