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

from finetune.data.turns import Dialogue, Turn, dialogue_of, parse_tools, parse_turns, text_turn
from finetune.data.values import BadRowError, list_in_cell, parse_text, quote, refuse_blank

RowType = Literal["messages", "prompt_completion", "text"]
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class Example(NamedTuple):
    """One row that can be used. `messages`, `prompt` with `completion`, or `text` is set, as `row_type` says."""

    row_type: RowType
    messages: tuple[Turn, ...] = ()
    learnt: tuple[int, ...] = ()
    """The turns that carry loss, by index. Answers in a prompt and answers of weight 0 do not."""
    tools: str = ""
    """The tools that a conversation offers, as JSON text."""
    prompt: str = ""
    completion: str = ""
    text: str = ""
    source: str = ""
    """The origin of the row: `orders/train.jsonl:17`."""
    number: int = 0
    """The line or row in the source."""
    is_good: bool = True
    """False for an answer that its row labels as bad."""
    columns: Mapping[str, Any] | None = None
    """The whole row, for functions that reward answers; None for other objectives."""
    digest: str = ""
    """The `digest_row` of the row as it was read."""

    @property
    def contents(self) -> tuple[str, ...]:
        """All texts of this row, without the roles."""
        if self.row_type == "messages":
            values = [value for turn in self.messages for key, value in turn.items() if key != "role"]
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            return (*texts, self.tools) if self.tools else tuple(texts)
        return (self.prompt, self.completion) if self.row_type == "prompt_completion" else (self.text,)


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


def parse_row(row: object, known: Format, columns: Mapping[str, str]) -> Example:
    """Make an example from a row as it was read. `columns` maps our names of columns to theirs, if they differ.

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


def _parse_messages(row: Mapping[str, Any]) -> Example:
    return _conversation(parse_turns(row["messages"], "messages", row.get("tools")))


def _parse_conversations(row: Mapping[str, Any]) -> Example:
    return _conversation(_with_system(parse_turns(row["conversations"], "conversations", row.get("tools")), row))


def _parse_prompt_completion(row: Mapping[str, Any]) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) or isinstance(completion, list):
        given = _as_turns(prompt, "prompt", "user", row.get("tools"))
        answers = _as_turns(completion, "completion", "assistant")
        if given.tools and answers.tools and json.loads(given.tools) != json.loads(answers.tools):
            raise BadRowError("prompt and completion offer tools that differ; expected them in the prompt alone")
        return _conversation(answers._replace(tools=given.tools or answers.tools), given.turns)
    if parse_tools(row.get("tools")):
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
    history = list_in_cell(row.get("history") or [])
    if not isinstance(history, list):
        raise BadRowError(f"history is {quote(history)}; expected a list of earlier questions and answers")
    earlier = [turn for k, pair in enumerate(history) for turn in _parse_pair(pair, f"history[{k}]")]
    parts = [parse_text(row["instruction"], "instruction"), _optional_text(row, "input")]
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise BadRowError("instruction and input are blank; expected text that says what to do")
    answer = refuse_blank(parse_text(row["output"], "output"), "output")
    turns = [*earlier, text_turn("user", question), text_turn("assistant", answer)]
    return _conversation(_with_system(dialogue_of(turns), row))


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


def _parse_prompts(row: Mapping[str, Any]) -> Example:
    """Read a prompt with or without an expected answer. Without one, the answer is empty."""
    known = detect_format(row, {})
    if known is not None and known.name in ("prompt_completion", "instruction"):
        return _until_last_answer(known.parse(row))
    column = known.name if known is not None and known.name != "text" else "prompt"
    if column not in row:
        found = ", ".join(map(str, row)) or "none that is read"
        raise BadRowError(f"no column prompt or messages; it has {found}. data.columns can name them")
    if column == "prompt" and isinstance(row["prompt"], str):
        if parse_tools(row.get("tools")):
            raise BadRowError("there is a column tools, but the prompt is text; expected a list of turns")
        return Example("prompt_completion", prompt=refuse_blank(parse_text(row["prompt"], "prompt"), "prompt"))
    given = _as_turns(row[column], column, "user", row.get("tools"))
    given = _with_system(given, row) if column == "conversations" else given
    if given.turns[-1]["role"] != "assistant":
        turns = (*given.turns, text_turn("assistant", ""))
        return Example("messages", messages=turns, learnt=(len(given.turns),), tools=given.tools)
    if column != "prompt":
        return _until_last_answer(_conversation(given))
    raise BadRowError(
        "prompt ends with a turn of the assistant, so there is nothing to answer; expected that turn in a column "
        "completion, or all turns in a column messages"
    )


def _until_last_answer(example: Example) -> Example:
    """Leave out turns after the last answer that counts, which is the expected one; the prompt ends before it."""
    if example.row_type != "messages":
        return example
    return example._replace(messages=example.messages[: example.learnt[-1] + 1])


PROMPTS = Format(
    "prompts",
    (),
    tuple(dict.fromkeys(name for known in FORMATS.values() for name in (*known.needs, *known.may_have))),
    _parse_prompts,
)
"""The format of rows for `training.objective=grpo`: a prompt alone, or a row of another format, whose last answer is
the expected one. It is never guessed."""


def _conversation(dialogue: Dialogue, given: tuple[Turn, ...] = ()) -> Example:
    """Make an example of a conversation that follows the turns of a prompt."""
    if not dialogue.learnt:
        roles = [turn["role"] for turn in dialogue.turns]
        if "assistant" in roles:
            raise BadRowError(
                "every assistant turn has weight 0, so nothing to learn; expected at least one of weight 1"
            )
        raise BadRowError(f"no assistant turn (roles: {', '.join(roles)}), so nothing to learn; expected at least one")
    dialogue = _following(given, dialogue)
    return Example("messages", messages=dialogue.turns, learnt=dialogue.learnt, tools=dialogue.tools)


def _following(given: tuple[Turn, ...], dialogue: Dialogue) -> Dialogue:
    """Return the conversation with these turns before it, which carry no loss."""
    return dialogue._replace(
        turns=(*given, *dialogue.turns), learnt=tuple(index + len(given) for index in dialogue.learnt)
    )


def _as_turns(value: object, column: str, role: str, tools: object = None) -> Dialogue:
    """Read a list of turns, or text that is one turn."""
    if not isinstance(value, str):
        return parse_turns(value, column, tools)
    turn = text_turn(role, refuse_blank(parse_text(value, column), column))
    return dialogue_of([turn])._replace(tools=parse_tools(tools))


def _parse_pair(pair: object, where: str) -> list[Turn]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadRowError(f"{where} is {quote(pair)}; expected a list with a question and its answer")
    question, answer = (refuse_blank(parse_text(text, f"{where}[{k}]"), f"{where}[{k}]") for k, text in enumerate(pair))
    return [text_turn("user", question), text_turn("assistant", answer)]


def _with_system(dialogue: Dialogue, row: Mapping[str, Any]) -> Dialogue:
    system = _optional_text(row, "system")
    if not system.strip():
        return dialogue
    if dialogue.turns[0]["role"] == "system":
        raise BadRowError("there is a column system and a system turn too; expected one of them")
    return _following((text_turn("system", system),), dialogue)


def _optional_text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    return "" if value is None else parse_text(value, column)
