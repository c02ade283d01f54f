"""What a row is once it is understood, and all that can be wrong with one before a tokenizer sees it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal, get_args, overload

from finetune.data.readers import RawRow, RowSource
from finetune.errors import DataError

_log = logging.getLogger(__name__)

Kind = Literal["messages", "prompt_completion", "text"]
ROLES = ("system", "user", "assistant", "tool")

_COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
_IN_WORDS = {"messages": "chat messages", "prompt_completion": "prompt and completion", "text": "plain text"}
_MESSAGE_KEYS = ("role", "content", "tools")
_MAX_SHOWN = 5
_LONGEST_QUOTE = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row that can be used. `messages`, `prompt` with `completion`, or `text` is set, as `kind` says."""

    kind: Kind
    source: str
    """Where the row is, for people: `orders/train.jsonl:17`."""
    number: int
    """The line or row in `source`."""
    messages: tuple[dict[str, str], ...] = ()
    prompt: str = ""
    completion: str = ""
    text: str = ""

    @property
    def contents(self) -> tuple[str, ...]:
        """Every text a person or a model wrote in this row."""
        if self.kind == "messages":
            return tuple(text for turn in self.messages for key, text in turn.items() if key != "role")
        return (self.prompt, self.completion) if self.kind == "prompt_completion" else (self.text,)


class BadRowError(ValueError):
    """One row cannot be used. Never leaves this package: `RowProblems` gathers them into one DataError."""


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
        """End the reading of a split.

        Raises:
            DataError: at least one row was noted.
        """
        if not self.count:
            return
        more = [f"  and {self.count - _MAX_SHOWN} more"] if self.count > _MAX_SHOWN else []
        head = f"{label}: {self.count} of {num_rows} rows cannot be used:"
        raise DataError("\n".join([head, *self._shown, *more, "Correct or remove them, then start again."]))


class Examples(Sequence[Example]):
    """The rows of one split. The file is read on first use, so that a run with cached data never parses it.

    Args:
        source: where the rows are.
        wanted: what a row is; `auto` looks at the columns of the first row.
        max_rows: use only so many rows from the first.
    """

    def __init__(self, source: RowSource, wanted: str = "auto", max_rows: int | None = None) -> None:
        self.source = source
        self.wanted = wanted
        self.max_rows = max_rows

    @property
    def label(self) -> str:
        """The file or split as the user would name it."""
        return self.source.label

    @cached_property
    def rows(self) -> list[Example]:
        """All rows, read and checked.

        Raises:
            DataError: the file cannot be read, has no rows, or has rows that cannot be used.
        """
        raw: Iterator[RawRow] = islice(self.source.rows(), self.max_rows)
        first = next(raw, None)
        if first is None:
            raise DataError(f"{self.label} has no rows. Put at least one in, or leave the split out.")
        raw = chain([first], raw)
        kind, leading = _detect_kind(raw, self.source) if self.wanted == "auto" else (self.wanted, [])
        return _read_examples(chain(leading, raw), kind, self.source)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        return self.rows[index]


def kind_in_words(kind: str) -> str:
    """How a report names a kind of row."""
    return _IN_WORDS[kind]


def quote(value: object) -> str:
    """A value as an error shows it: on one line and cut."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 1] + "…"


def _detect_kind(raw: Iterator[RawRow], source: RowSource) -> tuple[Kind, list[RawRow]]:
    """What the rows are, by the columns of the first that could be read; and the rows taken to find out."""
    leading: list[RawRow] = []
    for row in raw:
        leading.append(row)
        if isinstance(row.value, Mapping):
            for kind in get_args(Kind):
                if all(column in row.value for column in _COLUMNS[kind]):
                    return kind, leading
            found = ", ".join(map(str, row.value)) or "none"
            raise DataError(
                f"{source.place(row.number)} has the columns {found}. Expected messages, prompt and completion, "
                "or text. Rename the columns; data.format chooses where a row has several of these."
            )
    return "messages", leading  # no row could be read: each is reported with its own problem


def _read_examples(raw: Iterable[RawRow], kind: str, source: RowSource) -> list[Example]:
    parse: Callable[[Mapping[str, Any]], dict[str, Any]] = _PARSERS[kind]
    problems = RowProblems()
    examples: list[Example] = []
    unused: dict[str, None] = {}
    for row in raw:
        place = source.place(row.number)
        try:
            fields = parse(_columns_of(row, kind))
            examples.append(Example(kind=kind, source=place, number=row.number, **fields))  # type: ignore[arg-type]
            unused.update(dict.fromkeys(row.value))
        except BadRowError as error:
            problems.add(place, str(error))
    problems.raise_if_any(source.label, len(examples) + problems.count)
    others = [str(name) for name in unused if name not in _COLUMNS[kind]]
    note = f"; columns not used: {', '.join(others)}" if others else ""
    _log.info("%s: %d rows of %s%s", source.label, len(examples), kind_in_words(kind), note)
    return examples


def _columns_of(row: RawRow, kind: str) -> Mapping[str, Any]:
    if row.problem is not None:
        raise BadRowError(row.problem)
    if not isinstance(row.value, Mapping):
        raise BadRowError(f"got {quote(row.value)}; expected an object with {' and '.join(_COLUMNS[kind])}")
    for column in _COLUMNS[kind]:
        if column not in row.value:
            found = ", ".join(map(str, row.value)) or "none"
            raise BadRowError(f"no column {column}; it has {found}")
    return row.value


def _parse_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = row["messages"]
    if not isinstance(messages, list):
        raise BadRowError(f"messages is {quote(messages)}; expected a list of objects with role and content")
    if not messages:
        raise BadRowError("messages is empty; expected a user's turn and the assistant's answer")
    parsed = tuple(_parse_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    if not any(message["role"] == "assistant" for message in parsed):
        roles = ", ".join(message["role"] for message in parsed)
        raise BadRowError(f"no assistant turn (roles: {roles}), so nothing to learn; expected at least one")
    return {"messages": parsed}


def _parse_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise BadRowError(f"{where} is {quote(message)}; expected an object with role and content")
    # A table has every column in every row: what is not there reads as null.
    present = {str(key): value for key, value in message.items() if value is not None or key in ("role", "content")}
    for key in present:
        if key not in _MESSAGE_KEYS:
            raise BadRowError(f"{where} has the key {key!r}, which would be lost; expected {', '.join(_MESSAGE_KEYS)}")
    role = present.get("role")
    if role not in ROLES:
        raise BadRowError(f"{where}.role is {quote(role)}; expected {', '.join(ROLES[:-1])} or {ROLES[-1]}")
    parsed = {key: _parse_text(value, f"{where}.{key}") for key, value in present.items()}
    if "content" not in parsed:
        raise BadRowError(f"{where} has no content; expected text")
    if role == "assistant":
        _refuse_blank(parsed["content"], f"{where}.content (the assistant's)")
    return parsed


def _parse_prompt_completion(row: Mapping[str, Any]) -> dict[str, Any]:
    completion = _refuse_blank(_parse_text(row["completion"], "completion"), "completion")
    return {"prompt": _parse_text(row["prompt"], "prompt"), "completion": completion}


def _parse_plain_text(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": _refuse_blank(_parse_text(row["text"], "text"), "text")}


def _parse_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRowError(f"{where} is {quote(value)} ({type(value).__name__}); expected text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadRowError(
                f"{where} has half a surrogate pair at character {error.start + 1}; expected Unicode"
            ) from None
    return value


def _refuse_blank(value: str, where: str) -> str:
    if not value.strip():
        raise BadRowError(f"{where} is blank ({quote(value)}); expected text to learn")
    return value


_PARSERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "messages": _parse_messages,
    "prompt_completion": _parse_prompt_completion,
    "text": _parse_plain_text,
}
