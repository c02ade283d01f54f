"""Read the record of a run's rows, and compare rows with it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

from finetune.limits import read_regular
from finetune.runs.row_record import EARLIER, FILES, MOST_BYTES, ROWS, TOKENS

if TYPE_CHECKING:
    from finetune.runs.folder import RunFolder

_SPLITS = ("train", "validation", "test")
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


def read_row_record(folder: RunFolder) -> RowRecord | None:
    """Read the record of a run's rows. Returns None, with a warning if the file is damaged, where there is none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(read_regular(folder.row_file, most=MOST_BYTES))
        named = {name: array for name, array in arrays.items() if name not in (ROWS, FILES)}
        digests = {name: {row.tobytes().hex() for row in array} for name, array in named.items()}
        trained = digests["train"] | digests[TOKENS] | digests[EARLIER]
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        _log.warning("%s cannot be read, so rows are not compared with it: %s", folder.row_file, error)
        return None
    return RowRecord({name: digests[name] for name in _SPLITS if name in digests}, trained)


def rows_of_earlier_starts(folder: RunFolder) -> AbstractSet[str]:
    """Return the digests of all rows that a run was trained on before it resumes; none if it has no checkpoint."""
    earlier = read_row_record(folder) if folder.checkpoint_steps() else None
    return earlier.trained if earlier else frozenset()
