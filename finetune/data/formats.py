"""The formats of rows: recognise each by its columns, and parse it into turns, prompt and completion, or text.

Columns and roles have their usual names: `messages` with role and content, and `prompt` with `completion` (TRL's
dataset formats); `conversations` with from and value (ShareGPT, as FastChat and LLaMA-Factory read it); `instruction`,
`input`, `output` (Stanford Alpaca).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Kind = Literal["messages", "prompt_completion", "text"]
ROLES = ("system", "user", "assistant", "tool")

_LONGEST_QUOTE = 60
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class BadRowError(ValueError):
    """One row cannot be used. `RowProblems` collects these errors into one DataError."""


class Example(NamedTuple):
    """One row that can be used. `messages`, `prompt` with `completion`, or `text` is set, as `kind` says."""

    kind: Kind
    messages: tuple[dict[str, str], ...] = ()
    num_given: int = 0
    """The number of turns at the beginning that belong to the prompt: answers among them carry no loss."""
    prompt: str = ""
    completion: str = ""
    text: str = ""
    source: str = ""
    """The origin of the row: `orders/train.jsonl:17`."""
    number: int = 0
    """The line or row in the source."""
    is_good: bool = True
    """False for an answer that its row labels as bad."""

    @property
    def contents(self) -> tuple[str, ...]:
        """All texts of this row, without the roles."""
        if self.kind == "messages":
            return tuple(text for turn in self.messages for key, text in turn.items() if key != "role")
        return (self.prompt, self.completion) if self.kind == "prompt_completion" else (self.text,)


@dataclass(frozen=True)
class Format:
    """One way to write rows.

    Attributes:
        name: the value of `data.format` that chooses it.
        needs: columns that a row must have.
        may_have: columns that are read if a row has them.
        parse: makes an example from these columns; raises BadRowError.
    """

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], Example]


class _TurnKeys(NamedTuple):
    """The keys of a turn's role and text, and our role for each of theirs."""

    role: str
    content: str
    roles: Mapping[str, str]


_ROLE_AND_CONTENT = _TurnKeys("role", "content", {role: role for role in ROLES})
_FROM_AND_VALUE = _TurnKeys(
    "from",
    "value",
    {
        **{"system": "system", "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant"},
        **{"assistant": "assistant", "tool": "tool", "observation": "tool"},
    },
)


def parse_row(row: object, known: Format, columns: Mapping[str, str]) -> Example:
    """Make an example from a row.

    Args:
        row: the row as it was read.
        known: its format.
        columns: our names of columns to theirs, if they differ.

    Raises:
        BadRowError: the row cannot be used.
    """
    if not isinstance(row, Mapping):
        needed = " and ".join(columns.get(name, name) for name in known.needs)
        raise BadRowError(f"got {quote(row)}; expected an object with {needed}")
    for name in known.needs:
        if columns.get(name, name) not in row:
            found = ", ".join(map(str, row)) or "none"
            raise BadRowError(f"no column {columns.get(name, name)}; it has {found}")
    names = (*known.needs, *known.may_have)
    return known.parse({name: row[columns.get(name, name)] for name in names if columns.get(name, name) in row})


def detect_format(row: Mapping[str, Any], columns: Mapping[str, str]) -> Format | None:
    """Return the first format whose required columns a row has, or None."""
    for known in FORMATS.values():
        if all(columns.get(name, name) in row for name in known.needs):
            return known
    return None


def quote(value: object) -> str:
    """Format a value for an error: on one line, and shortened."""
    text = repr(value)
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 1] + "…"


def _parse_messages(row: Mapping[str, Any]) -> Example:
    return _conversation(offer_tools(_parse_turns(row["messages"], "messages"), row.get("tools")))


def _parse_conversations(row: Mapping[str, Any]) -> Example:
    turns = _parse_turns(row["conversations"], "conversations")
    return _conversation(offer_tools(_with_system(turns, row), row.get("tools")))


def _parse_prompt_completion(row: Mapping[str, Any]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        given = offer_tools(_as_turns(prompt, "prompt", "user"), row.get("tools"))
        answers = _as_turns(completion, "completion", "assistant")
        return _conversation((*given, *answers), num_given=len(given))
    if _tools_as_text(row.get("tools")) is not None:
        raise BadRowError("there is a column tools, but prompt and completion are text; expected lists of turns")
    completion = refuse_blank(parse_text(completion, "completion"), "completion")
    return Example("prompt_completion", prompt=parse_text(prompt, "prompt"), completion=completion)


def _parse_labelled(row: Mapping[str, Any]) -> Example:
    label = row["label"]
    word = str(label).strip().lower()
    if word not in _LABELS:
        raise BadRowError(f"label is {quote(label)}; expected true for a good answer or false for a bad one")
    return _parse_prompt_completion(row)._replace(is_good=_LABELS[word])


def _parse_instruction(row: Mapping[str, Any]) -> Example:
    history = _list_in_cell(row.get("history") or [])
    if not isinstance(history, list):
        raise BadRowError(f"history is {quote(history)}; expected a list of earlier questions and answers")
    earlier = [turn for k, pair in enumerate(history) for turn in _parse_pair(pair, f"history[{k}]")]
    parts = [parse_text(row["instruction"], "instruction"), _optional_text(row, "input")]
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise BadRowError("instruction and input are blank; expected text that says what to do")
    answer = refuse_blank(parse_text(row["output"], "output"), "output")
    return _conversation(_with_system((*earlier, _turn("user", question), _turn("assistant", answer)), row))


def _parse_plain_text(row: Mapping[str, Any]) -> Example:
    return Example("text", text=refuse_blank(parse_text(row["text"], "text"), "text"))


FORMATS = {
    known.name: known
    for known in (
        Format("messages", ("messages",), ("tools",), _parse_messages),
        Format("conversations", ("conversations",), ("system", "tools"), _parse_conversations),
        Format("prompt_completion", ("prompt", "completion"), ("tools",), _parse_prompt_completion),
        Format("instruction", ("instruction", "output"), ("input", "system", "history"), _parse_instruction),
        Format("text", ("text",), (), _parse_plain_text),
    )
}
"""The formats by name, in the order in which they are tried."""

LABELLED = Format("labelled", ("prompt", "completion", "label"), ("tools",), _parse_labelled)
"""The format of rows for `training.objective=kto`. It is never guessed: other objectives refuse labels."""


def parse_text(value: object, where: str) -> str:
    """Check that a value is text that can be encoded.

    Raises:
        BadRowError: it is not.
    """
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


def refuse_blank(value: str, where: str) -> str:
    """Check that a text is not empty or white space.

    Raises:
        BadRowError: it is.
    """
    if not value.strip():
        raise BadRowError(f"{where} is blank ({quote(value)}); expected text to learn")
    return value


def offer_tools(turns: tuple[dict[str, str], ...], tools: object) -> tuple[dict[str, str], ...]:
    """Put the column `tools` of a row into the system turn, where Phi-4-mini's template looks for it.

    Args:
        turns: a conversation; if it has no system turn, it gets an empty one.
        tools: a list of objects, the same as JSON text, or None.

    Raises:
        BadRowError: it is something else, or a turn has tools too.
    """
    text = _tools_as_text(tools)
    if text is None:
        return turns
    if any("tools" in turn for turn in turns):
        raise BadRowError("there is a column tools and a turn with tools too; expected one of them")
    system, rest = (turns[0], turns[1:]) if turns[0]["role"] == "system" else (_turn("system", ""), turns)
    return ({**system, "tools": text}, *rest)


def _tools_as_text(tools: object) -> str | None:
    if isinstance(tools, list) and tools and all(isinstance(tool, Mapping) for tool in tools):
        try:
            tools = json.dumps(_without_nulls(tools), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRowError(f"tools is {quote(tools)}, which JSON cannot represent: {error}") from None
    if tools is None or tools == [] or (isinstance(tools, str) and tools.strip() in ("", "[]")):
        return None
    if not isinstance(tools, str):
        raise BadRowError(f"tools is {quote(tools)}; expected a list of objects, or JSON as text")
    return parse_text(tools, "tools")


def _without_nulls(value: object) -> object:
    """Remove the nulls that a table has for absent keys."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _conversation(turns: tuple[dict[str, str], ...], num_given: int = 0) -> Example:
    if not any(turn["role"] == "assistant" for turn in turns[num_given:]):
        roles = ", ".join(turn["role"] for turn in turns[num_given:])
        raise BadRowError(f"no assistant turn (roles: {roles}), so nothing to learn; expected at least one")
    return Example("messages", messages=turns, num_given=num_given)


def _parse_turns(value: object, column: str) -> tuple[dict[str, str], ...]:
    turns = _list_in_cell(value)
    keys = _turn_keys(turns)
    if not isinstance(turns, list):
        raise BadRowError(f"{column} is {quote(value)}; expected a list of objects with {keys.role} and {keys.content}")
    if not turns:
        raise BadRowError(f"{column} is empty; expected a user's turn and the assistant's answer")
    return tuple(_parse_turn(turn, f"{column}[{number}]", keys) for number, turn in enumerate(turns))


def _list_in_cell(value: object) -> object:
    """Parse JSON in a cell of a CSV file. Other text stays as it is, and is refused later."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _turn_keys(turns: object) -> _TurnKeys:
    first = turns[0] if isinstance(turns, list) and turns else None
    return _FROM_AND_VALUE if isinstance(first, Mapping) and first.get("from") is not None else _ROLE_AND_CONTENT


def _parse_turn(turn: object, where: str, keys: _TurnKeys) -> dict[str, str]:
    if not isinstance(turn, Mapping):
        raise BadRowError(f"{where} is {quote(turn)}; expected an object with {keys.role} and {keys.content}")
    # A table has every key in every turn, with null for those that are absent.
    wanted = (keys.role, keys.content)
    present = {str(key): value for key, value in turn.items() if value is not None or key in wanted}
    for key in present:
        if key not in (*wanted, "tools"):
            expected = ", ".join((*wanted, "tools"))
            raise BadRowError(f"{where} has the key {key!r}, which would be lost; expected {expected}")
    role = present.get(keys.role)
    if not isinstance(role, str) or role not in keys.roles:
        *others, last = keys.roles
        raise BadRowError(f"{where}.{keys.role} is {quote(role)}; expected {', '.join(others)} or {last}")
    if keys.content not in present:
        raise BadRowError(f"{where} has no {keys.content}; expected text")
    parsed = _turn(keys.roles[role], parse_text(present[keys.content], f"{where}.{keys.content}"))
    if "tools" in present:
        parsed["tools"] = parse_text(present["tools"], f"{where}.tools")
    if parsed["role"] == "assistant":
        refuse_blank(parsed["content"], f"{where}.{keys.content} (the assistant's)")
    return parsed


def _as_turns(value: object, column: str, role: str) -> tuple[dict[str, str], ...]:
    """Read a list of turns, or text that is one turn."""
    if not isinstance(value, str):
        return _parse_turns(value, column)
    return (_turn(role, refuse_blank(parse_text(value, column), column)),)


def _parse_pair(pair: object, where: str) -> list[dict[str, str]]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadRowError(f"{where} is {quote(pair)}; expected a list with a question and its answer")
    question, answer = (refuse_blank(parse_text(text, f"{where}[{k}]"), f"{where}[{k}]") for k, text in enumerate(pair))
    return [_turn("user", question), _turn("assistant", answer)]


def _with_system(turns: tuple[dict[str, str], ...], row: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    system = _optional_text(row, "system")
    if not system.strip():
        return turns
    if turns[0]["role"] == "system":
        raise BadRowError("there is a column system and a system turn too; expected one of them")
    return (_turn("system", system), *turns)


def _optional_text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else parse_text(value, column)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
