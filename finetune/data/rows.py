"""The rows of a split, read and checked on first use, with one error for all rows that cannot be used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING

from finetune.data.columns import LABEL_WORDS, MEANINGS, NO_LABELS, find_columns, may_be_unread, meaning_of, show_names
from finetune.data.formats import FORMATS, Example, Format, Reads, detect_format, find_unread, parse_row
from finetune.data.readers import RawRow, RowSource
from finetune.data.splits import digest_row
from finetune.data.values import BadRowError
from finetune.errors import DataError
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.data.labels import LabelColumn, SplitColumn

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
_MAX_PLACES = 3


class RowProblems:
    """The rows of a source that cannot be used: all are counted, and each reason is shown once with its first rows.

    Args:
        drops: leave them out (`data.on_bad_row=drop`) instead of refusing the source.
        can_drop: whether that setting would leave such rows out.
    """

    def __init__(self, *, drops: bool = False, can_drop: bool = True) -> None:
        self.count = 0
        self._drops, self._can_drop = drops, can_drop
        self._problems: dict[str, str] = {}
        self._reasons: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def add(self, place: str, problem: str) -> None:
        """Note a row."""
        self.count += 1
        actual, _, expected = problem.rpartition("; ")
        # What was found differs from row to row, unless it is a column that is not there.
        reason = expected if expected.startswith("expected") or not actual else actual
        self._reasons[reason] += 1
        self._problems.setdefault(reason, problem)
        places = self._places.setdefault(reason, [])
        if len(places) < _MAX_PLACES:
            places.append(place)

    def raise_if_any(self, label: str, num_rows: int, proposal: str = "", way: str = "") -> None:
        """Raise a DataError if a row was noted that is not dropped.

        `proposal` is what can be set if all rows were noted, and `way` a sentence on how to read them as they are.
        """
        if not self.count or (self._drops and self.count < num_rows):
            return
        shown = []
        for reason, problem in islice(self._problems.items(), _MAX_SHOWN):
            others = self._reasons[reason] - len(self._places[reason])
            places = ", ".join(self._places[reason]) + (f" and {others:,} more" if others else "")
            shown.append(f"  {places}: {problem}")
        num_left = self.count - sum(self._reasons[reason] for reason in islice(self._problems, _MAX_SHOWN))
        more = [f"  and {num_left:,} more for other reasons"] if num_left else []
        head = f"{label}: {self.count} of {num_rows} rows cannot be used:"
        advice = f"{way} Or correct or remove them" if way else "Correct or remove them, then start again"
        if self.count < num_rows:
            proposal = "data.on_bad_row=drop to leave them out" if self._can_drop else ""
        advice += f", or set {proposal}." if proposal else "."
        raise DataError("\n".join([head, *shown, *more, advice]))

    def describe(self) -> str:
        """Describe the rows that were left out: how many for each reason, and the first of each."""
        if not self.count:
            return ""
        reasons = (
            f"{count:,} ({reason}; first {self._places[reason][0]})" for reason, count in self._reasons.most_common()
        )
        return f"; left out (data.on_bad_row=drop): {', '.join(islice(reasons, _MAX_SHOWN))}"


class SequenceOfRows:
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


class Examples(SequenceOfRows):
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
        tools: the tools that `offer` adds to each row, as JSON text; empty if rows have only their own.
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
        self.tools = ""
        self.offer: Callable[[Example], Example]

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
        named = _formats_of(self.reads).get(self.format)
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


def _detect(raw: Iterator[RawRow], examples: Examples) -> tuple[Format, list[RawRow]]:
    """Find the format by the columns of the first readable row. Returns it with the rows read so far."""
    leading: list[RawRow] = []
    for row in raw:
        leading.append(row)
        if isinstance(row.value, Mapping):
            _refuse_pair(row, examples)
            known = detect_format(row.value, examples.columns, _formats_of(examples.reads))
            if known is not None:
                return known, leading
            from finetune.data.column_advice import describe_unknown_columns

            raise DataError(describe_unknown_columns(row, examples))
    first = next(iter(_formats_of(examples.reads).values()))
    return first, leading  # no row could be read: each is reported with its own problem


def _formats_of(reads: Reads) -> Mapping[str, Format]:
    if reads == "answers":
        return FORMATS
    from finetune.data.preference_formats import FORMATS_OF

    return FORMATS_OF[reads]


def _refuse_pair(row: RawRow, examples: Examples) -> None:
    """Refuse rows of two answers: supervised training would learn neither of them, or turns that are no answers."""
    if examples.reads != "answers" or not isinstance(row.value, Mapping):
        return
    columns = find_columns(row.value, examples.columns)
    if "rejected" in columns and ("chosen" in columns or columns["rejected"] in MEANINGS["rejected"].also):
        from finetune.data.column_advice import describe_pair

        raise DataError(describe_pair(row, examples, columns))


def _read_examples(raw: Iterable[RawRow], known: Format, examples: Examples) -> Iterator[Example]:
    source = examples.source
    columns = _Columns(known, examples)
    problems, broken = RowProblems(drops=examples.drops), RowProblems(can_drop=False)
    first: Example | None = None
    first_bad: RawRow | None = None
    count = 0
    for row in raw:
        place = source.place(row.number)
        if row.problem is not None:
            broken.add(place, row.problem)
            continue
        try:
            example = parse_row(row.value, known, examples.columns, is_table=row.is_table)
            cells = row.value if examples.reads == "prompts" else None
            example = example._replace(source=place, number=row.number, digest=digest_row(row.value), columns=cells)
            if examples.tools:
                example = examples.offer(example)
            first = first or example
            if example.is_of_texts != first.is_of_texts:
                raise BadRowError(
                    f"prompt or completion is {_how_written(example)}, while {first.source} has it as "
                    f"{_how_written(first)}; expected all rows alike"
                )
        except BadRowError as error:
            problems.add(place, str(error))
            first_bad = first_bad or row
            continue
        count += 1
        if not examples.read_as:  # otherwise these rows were checked before
            columns.add(row, example, place)
        yield example
    broken.raise_if_any(source.label, count + problems.count + broken.count)
    grpo = way = ""
    if first_bad is not None:
        from finetune.data.column_advice import advise_on_second_format, propose_settings

        if examples.reads == "answers":
            grpo = propose_settings(first_bad, examples, "prompts")
        if examples.format == "auto" or first is None:
            way = advise_on_second_format(first_bad, known, examples)
    problems.raise_if_any(source.label, count + problems.count, grpo and f"{grpo} to learn from rewards", way)
    assert first is not None  # there is a row, and not all have a problem
    note = columns.check(count)
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
        self._known, self._examples, self._reads = known, examples, examples.reads
        self._names: dict[str, str] = {}
        self._seen: dict[str, bool] = {}  # whether a cell of the column holds something
        self._marks: dict[str, str] = {}  # columns in which all cells are labels, and the first label
        self._labels: dict[str, LabelColumn | SplitColumn] = {}
        self._unread: dict[str, RawRow] = {}
        self.has_turns = False

    def add(self, row: RawRow, example: Example, place: str) -> None:
        """Note the columns of a row."""
        examples, columns = self._examples, find_columns(row.value, self._examples.columns)
        self.has_turns |= example.row_type == "messages"
        self._names |= {column: own_name for column, own_name in columns.items() if column in self._known.columns}
        for name, value in row.value.items():
            self._seen[name] = self._seen.get(name, False) or bool(value)
            if name not in self._names.values() and self._marks.get(name) != "" and value not in (None, ""):
                word = str(value).strip().lower()
                self._marks[name] = self._marks.get(name, word) if word in chain(*LABEL_WORDS) else ""
        for name in find_unread(row.value, example, self._known, examples.columns, self._reads, examples.format):
            self._unread.setdefault(name, row)
        marks = [name for name in row.value if meaning_of(name) == "split" and self._reads != "rejected"]
        if "label" in columns and "label" not in self._known.columns and self._reads not in ("prompts", "rejected"):
            marks.append(columns["label"])
        for name in marks:
            from finetune.data.labels import column_of_marks

            self._labels.setdefault(name, column_of_marks(name)).add(row, place)

    def check(self, num_rows: int) -> str:
        """Refuse rows with labels or other parts that are not read. Returns a note for the log."""
        note = "".join(labels.check(self._examples, self._examples.label, num_rows) for labels in self._labels.values())
        for name, row in self._unread.items():
            if not may_be_unread(name):
                from finetune.data.column_advice import describe_unread_column

                format, label = self._known.name, self._examples.label
                text = describe_unread_column(row, self._examples, name, label=label, format=format, names=self._names)
                raise DataError(text)
        return note

    def unread(self) -> list[str]:
        """Return the columns that may hold a part of a prompt, labels as numbers, or splits, and are not read."""
        return [*self._unread, *(name for name, labels in self._labels.items() if labels.is_unread)]

    def describe(self, rows: str) -> str:
        """Describe on one line the number of rows, their format, the columns that were read, and those not used."""
        used = {name: column for column, name in self._names.items()}
        shown = (
            show_names([name]) if column == name else f"{show_names([name])} as {column}"
            for name, column in used.items()
        )
        others = [name for name in self._seen if name not in used]
        heading = "columns for reward functions" if self._reads == "prompts" else "columns not used"
        note = f"; {heading}: {', '.join(map(self._describe_unused, others))}" if others else ""
        return f"{rows} (format {self._known.name}, columns {', '.join(shown)}){note}"

    def _describe_unused(self, name: str) -> str:
        may_be_label = self._marks.get(name) and name not in (*self._labels, *NO_LABELS)
        may_be_label = may_be_label and self._reads in ("answers", "chosen")
        words = "true or false" if self._marks.get(name) in ("true", "false") else "good or bad"
        note = f" ({words}; data.columns.label={name} makes it the label)" if may_be_label else ""
        return show_names([name]) + note


def _how_written(example: Example) -> str:
    return "text" if example.is_of_texts else "a list of turns"
