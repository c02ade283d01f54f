"""Rows encoded by several processes, in order.

The processes are programs of ours that read batches from a pipe and write tokens to another (`encode_worker`): they
never import the user's script again, as multiprocessing's would, and they end when the pipe ends, however this process
ended. Each has one batch at a time and they are asked in turn, so the order of the rows is kept and no pipe can block
both of its ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from finetune.data.rows import BadRowError, Example
from finetune.data.templates import TokenisedRow, TrainOn
from finetune.data.tokenise import digest_tokenizer
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

PAYS_FROM_CHARACTERS = 24_000_000
"""Less text is encoded as soon by this process, whose tokenizer has threads of its own: measured in docs/data.md."""
MOST_PROCESSES = 16
_ENDING_SECONDS = 5.0

Encoded = tuple[list[Example], list[TokenisedRow | BadRowError]]


class WorkerLostError(RuntimeError):
    """A process that encodes cannot be started, or has ended."""


def choose_processes(rows: Sequence[Example], wanted: int | None, rows_at_once: int) -> int:
    """How many processes are to encode: as many as wanted; else one, or one a core where it pays."""
    num_batches = -(-len(rows) // rows_at_once)
    if wanted is not None:
        return min(wanted, num_batches)
    if num_batches < 2 or _num_cores() < 2:
        return 1
    characters = 0
    for row in rows:
        characters += sum(map(len, row.contents))
        if characters >= PAYS_FROM_CHARACTERS:
            return min(_num_cores(), num_batches, MOST_PROCESSES)
    return 1


@contextlib.contextmanager
def encode_in_processes(
    tokenizer: PreTrainedTokenizerBase, train_on: TrainOn, num_processes: int
) -> Iterator[Callable[[Iterable[list[Example]]], Iterator[Encoded]]]:
    """Processes that encode while the block runs: what it is given takes batches, and gives them back with their rows.

    Raises:
        WorkerLostError: in the block too: a process cannot start, ends, or has made another tokenizer of the files.
        DataError: the tokenizer lacks what the rows need.
    """
    workers: list[_Worker] = []
    try:
        with tempfile.TemporaryDirectory(prefix="finetune-tokenizer-") as folder:
            start = _describe(tokenizer, train_on, folder)
            workers += [_Worker(start) for _ in range(num_processes)]
            _log.info("encoding in %d processes", num_processes)
            yield lambda batches: _encode_in_turn(workers, batches)
    except OSError as error:
        raise WorkerLostError(f"a process that encodes was lost ({error})") from error
    finally:
        _end(workers)


def _num_cores() -> int:
    """The cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _encode_in_turn(workers: Sequence[_Worker], batches: Iterable[list[Example]]) -> Iterator[Encoded]:
    free = deque(workers)
    busy: deque[tuple[_Worker, list[Example]]] = deque()
    for batch in batches:
        if not free:
            worker, earlier = busy.popleft()
            yield earlier, worker.receive(len(earlier))
            free.append(worker)
        worker = free.popleft()
        worker.send(batch)
        busy.append((worker, batch))
    for worker, batch in busy:
        yield batch, worker.receive(len(batch))


def _describe(tokenizer: PreTrainedTokenizerBase, train_on: TrainOn, folder: str) -> bytes:
    """What a worker must know at its start: the tokenizer as files and by its class, and what it must be equal to."""
    kind = type(tokenizer)
    if not kind.__module__.startswith("transformers."):
        raise WorkerLostError(f"the tokenizer's class {kind.__qualname__} is not one of transformers")
    tokenizer.save_pretrained(folder)
    about = {
        "folder": folder,
        "module": kind.__module__,
        "class": kind.__name__,
        "digest": digest_tokenizer(tokenizer),
        "train_on": train_on,
    }
    return json.dumps(about).encode()


class _Worker:
    """One process and its two pipes."""

    def __init__(self, start: bytes) -> None:
        package = str(Path(__file__).resolve().parents[2])
        others = os.environ.get("PYTHONPATH")
        environment = os.environ | {
            "PYTHONPATH": f"{package}{os.pathsep}{others}" if others else package,
            # One core each: the tokenizer's own threads would only stand in each other's way.
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "finetune.data.encode_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        write_frame(self._pipe(self.process.stdin), start)

    def send(self, batch: list[Example]) -> None:
        """Give it a batch; it has none at the time."""
        rows = [
            [row.kind, row.source, row.messages, row.num_given, row.prompt, row.completion, row.text] for row in batch
        ]
        write_frame(self._pipe(self.process.stdin), json.dumps(rows).encode())

    def receive(self, num_rows: int) -> list[TokenisedRow | BadRowError]:
        """Wait for the rows of its batch.

        Raises:
            WorkerLostError: it has ended, or is not what it should be.
            DataError: it refuses the batch as a whole.
        """
        pipe = self._pipe(self.process.stdout)
        answer = json.loads(self._read(pipe))
        if "lost" in answer:
            raise WorkerLostError(answer["lost"])
        if "refused" in answer:
            raise DataError(answer["refused"])
        token_ids = array("i")
        token_ids.frombytes(self._read(pipe))
        is_target = self._read(pipe)
        problems = dict(answer["problems"])
        rows: list[TokenisedRow | BadRowError] = []
        start = 0
        for row, length in enumerate(answer["lengths"]):
            stop = start + length
            marked = TokenisedRow(token_ids[start:stop], bytearray(is_target[start:stop]))  # type: ignore[arg-type]
            rows.append(BadRowError(problems[row]) if row in problems else marked)
            start = stop
        assert len(rows) == num_rows
        return rows

    def _read(self, pipe: IO[bytes]) -> bytes:
        frame = read_frame(pipe)
        if frame is None:
            code = self.process.wait(_ENDING_SECONDS)
            raise WorkerLostError(f"process {self.process.pid} that encodes has ended with exit code {code}")
        return frame

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


def write_frame(pipe: IO[bytes], content: bytes) -> None:
    """Write bytes behind their number."""
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Read what `write_frame` wrote; None where the pipe has ended."""
    size = pipe.read(8)
    if len(size) < 8:
        return None
    content = pipe.read(int.from_bytes(size, "little"))
    return content if len(content) == int.from_bytes(size, "little") else None


def _end(workers: Iterable[_Worker]) -> None:
    """The end of its pipe ends a worker; one that does not see it is killed."""
    for worker in workers:
        for pipe in (worker.process.stdin, worker.process.stdout):
            with contextlib.suppress(OSError):  # what could not be written any more
                _close(pipe)
    for worker in workers:
        try:
            worker.process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _close(pipe: Any) -> None:
    if pipe is not None:
        pipe.close()
