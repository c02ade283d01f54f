"""Compute bytes and seconds of what is too large to measure here: the part `paper` of `benchmarks.scale`.

The seconds follow from the sizes and from the speeds below, which are assumptions about a good cluster. The speed of
SHA-256 on this machine is printed beside them. With N ranks or nodes, B bytes and a speed of S bytes per second:

- sum over a ring of N ranks: 2 (N - 1) / N * B / S + 2 (N - 1) * latency
- reading a base on N nodes from a shared disk: N * B / S
- a checkpoint through rank 0: B * (1 / network + 1 / copy from the GPU + 1 / SHA-256 + 1 / disk), tensor by tensor one
  after the other, and then B * (1 / disk + 1 / SHA-256) to verify it before older ones are removed
- the same with a file for each rank: B / N * (1 / copy + 2 / SHA-256) + 2 B / disk, since the disk is shared
- encoded rows of a file: (bytes of the file - header) / (5 bytes per token + 33 per row)
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

MODELS = {"14.7 billion": 14.7e9, "70 billion": 70e9}
"""Weights."""
NODE_RANKS = 8
NETWORK, SLOW_NETWORK = 50e9, 12.5e9
"""Bytes per second of a link: 400 and 100 Gbit/s."""
LATENCY = 10e-6
"""Seconds of a message."""
GPU_COPY = 25e9
DISKS = (2e9, 20e9)
"""Bytes per second of a file system that all nodes share: of one server, and of a parallel one."""
CHECKPOINT_BYTES = 12
"""Of a weight in full fine-tuning: itself and two moments of AdamW, in fp32."""
TERABYTE = 1e12
TOKENS_OF_A_ROW = 1000
HASHING = 1e9
"""Bytes per second of SHA-256 on one core."""
_HASHED_BYTES = 1 << 26
_ADAPTER_RANK = 16
_PHI4_SIDES = (5120 + 7680, 5120 + 5120, 5120 + 35840, 17920 + 5120)
"""Inputs plus outputs of the four adapted linear layers of each of phi-4's 40 layers."""
ADAPTER_BYTES = 4 * _ADAPTER_RANK * 40 * sum(_PHI4_SIDES)

Print = Callable[[Sequence[str], Sequence[Sequence[Any]]], None]


def paper(print_table: Print) -> None:
    """Print a table for each thing that is only computed."""
    print_table(["SHA-256 on one core of this machine, bytes per CPU second / 10^9"], [[hash_speed() / 1e9]])
    head = ["ranks", "counts and times, bytes a step", "adapter of phi-4 (r = 16), ms at 400 Gbit/s", "at 100 Gbit/s"]
    print_table([*head, "full gradients of phi-4 in fp32, s at 400 Gbit/s"], [sums(n) for n in (8, 64, 256, 1024)])
    nodes = [[n, *(n * 2 * weights / disk for weights in MODELS.values() for disk in DISKS)] for n in (1, 8, 32, 128)]
    print_table(["nodes", *(f"{model}, s at {disk / 1e9:.0f} GB/s" for model in MODELS for disk in DISKS)], nodes)
    head = [
        "weights",
        "GB",
        "disk, GB/s",
        "through rank 0, s",
        "of which hashing, s",
        "a file for each of 1,024 ranks, s",
    ]
    print_table(head, [checkpoint(model, disk) for model in MODELS for disk in DISKS])
    limits = [[f"{disk / 1e9:.0f}", *(most_weights(disk, minutes) / 1e9 for minutes in (3, 30))] for disk in DISKS]
    print_table(["disk, GB/s", "billions of weights saved through rank 0 in 3 minutes", "in 30 minutes"], limits)
    rows = encoded_rows()
    print_table(list(rows), [list(rows.values())])


def hash_speed() -> float:
    """Measure how many bytes a CPU second SHA-256 takes on this machine, the best of three."""
    data = bytes(_HASHED_BYTES)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        hashlib.sha256(data)
        seconds.append(time.process_time() - began)
    return _HASHED_BYTES / min(seconds)


def sums(ranks: int) -> list[Any]:
    """Return what the collectives of a step take. They sum 6 counts, then 3 numbers and the seconds of each rank."""

    def ring(num_bytes: float, speed: float) -> float:
        return 2 * (ranks - 1) / ranks * num_bytes / speed + 2 * (ranks - 1) * LATENCY

    times = [ring(ADAPTER_BYTES, speed) * 1e3 for speed in (NETWORK, SLOW_NETWORK)]
    return [ranks, 8 * (6 + 3 + ranks), *times, ring(4 * MODELS["14.7 billion"], NETWORK)]


def checkpoint(model: str, disk: float) -> list[Any]:
    """Return how long a checkpoint of full fine-tuning takes, through rank 0 and with a file for each rank."""
    size = MODELS[model] * CHECKPOINT_BYTES
    each = size / 1024 * (1 / GPU_COPY + 2 / HASHING) + 2 * size / disk
    return [model, round(size / 1e9), f"{disk / 1e9:.0f}", size * _seconds_of_a_byte(disk), 2 * size / HASHING, each]


def most_weights(disk: float, minutes: float) -> float:
    """Return how many weights rank 0 saves in so many minutes."""
    return 60 * minutes / (CHECKPOINT_BYTES * _seconds_of_a_byte(disk))


def encoded_rows() -> dict[str, Any]:
    """Return what a terabyte of encoded rows takes: of a process, lengths and examples, and two lists of the order."""
    rows = TERABYTE / (5 * TOKENS_OF_A_ROW + 33)
    table, order = 16 * rows, 2 * (8 + 32) * rows
    return {
        "rows of 1,000 tokens, millions": rows / 1e6,
        "table of a process, GB": table / 1e9,
        "its lists of an epoch's order, GB": order / 1e9,
        f"both on a node of {NODE_RANKS} ranks, GB": NODE_RANKS * (table + order) / 1e9,
        "digest and fingerprint at each start, minutes": 2 * TERABYTE / HASHING / 60,
    }


def _seconds_of_a_byte(disk: float) -> float:
    return 1 / NETWORK + 1 / GPU_COPY + 2 / HASHING + 2 / disk
