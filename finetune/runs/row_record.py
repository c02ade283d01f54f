"""The record of a run's rows: rows.safetensors in its folder, with 16 bytes for each row of each split.

The commands that read the data again compare its rows with the record. A training row has 16 bytes more, a digest of
its tokens, by which it is recognised even if a column was added to its file or the file has another format, and 24
bytes that say where it is from and how it was rendered (`ROW_FIELDS`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

from finetune.runs.durable import disk_failures_end_the_run, replace_file

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder

TOKENS, EARLIER = "train.tokens", "train.earlier"
ROWS, FILES = "rows", "files"
"""The training rows in their order, uint32 of shape (rows, fields), and the names of their files as JSON."""
ROW_FIELDS = ("file", "line", "tokens", "target_tokens", "rendered", "raw")
"""`rendered` is a digest of tokens and targets, `raw` of the row in its file: 32 bits each. `file` is an index."""
_BYTES = 16
MOST_BYTES = 1 << 31
"""Of a file that is read: more than 38 million training rows."""


def write_row_record(
    folder: RunFolder,
    splits: Mapping[str, Iterable[str]],
    tokens: Iterable[str],
    rows: Sequence[Any] = (),
    files: Sequence[str] = (),
    *,
    earlier: AbstractSet[str] = frozenset(),
) -> None:
    """Record the rows of a run that starts or resumes.

    `splits` has the `digest_row` of each row by split, `tokens` the digests of the tokens of the training rows. `rows`
    has an array for each of `ROW_FIELDS`, and `files` the names of the files. `earlier` has the rows of earlier starts,
    which stay recorded: see `rows_of_earlier_starts`.

    Raises:
        RunFailedError: the file cannot be written.
    """
    import numpy
    from safetensors.numpy import save

    recorded = {name: set(digests) for name, digests in splits.items()} | {TOKENS: set(tokens)}
    # Rows that earlier starts trained on and that this start does not have.
    recorded[EARLIER] = set(earlier) - recorded["train"] - recorded[TOKENS]
    arrays = {
        name: numpy.frombuffer(bytes.fromhex("".join(sorted(digests))), numpy.uint8).reshape(-1, _BYTES)
        for name, digests in recorded.items()
    }
    if len(rows):
        arrays[ROWS] = numpy.stack([numpy.asarray(column) & 0xFFFFFFFF for column in rows], 1).astype(numpy.uint32)
        arrays[FILES] = numpy.frombuffer(json.dumps(files).encode(), numpy.uint8)
    with disk_failures_end_the_run("Writing", folder.row_file):
        replace_file(folder.row_file, save(arrays))
