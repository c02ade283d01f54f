"""The record of a run's rows: rows.safetensors in its folder, with 16 bytes for each row of each split.

The commands that read the data again compare its rows with the record. A training row has 16 bytes more, a digest of
its tokens, by which it is recognised even if a column was added to its file or the file has another format, and 24
bytes that say where it is from and how it was rendered (`ROW_FIELDS`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.limits import read_regular
from finetune.runs.durable import disk_failures_end_the_run, replace_file

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder

_SPLITS = ("train", "validation", "test")
_TOKENS, _EARLIER = "train.tokens", "train.earlier"
ROWS, FILES = "rows", "files"
"""The training rows in their order, uint32 of shape (rows, fields), and the names of their files as JSON."""
ROW_FIELDS = ("file", "line", "tokens", "target_tokens", "rendered", "raw")
"""`rendered` is a digest of tokens and targets, `raw` of the row in its file: 32 bits each. `file` is an index."""
_BYTES = 16
MOST_BYTES = 1 << 31
"""Of a file that is read: more than 38 million training rows."""
_log = logging.getLogger(__name__)


class RowChanges(NamedTuple):
    """How the rows of the data differ from those that the run recorded."""

    missing: int
    """Recorded rows that the data no longer has."""
    new: int
    """Rows of the data that are not recorded."""

    def __str__(self) -> str:
        """Return a clause for a message."""
        return f"recorded rows that are missing: {self.missing:,}, new rows: {self.new:,}"


class RowRecord(NamedTuple):
    """The rows of a run, as digests in hex text."""

    splits: Mapping[str, AbstractSet[str]]
    """The `digest_row` of each row, by split."""
    trained: AbstractSet[str]
    """The digests of all rows that the run was ever trained on: `digest_row`, and the digests of their tokens."""

    def compare(self, rows: Iterable[str]) -> RowChanges:
        """Compare the rows of all splits with the recorded ones."""
        now, before = set(rows), set[str]().union(*self.splits.values())
        return RowChanges(missing=len(before - now), new=len(now - before))


def write_row_record(
    folder: RunFolder,
    splits: Mapping[str, Iterable[str]],
    tokens: Iterable[str],
    rows: Sequence[Any] = (),
    files: Sequence[str] = (),
) -> None:
    """Record the rows of a run that starts or resumes. Training rows of earlier starts stay recorded.

    `splits` has the `digest_row` of each row by split, `tokens` the digests of the tokens of the training rows. `rows`
    has an array for each of `ROW_FIELDS`, and `files` the names of the files.

    Raises:
        RunFailedError: the file cannot be written.
    """
    import numpy
    from safetensors.numpy import save

    earlier = read_row_record(folder) if folder.checkpoint_steps() else None
    recorded = {name: set(digests) for name, digests in splits.items()} | {_TOKENS: set(tokens)}
    # Rows that earlier starts trained on and that this start does not have.
    recorded[_EARLIER] = set(earlier.trained if earlier else ()) - recorded["train"] - recorded[_TOKENS]
    arrays = {
        name: numpy.frombuffer(bytes.fromhex("".join(sorted(digests))), numpy.uint8).reshape(-1, _BYTES)
        for name, digests in recorded.items()
    }
    if len(rows):
        arrays[ROWS] = numpy.stack([numpy.asarray(column) & 0xFFFFFFFF for column in rows], 1).astype(numpy.uint32)
        arrays[FILES] = numpy.frombuffer(json.dumps(files).encode(), numpy.uint8)
    with disk_failures_end_the_run("Writing", folder.row_file):
        replace_file(folder.row_file, save(arrays))


def read_row_record(folder: RunFolder) -> RowRecord | None:
    """Read the record of a run's rows. Returns None, with a warning if the file is damaged, where there is none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(read_regular(folder.row_file, most=MOST_BYTES))
        named = {name: array for name, array in arrays.items() if name not in (ROWS, FILES)}
        digests = {name: {row.tobytes().hex() for row in array} for name, array in named.items()}
        trained = digests["train"] | digests[_TOKENS] | digests[_EARLIER]
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        _log.warning("%s cannot be read, so rows are not compared with it: %s", folder.row_file, error)
        return None
    return RowRecord({name: digests[name] for name in _SPLITS if name in digests}, trained)
