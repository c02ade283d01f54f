"""What measurements of a world mean: pure functions from figures to findings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from finetune.findings import Finding, ok, problem, warning

_SLOW_COMPUTE = 1.5
_SLOW_LINK = 5.0
_SLOW_LINK_SECONDS = 5e-3
_HOPELESS_LINK_SECONDS = 50e-3
_SLOW_BUS_GIGABYTES = 0.1
_MOST_CLOCK_SKEW_SECONDS = 2.0


class RankMeasurement(NamedTuple):
    """What was measured of one rank."""

    rank: int
    host: str
    device: str
    compute_seconds: float
    """Wall-clock seconds of a fixed matrix product, on average."""
    compute_cpu_seconds: float
    """Seconds of processor time of the same."""
    round_trip_seconds: float
    """From rank 0 to this rank and back, median; 0 for rank 0."""
    clock_offset_seconds: float
    """This rank's clock less rank 0's."""
    has_right_sum: bool
    """Whether every all-reduce of known numbers gave their sum."""
    sees_output_dir: bool | None
    """Whether the file that rank 0 wrote beside `output_dir` is seen here; None: rank 0 could not write it."""

    @property
    def name(self) -> str:
        """How messages call this rank."""
        return f"rank {self.rank} on {self.host}"


class Bandwidth(NamedTuple):
    """All-reduces of one size. Formulas: NVIDIA's nccl-tests, doc/PERFORMANCE.md."""

    num_bytes: int
    seconds: float
    """Median; each of them is that of the slowest rank."""
    world_size: int

    @property
    def algorithm_gigabytes(self) -> float:
        """GB/s as the program sees them: bytes / seconds."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def bus_gigabytes(self) -> float:
        """GB/s that a link carries, which can be compared with the hardware's: an all-reduce moves 2(n-1)/n of it."""
        return self.algorithm_gigabytes * 2 * (self.world_size - 1) / self.world_size


def judge_ranks(ranks: Sequence[RankMeasurement], *, needs_shared_folder: bool) -> list[Finding]:
    """Every rank with its figures, then those that are slow, wrong, cut off or out of time.

    Args:
        ranks: all of them, in order.
        needs_shared_folder: whether every rank will read from `output_dir` (when resuming).
    """
    rows = [
        ok(
            "Ranks",
            f"{rank.name}, {rank.device}: matrix product {_ms(rank.compute_seconds)} ms"
            f" ({_ms(rank.compute_cpu_seconds)} ms of processor time)"
            + (f", to rank 0 and back {_ms(rank.round_trip_seconds)} ms" if rank.rank else ""),
        )
        for rank in ranks
    ]
    return [
        *judge_sums(ranks),
        *judge_shared_folder(ranks, is_needed=needs_shared_folder),
        *rows,
        *judge_compute(ranks),
        *judge_links(ranks),
        *judge_clocks(ranks),
    ]


def judge_compute(ranks: Sequence[RankMeasurement]) -> list[Finding]:
    """Name the ranks that compute slower than the others: all wait for them in every step."""
    usual = median_low(rank.compute_seconds for rank in ranks)
    usual_cpu = median_low(rank.compute_cpu_seconds for rank in ranks)
    found = []
    for rank in ranks:
        if rank.compute_seconds <= _SLOW_COMPUTE * usual:
            continue
        waits = rank.device == "cpu" and rank.compute_cpu_seconds <= _SLOW_COMPUTE * usual_cpu
        reason = "it waits for its processor" if waits else "it computes slower"
        fix = (
            f"look with top on {rank.host} for other work on its cores, and give each rank cores of its own "
            "(srun --cpus-per-task, taskset, a larger CPU limit of the container)"
            if waits
            else f"look on {rank.host} for other work on {rank.device} (nvidia-smi, top), a lower clock or an older "
            "device, or leave this host out"
        )
        ratio = rank.compute_seconds / usual
        found.append(warning("Ranks", f"{rank.name} is slow: it needs {ratio:.1f}x the median ({reason})", fix))
    return found


def judge_links(ranks: Sequence[RankMeasurement]) -> list[Finding]:
    """Name the ranks that are far from rank 0."""
    others = [rank for rank in ranks if rank.rank]
    usual = median_low(rank.round_trip_seconds for rank in others)
    limit = min(max(_SLOW_LINK * usual, _SLOW_LINK_SECONDS), _HOPELESS_LINK_SECONDS)
    return [
        warning(
            "Ranks",
            f"the link of {rank.name} is slow: to rank 0 and back takes {_ms(rank.round_trip_seconds)} ms, "
            f"the median of all is {_ms(usual)} ms",
            f"compare with `ping` between {ranks[0].host} and {rank.host}; name the fast network card in "
            "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; or leave this host out",
        )
        for rank in others
        if rank.round_trip_seconds > limit
    ]


def judge_clocks(ranks: Sequence[RankMeasurement]) -> list[Finding]:
    """Name the ranks whose clock differs from rank 0's by more than logs and file times can bear."""
    return [
        warning(
            "Ranks",
            f"the clock of {rank.name} differs from rank 0's by {rank.clock_offset_seconds:+.1f} s",
            f"start a time service (chrony, systemd-timesyncd) on {rank.host} and {ranks[0].host}",
        )
        for rank in ranks
        if abs(rank.clock_offset_seconds) > _MOST_CLOCK_SKEW_SECONDS
    ]


def judge_sums(ranks: Sequence[RankMeasurement]) -> list[Finding]:
    """Whether all-reduces gave the right sums."""
    wrong = [rank.name for rank in ranks if not rank.has_right_sum]
    if not wrong:
        return [ok("World", "all-reduces of known numbers give their sum on every rank")]
    fix = (
        "do not train on this: try parallel.backend=gloo, or NCCL_P2P_DISABLE=1 with nccl, and report the faulty "
        "driver or link"
    )
    return [problem("World", f"all-reduces of known numbers give a wrong sum on {', '.join(wrong)}", fix)]


def judge_shared_folder(ranks: Sequence[RankMeasurement], *, is_needed: bool) -> list[Finding]:
    """Whether all ranks see the folder that rank 0 writes into."""
    if ranks[0].sees_output_dir is None:
        return []  # rank 0 has a finding of its own on it
    blind = [rank.name for rank in ranks if not rank.sees_output_dir]
    if not blind:
        return [ok("World", "all ranks see rank 0's output_dir")]
    judge = problem if is_needed else warning
    what = f"{', '.join(blind)} cannot see rank 0's output_dir, from which every rank reads when a run is resumed"
    return [judge("World", what, "set output_dir to a folder that all hosts mount at the same path (NFS, Lustre)")]


def judge_bandwidth(latency_seconds: float, bandwidths: Sequence[Bandwidth]) -> list[Finding]:
    """How fast gradients are summed.

    Args:
        latency_seconds: an all-reduce of one number.
        bandwidths: all-reduces of rising size.
    """
    found = [ok("Bandwidth", f"an all-reduce of one number takes {_ms(latency_seconds)} ms")]
    found += [
        ok(
            "Bandwidth",
            f"all-reduce of {each.num_bytes / 1e6:.0f} MB: {_ms(each.seconds)} ms, "
            f"algorithm {each.algorithm_gigabytes:.2f} GB/s, bus {each.bus_gigabytes:.2f} GB/s",
        )
        for each in bandwidths
    ]
    best = max(each.bus_gigabytes for each in bandwidths)
    if best < _SLOW_BUS_GIGABYTES:
        what = f"the network is slow: {best:.3f} GB/s at best is below 1 Gbit/s Ethernet"
        fix = (
            "name the fast network card (`ip -br addr`) in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; LoRA adapters "
            "bear a slow network best"
        )
        found.append(warning("Bandwidth", what, fix))
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"
