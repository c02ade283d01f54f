"""Encode rows in several processes, in order.

Each process runs this module: it receives batches over a connection and sends tokens back. It has one batch at a time,
and batches are assigned in turn. So rows keep their order, and parent and process never wait for each other.

`multiprocessing.Pool` is not used: its processes import the user's script again, and `imap` waits for ever if one of
them is killed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from finetune.data.formats import Example
from finetune.data.rendering import start_child
from finetune.data.templates import AnswerTokens, TokenisedRow, TrainOn, encode_batch
from finetune.data.values import BadRowError
from finetune.errors import DataError

_log = logging.getLogger(__name__)

_ENDING_SECONDS = 5.0

Encoded = tuple[list[Example], list[TokenisedRow | BadRowError]]
"""A batch of rows, and each of them encoded."""


class WorkerLostError(RuntimeError):
    """An encoding process cannot be started, or has ended."""


@contextlib.contextmanager
def encode_in_processes(
    tokens: AnswerTokens, train_on: TrainOn, num_processes: int
) -> Iterator[Callable[[Iterable[list[Example]]], Iterator[Encoded]]]:
    """Start processes that encode while the block runs. The block gets a function from batches to encoded batches.

    Raises:
        WorkerLostError: also in the block: a process cannot start, or has ended.
        DataError: the tokenizer lacks what the rows need.
    """
    tokenizer_class = type(tokens.tokenizer)
    if not tokenizer_class.__module__.startswith("transformers."):
        raise WorkerLostError(f"the tokenizer's class {tokenizer_class.__qualname__} is not one of transformers")
    workers: list[_Worker] = []
    try:
        for _ in range(num_processes):
            workers.append(_Worker(tokens, train_on))  # if one cannot start, the others end below
        _log.info("encoding in %d processes", num_processes)
        yield partial(_encode_in_turn, workers)
    finally:
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.end()


def _encode_in_turn(workers: Sequence[_Worker], batches: Iterable[list[Example]]) -> Iterator[Encoded]:
    free = deque(workers)
    busy: deque[tuple[_Worker, list[Example]]] = deque()
    for batch in batches:
        if not free:
            worker, earlier = busy.popleft()
            yield earlier, worker.receive()
            free.append(worker)
        worker = free.popleft()
        worker.send(batch)
        busy.append((worker, batch))
    for worker, batch in busy:
        yield batch, worker.receive()


class _Worker:
    """An encoding process, and the connection to it."""

    def __init__(self, tokens: AnswerTokens, train_on: TrainOn) -> None:
        try:
            # One core each: the tokenizer's own threads would only stand in each other's way.
            self.process, self.connection = start_child("finetune.data.parallel", TOKENIZERS_PARALLELISM="false")
        except OSError as error:
            raise WorkerLostError(f"a process that encodes cannot start ({error})") from error
        self.send((tokens, train_on))

    def send(self, message: Any) -> None:
        """Send a batch. The process must have none."""
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerLostError(f"a process that encodes was lost ({error})") from error

    def receive(self) -> list[TokenisedRow | BadRowError]:
        """Wait for the rows of the batch.

        Raises:
            WorkerLostError: the process has ended.
            DataError: it refuses the batch as a whole.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait(_ENDING_SECONDS)
            raise WorkerLostError(f"process {self.process.pid} that encodes has ended with exit code {code}") from None
        if isinstance(answer, DataError):
            raise answer
        rows: list[TokenisedRow | BadRowError] = answer
        return rows

    def end(self) -> None:
        """Wait for the process to end after its connection was closed, and kill it if it does not."""
        try:
            self.process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _encode_until_it_ends(connection: Connection[Any, Any]) -> None:
    """Run a worker: encode batches until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        tokens, train_on = connection.recv()
        while True:
            batch = connection.recv()
            try:
                rows: Any = [
                    # An array takes a quarter of the bytes of a list.
                    row if isinstance(row, BadRowError) else row._replace(token_ids=array("i", row.token_ids))
                    for row in encode_batch(batch, tokens, train_on)
                ]
            except DataError as error:
                rows = error
            connection.send(rows)


if __name__ == "__main__":
    _encode_until_it_ends(Connection(int(sys.argv[1])))
