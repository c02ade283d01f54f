"""Measure all ranks of a launch (sums, latency, bandwidth, speed, clocks) and report what is wrong or slow.

`probe_world` measures, on every rank. The functions `judge_…` turn the measurements into findings, on rank 0.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median, median_low
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from finetune.diagnose.folder_checks import sees_token, write_token
from finetune.distributed.ddp_init import ProcessContext
from finetune.findings import Finding, ok, problem, warning

Value = TypeVar("Value")

_AREA = "Ranks"
_SUM_LENGTHS = (1, 1_000, 1_000_003)
_BANDWIDTH_BYTES = (1_000_000, 16_000_000, 64_000_000)
_BANDWIDTH_SECONDS = 2.0
_MAX_REPEATS = 5
_NUM_PINGS = 9
_NUM_SMALL = 30
_NUM_PRODUCTS = 40
_WIDTH_ON_CPU, _WIDTH_ON_GPU = 768, 4096

_SLOW_COMPUTE = 1.5
_SLOW_LINK = 5.0
_SLOW_LINK_SECONDS = 5e-3
_HOPELESS_LINK_SECONDS = 50e-3
_SLOW_BUS_GIGABYTES = 0.1
_MOST_CLOCK_SKEW_SECONDS = 2.0


class RankMeasurement(NamedTuple):
    """The measurements of one rank."""

    rank: int
    host: str
    device: str
    compute_seconds: float
    """Wall-clock seconds of a fixed matrix product, mean."""
    compute_cpu_seconds: float
    """Its seconds of processor time."""
    round_trip_seconds: float
    """From rank 0 to this rank and back, median; 0 for rank 0."""
    clock_offset_seconds: float
    """Seconds by which this rank's clock is ahead of rank 0's."""
    has_right_sum: bool
    """Whether every all-reduce of known numbers gave the right sum."""
    sees_output_dir: bool | None
    """Whether this rank sees the file that rank 0 wrote beside `output_dir`; None: rank 0 could not write it."""

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return f"rank {self.rank} on {self.host}"


class Bandwidth(NamedTuple):
    """The measured time of all-reduces of one size. The formulas are from NVIDIA's nccl-tests, doc/PERFORMANCE.md."""

    num_bytes: int
    seconds: float
    """Median of the slowest rank's seconds."""
    world_size: int

    @property
    def algorithm_gigabytes(self) -> float:
        """GB/s for the program: bytes / seconds."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def bus_gigabytes(self) -> float:
        """GB/s on a link, comparable with the hardware's figure: an all-reduce moves 2(n-1)/n of the bytes."""
        return self.algorithm_gigabytes * 2 * (self.world_size - 1) / self.world_size


class WorldMeasurement(NamedTuple):
    """The measurements of all ranks. Every rank holds the same ones."""

    ranks: list[RankMeasurement]
    latency_seconds: float
    bandwidths: list[Bandwidth]


def probe_world(context: ProcessContext, output_dir: Path) -> WorldMeasurement:
    """Measure for a few seconds. The run's folder need not exist yet. Collective: every rank of the group.

    Raises:
        RuntimeError: a rank stopped answering, or a collective took longer than the group's timeout.
    """
    round_trip_seconds, clock_offset_seconds = gather(_ping_all(context))[0][context.rank]
    compute_seconds, compute_cpu_seconds = _measure_compute(context.device)
    own = RankMeasurement(
        rank=context.rank,
        host=socket.gethostname(),
        device=str(context.device),
        compute_seconds=compute_seconds,
        compute_cpu_seconds=compute_cpu_seconds,
        round_trip_seconds=round_trip_seconds,
        clock_offset_seconds=clock_offset_seconds,
        has_right_sum=_sums_are_right(context),
        sees_output_dir=_is_shared(context, output_dir),
    )
    ranks = gather(own)
    latency = max(gather(median(_time_all_reduce(1, context) for _ in range(_NUM_SMALL))))
    return WorldMeasurement(ranks, latency, _measure_bandwidth(context))


def wait_for_all_ranks(timeout: timedelta) -> None:
    """Wait for all ranks that have joined. Collective.

    Raises:
        RuntimeError: some ranks do not answer; the message names them. Only gloo names ranks, so with nccl this
            function makes a gloo group.
    """
    group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    dist.monitored_barrier(group, timeout, wait_all_ranks=True)


def gather(value: Value) -> list[Value]:
    """Return every rank's value, in order of rank. Collective."""
    values: list[Value] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _ping_all(context: ProcessContext) -> list[tuple[float, float]]:
    """On rank 0, measure the seconds to each rank and back, and how far its clock is ahead. Collective."""
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
    """Measure wall-clock and processor seconds of a matrix product, while all ranks compute as they do in training.

    It takes the mean of many, because a process that waits for its processor stops only now and then, and a median
    would hide that.
    """
    width = _WIDTH_ON_CPU if device.type == "cpu" else _WIDTH_ON_GPU
    matrix = torch.ones(width, width, device=device)
    (matrix @ matrix)[0, 0].item()  # the first product allocates and chooses a kernel
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
    """Check whether this rank sees a file that rank 0 writes; None if rank 0 cannot write one. Collective."""
    token = write_token(output_dir) if context.rank == 0 else None
    try:
        path = gather(token)[0]
        is_seen = None if path is None else sees_token(path)
        gather(None)  # wait until all have looked
    finally:
        if token is not None:
            token.unlink(missing_ok=True)
    return is_seen


def _measure_bandwidth(context: ProcessContext) -> list[Bandwidth]:
    """Time all-reduces of rising size, except those that would exceed the time budget. Collective."""
    found: list[Bandwidth] = []
    for num_bytes in _BANDWIDTH_BYTES:
        if found and found[-1].seconds * num_bytes / found[-1].num_bytes > _BANDWIDTH_SECONDS:
            break
        length = num_bytes // 4
        spent = max(gather(_time_all_reduce(length, context)))  # warm-up
        seconds: list[float] = []
        # Every rank has the slowest rank's seconds, so all decide alike.
        while not seconds or (len(seconds) < _MAX_REPEATS and spent < _BANDWIDTH_SECONDS):
            seconds.append(max(gather(_time_all_reduce(length, context))))
            spent += seconds[-1]
        found.append(Bandwidth(num_bytes, median(seconds), context.world_size))
    return found


def _time_all_reduce(length: int, context: ProcessContext) -> float:
    """Time one all-reduce of fp32 numbers on this rank, in seconds."""
    numbers = torch.ones(length, device=context.device)
    numbers[0].item()  # a GPU has made it by now
    started = time.perf_counter()
    dist.all_reduce(numbers)
    numbers[0].item()
    return time.perf_counter() - started


def judge_ranks(ranks: Sequence[RankMeasurement], *, needs_shared_folder: bool) -> Iterator[Finding]:
    """Report every rank's measurements. Name wrong sums, folders that a rank cannot see, slow ranks, links and clocks.

    A run that is resumed needs a shared folder, because every rank will read from `output_dir`.
    """
    yield judge_sums(ranks)
    if ranks[0].sees_output_dir is not None:  # otherwise rank 0 has reported that it cannot write
        yield judge_shared_folder(ranks, is_needed=needs_shared_folder)
    for rank in ranks:
        link = f", to rank 0 and back {_ms(rank.round_trip_seconds)} ms" if rank.rank else ""
        yield ok(
            _AREA,
            f"{rank.name}, {rank.device}: matrix product {_ms(rank.compute_seconds)} ms"
            f" ({_ms(rank.compute_cpu_seconds)} ms of processor time){link}",
        )
    for judge in (judge_compute, judge_links, judge_clocks):
        yield from judge(ranks)


def judge_compute(ranks: Sequence[RankMeasurement]) -> Iterator[Finding]:
    """Name the slow ranks. In every step the other ranks wait for them."""
    usual = median_low(rank.compute_seconds for rank in ranks)
    usual_cpu = median_low(rank.compute_cpu_seconds for rank in ranks)
    for rank in ranks:
        ratio = rank.compute_seconds / usual
        if ratio <= _SLOW_COMPUTE:
            continue
        if rank.device == "cpu" and rank.compute_cpu_seconds <= _SLOW_COMPUTE * usual_cpu:
            reason = "it waits for its processor"
            fix = (
                f"look with top on {rank.host} for other work on its cores, and give each rank cores of its own "
                "(srun --cpus-per-task, taskset, a larger CPU limit of the container)"
            )
        else:
            reason = "it computes slower"
            fix = (
                f"look on {rank.host} for other work on {rank.device} (nvidia-smi, top), a lower clock or an older "
                "device, or leave this host out"
            )
        yield warning(_AREA, f"{rank.name} is slow: it needs {ratio:.1f}x the median ({reason})", fix)


def judge_links(ranks: Sequence[RankMeasurement]) -> Iterator[Finding]:
    """Name the ranks with a slow link to rank 0."""
    others = ranks[1:]
    usual = median_low(rank.round_trip_seconds for rank in others)
    limit = min(max(_SLOW_LINK * usual, _SLOW_LINK_SECONDS), _HOPELESS_LINK_SECONDS)
    for rank in others:
        if rank.round_trip_seconds > limit:
            what = (
                f"the link of {rank.name} is slow: to rank 0 and back takes {_ms(rank.round_trip_seconds)} ms, "
                f"the median of all is {_ms(usual)} ms"
            )
            fix = (
                f"compare with `ping` between {ranks[0].host} and {rank.host}; name the fast network card in "
                "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; or leave this host out"
            )
            yield warning(_AREA, what, fix)


def judge_clocks(ranks: Sequence[RankMeasurement]) -> Iterator[Finding]:
    """Name the ranks with a clock that differs too much from rank 0's for logs and file times."""
    for rank in ranks:
        if abs(rank.clock_offset_seconds) > _MOST_CLOCK_SKEW_SECONDS:
            what = f"the clock of {rank.name} differs from rank 0's by {rank.clock_offset_seconds:+.1f} s"
            fix = f"start a time service (chrony, systemd-timesyncd) on {rank.host} and {ranks[0].host}"
            yield warning(_AREA, what, fix)


def judge_sums(ranks: Sequence[RankMeasurement]) -> Finding:
    """Name the ranks that got a wrong sum."""
    wrong = [rank.name for rank in ranks if not rank.has_right_sum]
    if not wrong:
        return ok("World", "all-reduces of known numbers give the right sum on every rank")
    fix = (
        "do not train on this: try parallel.backend=gloo, or NCCL_P2P_DISABLE=1 with nccl, and report the faulty "
        "driver or link"
    )
    return problem("World", f"all-reduces of known numbers give a wrong sum on {', '.join(wrong)}", fix)


def judge_shared_folder(ranks: Sequence[RankMeasurement], *, is_needed: bool) -> Finding:
    """Judge whether all ranks see the folder that rank 0 writes to."""
    blind = [rank.name for rank in ranks if not rank.sees_output_dir]
    if not blind:
        return ok("World", "all ranks see rank 0's output_dir")
    judge = problem if is_needed else warning
    what = f"{', '.join(blind)} cannot see rank 0's output_dir, which every rank reads when a run is resumed"
    return judge("World", what, "set output_dir to a folder that all hosts mount at the same path (NFS, Lustre)")


def judge_bandwidth(latency_seconds: float, bandwidths: Sequence[Bandwidth]) -> Iterator[Finding]:
    """Judge how fast gradients are summed, from the time of one number and the measurements of larger sizes."""
    area = "Bandwidth"
    yield ok(area, f"an all-reduce of one number takes {_ms(latency_seconds)} ms")
    for each in bandwidths:
        yield ok(
            area,
            f"all-reduce of {each.num_bytes / 1e6:.0f} MB: {_ms(each.seconds)} ms, "
            f"algorithm {each.algorithm_gigabytes:.2f} GB/s, bus {each.bus_gigabytes:.2f} GB/s",
        )
    best = max(each.bus_gigabytes for each in bandwidths)
    if best < _SLOW_BUS_GIGABYTES:
        what = f"the network is slow: {best:.3f} GB/s at best is below 1 Gbit/s Ethernet"
        fix = (
            "name the fast network card (`ip -br addr`) in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; LoRA adapters "
            "suffer least from a slow network"
        )
        yield warning(area, what, fix)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
