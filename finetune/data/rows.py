"""The rows of a split, read and checked on first use, with one error for all rows that cannot be used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import Any

from finetune.data.columns import CONTEXT, OTHER_NAMES, find_columns, propose_columns
from finetune.data.formats import (
    FORMATS_OF,
    Example,
    Format,
    Reads,
    detect_format,
    parse_row,
)
from finetune.data.readers import RawRow
from finetune.data.remote import RowSource
from finetune.data.splits import digest_row
from finetune.data.values import BadRowError
from finetune.errors import DataError
from finetune.units import counted

_log = logging.getLogger(__name__)

ROW_TYPE_NAMES = {
    "messages": "chat messages",
    "prompt_completion": "prompt and completion",
    "text": "plain text",
    "several": "several types",
    "preference": "pairs of answers",
    "labelled": "good and bad answers",
}
"""The row types, and their names in messages."""
_MAX_SHOWN = 5
_LABEL_WORDS = ("true", "false", "0", "1", "0.0", "1.0")


class RowProblems:
    """The rows of a source that cannot be used: all are counted, the first few are shown.

    Args:
        drops: leave them out (`data.on_bad_row=drop`) instead of refusing the source.
        can_drop: whether that setting would leave such rows out.
    """

    def __init__(self, *, drops: bool = False, can_drop: bool = True) -> None:
        self.count = 0
        self._drops, self._can_drop = drops, can_drop
        self._shown: list[str] = []
        self._reasons: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, place: str, problem: str) -> None:
        """Note a row."""
        self.count += 1
        if self.count <= _MAX_SHOWN:
            self._shown.append(f"  {place}: {problem}")
        actual, _, expected = problem.rpartition("; ")
        # What was found differs from row to row, unless it is a column that is not there.
        reason = expected if expected.startswith("expected") or not actual else actual
        self._reasons[reason] += 1
        self._first.setdefault(reason, place)

    def raise_if_any(self, label: str, num_rows: int) -> None:
        """Raise a DataError if a row was noted that is not dropped."""
        if not self.count or (self._drops and self.count < num_rows):
            return
        more = [f"  and {self.count - _MAX_SHOWN} more"] if self.count > _MAX_SHOWN else []
        head = f"{label}: {self.count} of {num_rows} rows cannot be used:"
        advice = "Correct or remove them, then start again"
        advice += ", or set data.on_bad_row=drop to leave them out." if self._can_drop and not self._drops else "."
        raise DataError("\n".join([head, *self._shown, *more, advice]))

    def describe(self) -> str:
        """Describe the rows that were left out: how many for each reason, and the first of each."""
        if not self.count:
            return ""
        reasons = (
            f"{count:,} ({reason}; first {self._first[reason]})" for reason, count in self._reasons.most_common()
        )
        return f"; left out (data.on_bad_row=drop): {', '.join(islice(reasons, _MAX_SHOWN))}"


class _OfRows:
    """Base class: a sequence over `rows`."""

    @cached_property
    def rows(self) -> list[Example]:
        """All rows."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Example:
        return self.rows[index]


class Examples(_OfRows):
    """The rows of one split. The file is read on first use, so that a run with cached data never parses it.

    Args:
        source: reads the rows.
        format: the name of a format; `auto` looks at the columns of the first row.
        columns: `data.columns`, which maps our name of a column to its name in the rows.
        max_rows: use only the first rows, at most this many.
        reads: what the objective reads of a row.
        drops: leave out rows that cannot be used, see `RowProblems`.

    Attributes:
        weight: how often each row is read in an epoch of a mixture.
        name: of the source in a mixture, different from the names of the others; otherwise empty.
        whole: all rows of the source, if this split has only some of them; otherwise this split itself.
        choose: returns the indices of this split's rows, given the `digest_row` of each row in `whole`; None: all rows.
        read_as: a description of the format and the columns; empty until the rows are read.
        unread: columns that belong to the prompt but are not read; empty until the rows are read.
        num_dropped: rows that were left out because they cannot be used; 0 until the rows are read.
    """

    def __init__(
        self,
        source: RowSource,
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
        *,
        reads: Reads = "answers",
        drops: bool = False,
    ) -> None:
        self.source = source
        self.format = format
        self.columns = columns or {}
        self.max_rows = max_rows
        self.reads = reads
        self.drops = drops
        self.weight = 1.0
        self.name = ""
        self.whole: Examples = self
        self.choose: Callable[[Sequence[str]], list[int]] | None = None
        self.read_as = ""
        self.unread: list[str] = []
        self.num_dropped = 0

    def with_choice(self, choose: Callable[[Sequence[str]], list[int]]) -> Examples:
        """Return a split with some of these rows. The source is read once for all its splits."""
        part = Examples(self.source, self.format, self.columns, self.max_rows, reads=self.reads, drops=self.drops)
        part.whole, part.choose = self.whole, choose
        return part

    @property
    def label(self) -> str:
        """The file or split as the user would name it."""
        return self.source.label

    @property
    def parts(self) -> tuple[Examples, ...]:
        """The sources of a split: this one."""
        return (self,)

    def check_format(self) -> None:
        """Raise a DataError if the first row that can be read has columns of no known format. Read no other row."""
        if self.format == "auto":
            _detect(self.source.rows(), self)

    def read(self) -> Iterator[Example]:
        """Read and check the rows of the whole source one by one, without keeping them.

        Raises:
            DataError: the file cannot be read or has no rows; or, after the last row, some of them cannot be used.
        """
        raw: Iterator[RawRow] = islice(self.source.rows(), self.max_rows)
        first = next(raw, None)
        if first is None:
            raise DataError(f"{self.label} has no rows. Put at least one in, or leave the split out.")
        raw = chain([first], raw)
        named = FORMATS_OF[self.reads].get(self.format)
        if named is not None and self.reads in ("answers", "labelled"):  # pairs and prompts are known by their columns
            _refuse_pair(first, self)
            return _read_examples(raw, named, self)
        known, leading = _detect(raw, self)
        return _read_examples(chain(leading, raw), known, self)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.rows) if "rows" in vars(self) or self.choose is not None else self.read()

    @cached_property
    def rows(self) -> list[Example]:
        """All rows, in memory. Raises the errors of `read`."""
        if self.choose is not None:
            rows = self.whole.rows
            return [rows[index] for index in self.choose([row.digest for row in rows])]
        return list(self.read())


class JoinedExamples(_OfRows):
    """The rows of a split that has several sources, one source after the other, each row once whatever its weight."""

    def __init__(self, parts: Sequence[Examples]) -> None:
        self.parts = tuple(parts)

    @property
    def label(self) -> str:
        """The sources as the user would name them."""
        return " + ".join(part.label for part in self.parts)

    @cached_property
    def rows(self) -> list[Example]:
        """All rows, see `Examples.rows`."""
        return [row for part in self.parts for row in part.rows]


def _detect(raw: Iterator[RawRow], examples: Examples) -> tuple[Format, list[RawRow]]:
    """Find the format by the columns of the first readable row. Returns it with the rows read so far."""
    leading: list[RawRow] = []
    for row in raw:
        leading.append(row)
        if isinstance(row.value, Mapping):
            _refuse_pair(row, examples)
            known = detect_format(row.value, examples.columns, examples.reads)
            if known is not None:
                return known, leading
            raise DataError(_unknown_columns(row, examples))
    first = next(iter(FORMATS_OF[examples.reads].values()))
    return first, leading  # no row could be read: each is reported with its own problem


def _refuse_pair(row: RawRow, examples: Examples) -> None:
    """Refuse rows of two answers: supervised training would learn neither of them, or turns that are no answers."""
    if examples.reads != "answers" or not isinstance(row.value, Mapping):
        return
    names_of = find_columns(row.value, examples.columns)
    if "rejected" in names_of and ("chosen" in names_of or names_of["rejected"] in OTHER_NAMES["rejected"]):
        names = " and ".join(names_of[side] for side in ("chosen", "rejected") if side in names_of)
        alone = (
            f"; or set data.columns.completion={names_of['chosen']} data.columns.rejected=none to learn the chosen "
            "answers"
            if {"prompt", "chosen"} <= names_of.keys()
            else ""
        )
        raise DataError(
            f"{examples.source.place(row.number)} has {names}: a pair of answers to compare, which supervised training "
            f"does not read. Set training.objective=dpo (or orpo, simpo) to learn from both{alone}."
        )


def _unknown_columns(row: RawRow, examples: Examples) -> str:
    names = list(map(str, row.value))
    expected = "; ".join(f"{name}: {' and '.join(known.needs)}" for name, known in FORMATS_OF[examples.reads].items())
    proposals = (propose_columns(names, known.needs) for known in FORMATS_OF[examples.reads].values())
    proposal = next((f", for example {proposal}" for proposal in proposals if proposal), "")
    return (
        f"{examples.source.place(row.number)} has the columns {', '.join(names) or 'none'}. Expected those of one "
        f"format ({expected}). Rename the columns, or name them in data.columns{proposal}."
    )


def _read_examples(raw: Iterable[RawRow], known: Format, examples: Examples) -> Iterator[Example]:
    source = examples.source
    columns = _Columns(known, examples)
    problems, broken = RowProblems(drops=examples.drops), RowProblems(can_drop=False)
    first: Example | None = None
    count = 0
    for row in raw:
        place = source.place(row.number)
        if row.problem is not None:
            broken.add(place, row.problem)
            continue
        try:
            example = parse_row(row.value, known, examples.columns)
            example = example._replace(source=place, number=row.number, digest=digest_row(row.value))
            if examples.reads == "prompts":
                example = example._replace(columns=row.value)
            first = first or example
            if example.is_of_texts != first.is_of_texts:
                raise BadRowError(
                    f"prompt or completion is {_how_written(example)}, while {first.source} has it as "
                    f"{_how_written(first)}; expected all rows alike"
                )
        except BadRowError as error:
            problems.add(place, str(error))
            continue
        count += 1
        columns.add(row.value, place)
        columns.has_turns |= example.row_type == "messages"
        yield example
    broken.raise_if_any(source.label, count + problems.count + broken.count)
    problems.raise_if_any(source.label, count + problems.count)
    assert first is not None  # there is a row, and not all have a problem
    note = columns.check(examples.label, count)
    if not examples.read_as:
        row_type = "messages" if columns.has_turns else first.row_type
        examples.read_as = (
            columns.describe(f"{counted(count, 'row')} of {ROW_TYPE_NAMES[row_type]}") + note + problems.describe()
        )
        examples.unread, examples.num_dropped = columns.unread(), problems.count
        _log.info("%s: %s", examples.label, examples.read_as)


class _Columns:
    """The columns of a source: which are read, and which are not."""

    def __init__(self, known: Format, examples: Examples) -> None:
        self._known, self._renamed, self._reads = known, examples.columns, examples.reads
        self._names: dict[str, str] = {}
        self._seen: dict[str, bool] = {}  # whether a cell of the column holds something
        self._booleans: dict[str, None] = {}
        self._labels: dict[str, _Labels] = {}
        self.has_turns = False

    def add(self, row: Mapping[str, Any], place: str) -> None:
        """Note the columns of a row."""
        columns = find_columns(row, self._renamed)
        self._names |= {column: own_name for column, own_name in columns.items() if column in self._known.columns}
        for name, value in row.items():
            self._seen[name] = self._seen.get(name, False) or bool(value)
            if isinstance(value, bool):
                self._booleans[name] = None
        if "label" in columns and "label" not in self._known.columns and self._reads != "prompts":
            name = columns["label"]
            self._labels.setdefault(name, _Labels(name)).add(row[name], place)

    def check(self, label: str, num_rows: int) -> str:
        """Refuse rows with labels that are not read, see `_Labels.check`."""
        return "".join(labels.check(label, num_rows) for labels in self._labels.values())

    def unread(self) -> list[str]:
        """Return the columns that hold a part of a prompt and are not read."""
        if self._known.name == "text" or self._reads == "prompts":
            return []
        return [name for name in CONTEXT if self._seen.get(name) and name not in self._used()]

    def describe(self, rows: str) -> str:
        """Describe on one line the number of rows, their format, the columns that were read, and those not used."""
        used = [name if column == name else f"{name} as {column}" for name, column in self._used().items()]
        others = [name for name in self._seen if name not in self._used()]
        heading = "columns for reward functions" if self._reads == "prompts" else "columns not used"
        described = ", ".join(map(self._describe_unused, others))
        note = f"; {heading}: {described}" if others else ""
        return f"{rows} (format {self._known.name}, columns {', '.join(used)}){note}"

    def _describe_unused(self, name: str) -> str:
        is_no_label = name not in self._booleans or name in self._labels or self._reads not in ("answers", "chosen")
        return name if is_no_label else f"{name} (true or false; data.columns.label={name} makes it the label)"

    def _used(self) -> dict[str, str]:
        """Our name of each column that is read, by its name in the rows."""
        return {name: column for column, name in self._names.items()}


class _Labels:
    """The values of a column that may mark answers as good or bad."""

    def __init__(self, column: str) -> None:
        self.column = column
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._is_boolean = False

    def add(self, label: object, place: str) -> None:
        """Count the label of a row. All texts that are no truth value count as one label."""
        word = str(label).strip().lower()
        if word in ("", "none"):
            return
        word = word if word in _LABEL_WORDS else "other"
        self._counts[word] += 1
        self._first.setdefault(word, place)
        self._is_boolean |= isinstance(label, bool)

    def check(self, label: str, num_rows: int) -> str:
        """Refuse rows that are marked as good or bad. Training would learn the bad answers like the good ones.

        The column holds booleans, or only the words true and false, since every cell of a CSV file is text. The numbers
        0 and 1 may also be the classes of a classification set, so such a column is left unused.

        Returns:
            A note for the log if the labels are 0 and 1, else nothing.

        Raises:
            DataError: the rows are marked.
        """
        labels = set(self._counts)
        if self._is_boolean or (labels and labels <= {"true", "false"}):
            first = "false" if "false" in labels else "true"
            raise DataError(
                f"{label}: the column {self.column} is true in {self._counts['true']:,} of {num_rows:,} rows and "
                f"false in {self._counts['false']:,}; the first {first} is {self._first[first]}. Supervised "
                "training and preference pairs do not use labels: answers marked false would be learned like the "
                f"others. Set training.objective=kto to learn from both, remove these rows and the column "
                f"{self.column}, or set data.columns.label=none to use every row whatever its label."
            )
        is_number = labels and labels <= {"0", "1", "0.0", "1.0"}
        column = self.column
        return f" ({column} is 0 or 1, which is not read as bad or good: every row is used)" if is_number else ""


def _how_written(example: Example) -> str:
    return "text" if example.is_of_texts else "a list of turns"
