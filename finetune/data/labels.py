"""Count the cells of columns that mark rows, and that a run does not read: labels of answers, and names of splits."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from finetune.data.column_advice import ReadRows, advise_on_labels
from finetune.data.columns import LABEL_WORDS, meaning_of, show_names
from finetune.data.preference_formats import LABELS
from finetune.data.readers import RawRow
from finetune.data.splits import SPLIT_NAMES
from finetune.errors import DataError


def column_of_marks(name: str) -> LabelColumn | SplitColumn:
    """Return the counts of a column, which are empty at first."""
    return SplitColumn(name) if meaning_of(name) == "split" else LabelColumn(name)


class SplitColumn:
    """The values of a column that may name the split of each row.

    Attributes:
        is_unread: whether the column names several splits, and the user has not said that this is meant.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self.is_unread = False
        self._counts: Counter[str] = Counter()

    def add(self, row: RawRow, place: str) -> None:
        """Count the split that a row is marked with."""
        word = str(row.value[self.column]).strip().lower()
        self._counts.update(split for split, usual in SPLIT_NAMES.items() if word in usual)

    def check(self, examples: ReadRows, label: str, num_rows: int) -> str:
        """Return a note for the log if the column names several splits, else nothing."""
        self.is_unread = len(self._counts) > 1 and examples.columns.get("split") != "none"
        named = " and ".join(f"{split} in {count:,}" for split, count in self._counts.most_common())
        return f" ({show_names([self.column])} names {named}, which is not read)" if self.is_unread else ""


class LabelColumn:
    """The values of a column that may mark answers as good or bad."""

    def __init__(self, column: str) -> None:
        self.column = column
        self._counts: Counter[str] = Counter()
        self._first: dict[str, tuple[str, RawRow]] = {}
        self._is_boolean = False

    def add(self, row: RawRow, place: str) -> None:
        """Count the label of a row. All texts that are no label count as one."""
        label = row.value[self.column]
        word = str(label).strip().lower()
        if word in ("", "none"):
            return
        word = word if word in LABELS else "other"
        self._counts[word] += 1
        self._first.setdefault(word, (place, row))
        self._is_boolean |= isinstance(label, bool)

    @property
    def is_unread(self) -> bool:
        """Whether all labels are 0, 1 or -1: good and bad, or the classes of a classification set."""
        return bool(self._counts) and self._counts.keys() <= LABELS.keys() and not self._are_sure

    @property
    def _are_sure(self) -> bool:
        return self._is_boolean or (bool(self._counts) and self._counts.keys() <= {*chain(*LABEL_WORDS)})

    def check(self, examples: ReadRows, label: str, num_rows: int) -> str:
        """Refuse rows that are marked as good or bad. Training would learn the bad answers like the good ones.

        The column holds booleans, or only the words true and false, or good and bad. Numbers may also be the classes of
        a classification set, so such a column is left unused.

        Returns:
            A note for the log if the labels are numbers, else nothing.

        Raises:
            DataError: the rows are marked.
        """
        column = self.column
        if not self._are_sure:
            numbers = sorted(self._counts, key=float) if self.is_unread else []
            named = " or ".join(numbers)
            return f" ({column} is {named}, which is not read as bad or good: every row is used)" if numbers else ""
        good, bad = next((pair for pair in LABEL_WORDS if self._counts.keys() & {*pair}), LABEL_WORDS[0])
        first = bad if bad in self._first else good
        place, row = self._first[first]
        raise DataError(
            f"{label}: the column {column} is {good} in {self._counts[good]:,} of {num_rows:,} rows and {bad} "
            f"in {self._counts[bad]:,}; the first {first} is {place}. {advise_on_labels(row, examples, column, bad)}"
        )
