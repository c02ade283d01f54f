"""The rows of a split, read and checked on first use, with one error for all rows that cannot be used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice

from finetune.data.formats import FORMATS, LABELLED, PROMPTS, Example, Format, RowType, detect_format, parse_row
from finetune.data.held_out import digest_row
from finetune.data.readers import RawRow
from finetune.data.remote import RowSource
from finetune.data.values import BadRowError
from finetune.errors import DataError

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
    """The rows of a split that cannot be used: all are counted, the first few are shown."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, place: str, problem: str) -> None:
        """Note a row."""
        self.count += 1
        if self.count <= _MAX_SHOWN:
            self._shown.append(f"  {place}: {problem}")

    def raise_if_any(self, label: str, num_rows: int) -> None:
        """Raise a DataError if a row was noted."""
        if not self.count:
            return
        more = [f"  and {self.count - _MAX_SHOWN} more"] if self.count > _MAX_SHOWN else []
        head = f"{label}: {self.count} of {num_rows} rows cannot be used:"
        raise DataError("\n".join([head, *self._shown, *more, "Correct or remove them, then start again."]))


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
        columns: our names of columns to theirs, if they differ.
        max_rows: use only this many rows, from the first on.

    Attributes:
        weight: the number of times that each row comes in an epoch of a mixture.
        name: of the source in a mixture, different from the names of the others; otherwise empty.
        whole: all rows of the source, if this split has only some of them; otherwise this split itself.
        choose: returns the indices of this split's rows, given the `digest_row` of each row in `whole`; None: all rows.
        read_as: a description of the format and the columns; empty until the rows are read.
    """

    def __init__(
        self,
        source: RowSource,
        format: str = "auto",
        columns: Mapping[str, str] | None = None,
        max_rows: int | None = None,
    ) -> None:
        self.source = source
        self.format = format
        self.columns = columns or {}
        self.max_rows = max_rows
        self.weight = 1.0
        self.name = ""
        self.whole: Examples = self
        self.choose: Callable[[Sequence[str]], list[int]] | None = None
        self.read_as = ""

    def taking(self, choose: Callable[[Sequence[str]], list[int]]) -> Examples:
        """Return a split with some of these rows. The source is read once for all its splits."""
        part = Examples(self.source, self.format, self.columns, self.max_rows)
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
        if self.format != "auto":
            known = {LABELLED.name: LABELLED, PROMPTS.name: PROMPTS, **FORMATS}[self.format]
            return _read_examples(raw, known, self)
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
            known = detect_format(row.value, examples.columns)
            if known is not None:
                return known, leading
            raise DataError(_unknown_columns(row, examples))
    return FORMATS["messages"], leading  # no row could be read: each is reported with its own problem


def _unknown_columns(row: RawRow, examples: Examples) -> str:
    found = list(map(str, row.value))
    expected = "; ".join(f"{name}: {' and '.join(known.needs)}" for name, known in FORMATS.items())
    example = f"data.columns.prompt={found[0]}" if found else "data.columns.prompt=question"
    return (
        f"{examples.source.place(row.number)} has the columns {', '.join(found) or 'none'}. Expected those of one "
        f"format ({expected}). Rename the columns, or name them in data.columns, for example {example}."
    )


def _read_examples(raw: Iterable[RawRow], known: Format, examples: Examples) -> Iterator[Example]:
    source, columns = examples.source, examples.columns
    labels = _Labels(columns.get("label", "label"))
    problems = RowProblems()
    seen: dict[str, None] = {}
    first: Example | None = None
    count = 0
    for row in raw:
        place = source.place(row.number)
        try:
            if row.problem is not None:
                raise BadRowError(row.problem)
            example = parse_row(row.value, known, columns)
            example = example._replace(source=place, number=row.number, digest=digest_row(row.value))
            if known is PROMPTS:
                example = example._replace(columns=row.value)
            first = first or example
            if example.row_type != first.row_type:
                raise BadRowError(
                    f"prompt or completion is {_how_written(example.row_type)}, while {first.source} has it as "
                    f"{_how_written(first.row_type)}; expected all rows alike"
                )
        except BadRowError as error:
            problems.add(place, str(error))
            continue
        count += 1
        labels.add(row.value.get(labels.column), place)
        seen.update(dict.fromkeys(row.value))
        yield example
    problems.raise_if_any(source.label, count + problems.count)
    assert first is not None  # there is a row, and none has a problem
    is_read = labels.column in (columns.get(name, name) for name in (*known.needs, *known.may_have))
    note = labels.check(examples.label, count) if labels.column in seen and not is_read else ""
    if not examples.read_as:
        examples.read_as = _describe(known, columns, f"{count} rows of {ROW_TYPE_NAMES[first.row_type]}", seen) + note
        _log.info("%s: %s", examples.label, examples.read_as)
        if "system" in seen and known.name == "messages":
            _log.warning(
                "%s: the column system is not used, because rows with messages have their system turn among them",
                examples.label,
            )


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


def _how_written(row_type: RowType) -> str:
    return "a list of turns" if row_type == "messages" else "text"


def _describe(known: Format, columns: Mapping[str, str], rows: str, seen: Collection[str]) -> str:
    """Describe on one line the number of rows, their format, the columns that were read, and those not used."""
    theirs = {columns.get(name, name): name for name in (*known.needs, *known.may_have)}
    used = [name if theirs[name] == name else f"{name} as {theirs[name]}" for name in theirs if name in seen]
    others = [str(name) for name in seen if name not in theirs]
    what = "columns for reward functions" if known is PROMPTS else "columns not used"
    note = f"; {what}: {', '.join(others)}" if others else ""
    return f"{rows} (format {known.name}, columns {', '.join(used)}){note}"
