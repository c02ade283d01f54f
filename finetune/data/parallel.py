"""Encode rows in several processes, in order.

Each process runs this module: it receives batches over a connection and sends tokens back. Unlike the processes of
multiprocessing it does not import the user's script. It ends with the connection, however the parent ended; the
processes of `datasets.map(num_proc=…)` outlive a parent that is killed. Each process has one batch at a time, and
batches are assigned in turn. So rows keep their order, and parent and process never wait for each other.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from finetune.data.formats import Example
from finetune.data.rendering import start_child
from finetune.data.templates import AnswerTokens, TokenisedRow, TrainOn, digest_tokenizer, encode_batch
from finetune.data.values import BadRowError
from finetune.errors import DataError
from finetune.threads import num_cores
from finetune.units import ceil_div

_log = logging.getLogger(__name__)

ROWS_AT_ONCE = 512
"""Rows of a batch: one call of the template and of the tokenizer."""
PAYS_FROM_CHARACTERS = 24_000_000
"""With less text, one process with the tokenizer's own threads is as fast: measured in docs/data.md."""
MOST_PROCESSES = 16
_ENDING_SECONDS = 5.0

Encoded = tuple[list[Example], list[TokenisedRow | BadRowError]]
"""A batch of rows, and each of them encoded."""


class WorkerLostError(RuntimeError):
    """An encoding process cannot be started, or has ended."""


def choose_processes(num_rows: int, characters: int, wanted: int | None) -> int:
    """Return the number of encoding processes: as many as wanted; otherwise one, or one per core if it pays."""
    num_batches = ceil_div(num_rows, ROWS_AT_ONCE)
    if wanted is not None:
        return min(wanted, num_batches)
    if num_batches < 2 or num_cores() < 2 or characters < PAYS_FROM_CHARACTERS:
        return 1
    return min(int(num_cores()), num_batches, MOST_PROCESSES)


@contextlib.contextmanager
def encode_in_processes(
    tokens: AnswerTokens, train_on: TrainOn, num_processes: int
) -> Iterator[Callable[[Iterable[list[Example]]], Iterator[Encoded]]]:
    """Start processes that encode while the block runs. The block gets a function from batches to encoded batches.

    Raises:
        WorkerLostError: also in the block: a process cannot start, ends, or reads another tokenizer from the files.
        DataError: the tokenizer lacks what the rows need.
    """
    workers: list[_Worker] = []
    try:
        with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as folder:
            start = _describe(tokens, train_on, folder)
            for _ in range(num_processes):
                workers.append(_Worker(start))  # if one cannot start, the others end below
            _log.info("encoding in %d processes", num_processes)
            yield lambda batches: _encode_in_turn(workers, batches)
    except OSError as error:
        raise WorkerLostError(f"a process that encodes was lost ({error})") from error
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


def _describe(tokens: AnswerTokens, train_on: TrainOn, folder: str) -> bytes:
    """Save the tokenizer, and describe it for a worker: its folder, its class, and the digest that it must have."""
    tokenizer = tokens.tokenizer
    tokenizer_class = type(tokenizer)
    if not tokenizer_class.__module__.startswith("transformers."):
        raise WorkerLostError(f"the tokenizer's class {tokenizer_class.__qualname__} is not one of transformers")
    tokenizer.save_pretrained(folder)
    about = {
        "folder": folder,
        "module": tokenizer_class.__module__,
        "class": tokenizer_class.__name__,
        "digest": digest_tokenizer(tokenizer),
        "template_name": tokens.template.name,
        "train_on": train_on,
    }
    return json.dumps(about).encode()


class _Worker:
    """An encoding process, and the connection to it."""

    def __init__(self, start: bytes) -> None:
        # One core each: the tokenizer's own threads would only stand in each other's way.
        self.process, self.connection = start_child("finetune.data.parallel", TOKENIZERS_PARALLELISM="false")
        self.connection.send_bytes(start)

    def send(self, batch: list[Example]) -> None:
        """Send a batch. The process must have none."""
        self.connection.send_bytes(json.dumps(batch).encode())

    def receive(self) -> list[TokenisedRow | BadRowError]:
        """Wait for the rows of the batch.

        Raises:
            WorkerLostError: the process has ended, or has another tokenizer.
            DataError: it refuses the batch as a whole.
        """
        answer = json.loads(self._receive_bytes())
        if "lost" in answer:
            raise WorkerLostError(answer["lost"])
        if "refused" in answer:
            raise DataError(answer["refused"])
        token_ids = array("i", self._receive_bytes())
        is_target = self._receive_bytes()
        problems = dict(answer["problems"])
        rows: list[TokenisedRow | BadRowError] = []
        start = 0
        for row, length in enumerate(answer["lengths"]):
            stop = start + length
            marked = TokenisedRow(token_ids[start:stop], bytearray(is_target[start:stop]))  # type: ignore[arg-type]
            rows.append(BadRowError(problems[row]) if row in problems else marked)
            start = stop
        return rows

    def end(self) -> None:
        """Wait for the process to end after its connection was closed, and kill it if it does not."""
        try:
            self.process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _receive_bytes(self) -> bytes:
        try:
            return self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            code = self.process.wait(_ENDING_SECONDS)
            raise WorkerLostError(f"process {self.process.pid} that encodes has ended with exit code {code}") from None


def _encode_until_it_ends(connection: Connection[Any, Any]) -> None:
    """Run a worker: encode batches until the connection ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        about = json.loads(connection.recv_bytes())
        tokenizer_class = getattr(importlib.import_module(about["module"]), about["class"])
        tokenizer = tokenizer_class.from_pretrained(about["folder"])
        tokens = (
            AnswerTokens(tokenizer, about["template_name"]) if digest_tokenizer(tokenizer) == about["digest"] else None
        )
        while True:
            batch = [Example(*fields) for fields in json.loads(connection.recv_bytes())]
            for content in _answer(batch, about, tokens):
                connection.send_bytes(content)


def _answer(batch: list[Example], about: dict[str, Any], tokens: AnswerTokens | None) -> Iterator[bytes]:
    """Yield the messages that answer a batch: problems and lengths, then token ids and targets of all good rows."""
    if tokens is None:
        why = f"a {about['class']} that is read from its own files is not equal to the one they were written from"
        yield json.dumps({"lost": why}).encode()
        return
    try:
        encoded = encode_batch(batch, tokens, about["train_on"])
    except DataError as error:
        yield json.dumps({"refused": str(error)}).encode()
        return
    problems = [(number, str(row)) for number, row in enumerate(encoded) if isinstance(row, BadRowError)]
    good = [None if isinstance(row, BadRowError) else row for row in encoded]
    lengths = [len(row.token_ids) if row else 0 for row in good]
    yield json.dumps({"problems": problems, "lengths": lengths}).encode()
    yield array("i", [token_id for row in good if row for token_id in row.token_ids]).tobytes()
    yield b"".join(bytes(row.is_target) for row in good if row)


if __name__ == "__main__":
    _encode_until_it_ends(Connection(int(sys.argv[1])))
