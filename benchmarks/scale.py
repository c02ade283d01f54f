"""Measure what grows with the number of ranks, and compute what is too large to measure; docs/scale.md has the results.

    python -m benchmarks.scale                              # everything, about five minutes on two cores
    python -m benchmarks.scale rendezvous --ranks 64 256    # one part, with other sizes
    python -m benchmarks.scale paper                        # benchmarks/scale_paper.py: what is only computed

All ranks run on this machine, so the times are upper bounds: on a cluster each rank has cores of its own. The package's
own code runs in all of them. A rank is a thread, except rank 0 and the one that is killed, which are processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import psutil

from benchmarks.scale_paper import paper
from finetune.distributed.guardian.faults import HEARTBEAT_SECONDS, TICK_SECONDS, Position
from finetune.distributed.guardian.hub import hello
from finetune.distributed.guardian.link import Peer
from finetune.distributed.watchdog import Watchdog

RANKS = (64, 256, 1024)
ROWS = (16, 256, 4096, 16384, 65536)
_NUM_PROCESSES = 4
"""Processes that share the threads of all ranks but rank 0."""
_THREAD_BYTES = 1 << 18
_LIMIT = timedelta(minutes=10)


@dataclass
class Child:
    """A forked process, and the end of a pipe from which its answers are read."""

    pid: int
    answers: Any

    def answer(self) -> Any:
        """Wait for the next answer."""
        line = self.answers.readline()
        if not line:
            raise SystemExit(f"process {self.pid} of the benchmark has ended without an answer")
        return json.loads(line)

    def end(self) -> None:
        """Kill the process."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.answers.close()


def fork(work: Callable[[Callable[[Any], None]], None]) -> Child:
    """Run `work` in a forked process, which has imported all already. Its argument sends an answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Child(pid, os.fdopen(reader))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        work(lambda answer: _write(writer, json.dumps(answer).encode() + b"\n"))
        threading.Event().wait()  # until it is killed
    finally:
        os._exit(1)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def in_threads(ranks: Sequence[int], run: Callable[[int], Any]) -> list[Any]:
    """Run each rank in a thread, and return the results in their order."""
    with ThreadPoolExecutor(len(ranks) or 1) as threads:
        return list(threads.map(run, ranks))


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Return the part of a core that a process takes for so many seconds."""
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / seconds


def rendezvous(ranks: Sequence[int], seconds: float) -> None:
    """Let ranks join at a store, read rank 0's verdict and exchange notes, as `initialize_ddp` does."""
    import finetune.distributed.rendezvous  # noqa: F401  # before the forks, since it imports torch

    rows = []
    for world_size in ranks:
        port = _free_port()
        begin = time.monotonic()
        first = fork(lambda send, n=world_size, p=port: send(join(0, n, p)))  # type: ignore[misc]
        shares = [range(1 + part, world_size, _NUM_PROCESSES) for part in range(_NUM_PROCESSES)]
        run = partial(join, world_size=world_size, port=port)
        others = [fork(lambda send, s=share, r=run: send(in_threads(s, r))) for share in shares]  # type: ignore[misc]
        times = [first.answer(), *(rank for child in others for rank in child.answer())]
        process = psutil.Process(first.pid)
        joined, decided, exchanged = (max(values) - begin for values in zip(*times, strict=True))
        files, busy = process.num_fds(), sum(process.cpu_times()[:2])
        rows.append([world_size, joined, decided, exchanged, busy, files, f"{cpu_share(process, seconds):.1%}"])
        for child in (first, *others):
            child.end()
    head = ["ranks", "all have joined, s", "all know the verdict, s", "all have all notes, s"]
    _print([*head, "rank 0's CPU until then, s", "its open files", "its CPU afterwards, of a core"], rows)


def join(rank: int, world_size: int, port: int) -> list[float]:
    """Join as one rank, and return when it had joined, knew the verdict and had the notes of all."""
    from finetune.distributed.environment import read_environment
    from finetune.distributed.rendezvous import Rendezvous, Verdict

    variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    place = {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    joining = Rendezvous(read_environment(place), _LIMIT)
    _joined.append(joining)
    times = [time.monotonic()]
    if rank == 0:
        missing = joining.wait_for_all()
        if missing is not None:
            raise SystemExit(missing)
    joining.share_verdict(Verdict("together"))
    times.append(time.monotonic())
    note = json.dumps(["cuda with nccl", f"{socket.gethostname()}/GPU-{rank:032x}", "10.0.0.1"])
    notes = joining.exchange("device", note, _LIMIT.total_seconds())
    assert len(notes) == world_size
    return [*times, time.monotonic()]


_joined: list[Any] = []
"""What keeps the stores of this process open."""


def guardians(ranks: Sequence[int], seconds: float) -> None:
    """Connect a guardian for each rank with rank 0's, kill the worker of rank 1, and wait until all know."""
    rows = []
    for world_size in ranks:
        begin = time.monotonic()
        first = fork(partial(watched, 0, world_size, None))
        hub = first.answer()
        victim = fork(partial(watched, 1, world_size, hub))
        shares = [range(2 + part, world_size, _NUM_PROCESSES) for part in range(_NUM_PROCESSES)]
        others = [fork(partial(links, share, hub)) for share in shares]
        victim.answer()
        connected = first.answer() - begin
        guardian = psutil.Process(first.pid).children()[0]
        share, files, memory = cpu_share(guardian, seconds), guardian.num_fds(), guardian.memory_info().rss
        killed_at = time.monotonic()
        victim.end()
        answers = [answer for child in others for answer in child.answer()]
        assert {text for _, text in answers} == {answers[0][1]}, "the ranks name different faults"
        times = [at - killed_at for at, _ in answers]
        for child in (first, *others):
            child.end()
        rows.append(
            [world_size, connected, statistics.median(times), max(times), files, f"{share:.1%}", round(memory / 1e6)]
        )
    head = ["ranks", "all connected, s", "half of them know of the kill, s", "all know, s"]
    _print([*head, "open files of rank 0's guardian", "its CPU, of a core", "its memory, MB"], rows)


def watched(rank: int, world_size: int, hub: Any, send: Callable[[Any], None]) -> None:
    """Be a watched rank of a run. Rank 0 sends where its guardian listens, and each rank when all are connected."""

    def broadcast(own: Any) -> Any:
        if rank == 0:
            send(own)
        return own if rank == 0 else hub

    place = {"rank": rank, "world_size": world_size, "master_addr": "127.0.0.1"}
    _kept.append(Watchdog(**place, broadcast=broadcast, last_words=lambda _: None))
    send(time.monotonic())


_kept: list[Watchdog] = []


def links(ranks: Sequence[int], hub: Any, send: Callable[[Any], None]) -> None:
    """Be the links of these ranks until they know of a fault; send when each of them knew, and of what.

    These are not whole guardians: a thousand of them on one machine would each ask for the state of a process.
    """
    place, _ = hub

    def guard(rank: int) -> tuple[float, str]:
        connection = socket.create_connection((place["addresses"][0], place["port"]))
        connection.sendall(hello(place["token"], rank))
        link, next_beat = Peer(connection), 0.0
        while True:
            for message in link.hear(0.0):
                if "fault" in message:
                    return time.monotonic(), str(message["fault"])
            if time.monotonic() >= next_beat:
                link.send({"position": asdict(Position())})
                next_beat = time.monotonic() + HEARTBEAT_SECONDS
            time.sleep(TICK_SECONDS)

    send(in_threads(ranks, guard))


def split(rows: Sequence[int]) -> None:
    """Split global batches of rows of 20 to 500 tokens, and assign them to 1,024 ranks. A fifth share a prefix."""
    import numpy

    from finetune.engine.prefixes import assign_to_ranks, split_global_batch

    table = []
    for number in rows:
        rng = numpy.random.default_rng(number)
        prompts = [rng.integers(0, 30_000, 100) for _ in range(8)]
        tokens = [rng.integers(0, 30_000, rng.integers(20, 500)) for _ in range(number)]
        shared = [
            numpy.concatenate([random.Random(i).choice(prompts), row]) if i % 5 == 0 else row
            for i, row in enumerate(tokens)
        ]
        began = time.process_time()
        groups = split_global_batch(shared, max_rows=64, max_tokens=4096)
        cut = time.process_time()
        assign_to_ranks([group.num_tokens for group in groups], max(RANKS))
        ended = time.process_time()
        table.append([number, len(groups), cut - began, (cut - began) / number * 1e6, ended - cut])
    _print(["rows", "micro-batches", "split, CPU s", "of a row, µs", f"assign to {max(RANKS):,} ranks, CPU s"], table)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _print(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table in Markdown."""
    lines = [head, ["---:"] * len(head), *([_cell(value) for value in row] for row in rows)]
    sys.stdout.write("".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n")
    sys.stdout.flush()


def _cell(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


PARTS = ("rendezvous", "guardians", "split", "paper")


def main(words: Sequence[str]) -> int:
    """Print a table for each part."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description="What grows with the ranks")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="of the rendezvous and of the guardians")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, help="of a global batch that is split")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the CPU of rank 0 is measured")
    parser.add_argument("--open-files", type=int, help="limit of this process and of all ranks; default: the highest")
    wish = parser.parse_args(words)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wish.open_files or most, most))
    # torch looks up the name of each peer; one lost answer of a name server would stop the store for 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    threading.stack_size(_THREAD_BYTES)
    run: dict[str, Callable[[], None]] = {
        "rendezvous": partial(rendezvous, wish.ranks, wish.seconds),
        "guardians": partial(guardians, wish.ranks, wish.seconds),
        "split": partial(split, wish.rows),
        "paper": partial(paper, _print),
    }
    for part in wish.parts or PARTS:
        sys.stdout.write(f"{part} ({os.cpu_count()} cores, {time.strftime('%Y-%m-%d')})\n\n")
        run[part]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
