"""The formats of rows: recognise each by its columns, and parse it into turns, prompt and completion, or text.

Columns and roles have their usual names: `messages` with role and content, and `prompt` with `completion` (TRL's
dataset formats); `conversations` with from and value (ShareGPT, as FastChat and LLaMA-Factory read it); `instruction`,
`input`, `output` (Stanford Alpaca). All objectives read prompts and answers alike; `preference_formats.py` has pairs of
answers and labelled answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from finetune.data.columns import Cells, find_columns, holds_something, is_beside_text, show_names, unread_columns
from finetune.data.turns import Dialogue, Turn, dialogue_of, is_transcript, parse_tools, parse_turns, text_turn
from finetune.data.values import BadRowError, quote, refuse_blank

RowType = Literal["messages", "prompt_completion", "text"]
Reads = Literal["answers", "chosen", "rejected", "labelled", "prompts"]
"""What an objective reads of a row: answers to learn, one side of a pair, a labelled answer, or a prompt."""


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
    is_of_texts: bool = False
    """Whether prompt and answer are texts in the row, also if a system turn or earlier turns made them messages."""
    columns: Mapping[str, Any] | None = None
    """The whole row, for functions that reward answers; None for other objectives."""
    digest: str = ""
    """The result of `digest_row` for the raw row."""

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
        fits: whether a row with the needed columns is of this format, given its cells and `data.columns`.
    """

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...]
    parse: Callable[[Cells], Example]
    fits: Callable[[Cells, Mapping[str, str]], bool] = lambda cells, renamed: True

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that are read."""
        return (*self.needs, *self.may_have)


def parse_row(row: object, known: Format, renamed: Mapping[str, str], *, is_table: bool = False) -> Example:
    """Make an example from a raw row. `renamed` is `data.columns`; for `is_table` see `Cells`.

    Raises:
        BadRowError: the row cannot be used.
    """
    if not isinstance(row, Mapping):
        needed = " and ".join(renamed.get(name, name) for name in known.needs)
        raise BadRowError(f"got {quote(row)}; expected an object with {needed or 'prompt or messages'}")
    cells = Cells(row, find_columns(row, renamed), is_table=is_table)
    for name in known.needs:
        if name not in cells:
            raise BadRowError(f"no column {renamed.get(name, name)}; it has {show_names(row)}")
    return known.parse(cells)


def detect_format(row: Mapping[str, Any], renamed: Mapping[str, str], formats: Mapping[str, Format]) -> Format | None:
    """Return the first of these formats whose required columns a row has, or None."""
    cells = Cells(row, find_columns(row, renamed))
    fitting = (known for known in formats.values() if cells.keys() >= set(known.needs) and known.fits(cells, renamed))
    return next(fitting, None)


def _parse_turns(column: str, cells: Cells) -> Example:
    return as_conversation(with_system(parse_turns(cells[column], cells.name(column), cells.get("tools")), cells))


def _parse_plain_text(cells: Cells) -> Example:
    return Example("text", text=refuse_blank(cells.text("text"), cells.name("text")))


def _is_whole_text(cells: Cells, renamed: Mapping[str, str]) -> bool:
    """Return whether a text is a whole row: no prompt, answer or role is beside it, or the user names the text."""
    others = (name for name, value in cells.row.items() if name != cells.name("text") and holds_something(value))
    return "text" in renamed or not any(map(is_beside_text, others))


def _parse_answered(column: str, answer: str, cells: Cells) -> Example:
    """Read a prompt in one column and the answer to it in another."""
    return join_answer(read_prompt(cells, column), read_answer(cells, answer), cells, answer)


def read_prompt(cells: Cells, column: str) -> str | Dialogue:
    """Read a prompt: text, or turns. A system turn, earlier turns or tools beside text make it turns."""
    name, question = cells.name(column), cells.text_or_turns(column)
    if not isinstance(question, str) or is_transcript(question):
        return with_system(parse_turns(question, name, cells.get("tools"))._replace(learnt=()), cells)
    if cells.has("input") and (column == "instruction" or (column == "prompt" and "instruction" not in cells)):
        addition = cells.text("input")
        question = f"{question}\n\n{addition}" if question.strip() else addition
    if column == "instruction" and not question.strip():
        raise BadRowError(f"{name} and input are blank; expected text that says what to do")
    return read_question(question, cells, is_text=column != "instruction")


def read_question(question: str, cells: Cells, *, is_text: bool = True) -> str | Dialogue:
    """Return a question with the earlier turns, the tools and the system turn of its row.

    A question is text if the row has none of these and `is_text` is true.
    """
    earlier: list[Turn] = []
    if cells.has("history"):
        from finetune.data.turn_spellings import turns_of_history

        earlier = turns_of_history(cells["history"], cells.name("history"))
    tools = parse_tools(cells.get("tools"), cells.name("tools"))
    if is_text and not (earlier or tools or cells.has("system")):
        return question
    turns = dialogue_of([*earlier, text_turn("user", question)])._replace(tools=tools)
    return with_system(turns, cells)


def read_answer(cells: Cells, column: str) -> str | Dialogue:
    """Read an answer: text, one turn, turns, or a conversation that begins with the prompt."""
    name, value = cells.name(column), cells.text_or_turns(column)
    if isinstance(value, str) and not is_transcript(value):
        return refuse_blank(value, name)
    return parse_turns(value, name)


def join_answer(prompt: str | Dialogue, answer: str | Dialogue, cells: Cells, column: str) -> Example:
    """Join a prompt and its answer."""
    if isinstance(prompt, str) and isinstance(answer, str):
        return Example("prompt_completion", prompt=prompt, completion=answer, is_of_texts=True)
    asked = cells.get("prompt") if "prompt" in cells or "instruction" in cells else cells.get("input")
    is_of_texts = isinstance(answer, str) and isinstance(asked, str)
    if isinstance(prompt, str):
        prompt = dialogue_of([text_turn("user", refuse_blank(prompt, cells.name("prompt")))])
    if isinstance(answer, str):
        answer = dialogue_of([text_turn("assistant", answer)])
    history, answer = _without_prompt(prompt.turns, answer, cells, column)
    if prompt.tools and answer.tools and json.loads(prompt.tools) != json.loads(answer.tools):
        raise BadRowError(f"prompt and {cells.name(column)} offer tools that differ; expected them in the prompt alone")
    answer = answer._replace(tools=prompt.tools or answer.tools)
    example = as_conversation(answer, history)
    # In supervised training the answers of a history are learnt too, as in LLaMA-Factory.
    earlier = prompt.learnt if column in ("completion", "output") and history == prompt.turns else ()
    return example._replace(is_of_texts=is_of_texts, learnt=(*earlier, *example.learnt))


def _without_prompt(
    prompt: tuple[Turn, ...], conversation: Dialogue, cells: Cells, column: str
) -> tuple[tuple[Turn, ...], Dialogue]:
    """Return the turns before an answer, and the answer. An answer may be a whole conversation that repeats the prompt.

    TRL reads such rows so too (`maybe_extract_prompt`).
    """
    if conversation.turns[0]["role"] == "assistant":
        return prompt, conversation
    system, prompt_turns = _split_system(prompt)
    own_system, turns = _split_system(conversation.turns)
    prompt_texts = [_stripped(turn) for turn in prompt_turns]
    ends = range(len(prompt_turns), len(turns) + 1)
    end = next(
        (end for end in ends if [_stripped(turn) for turn in turns[end - len(prompt_turns) : end]] == prompt_texts), 0
    )
    if not end or (system and own_system and _stripped(system[0]) != _stripped(own_system[0])):
        first = conversation.turns[0]
        raise BadRowError(
            f"{cells.name(column)} begins with a turn of the {first['role']} ({quote(first['content'])}), which is not "
            f"the prompt ({quote(prompt[-1]['content'])}); expected the answer alone, or the same prompt and the answer"
        )
    history = (*(own_system or system), *turns[:end])
    return history, turns_after(conversation, len(own_system) + end, cells.name(column))


def turns_after(conversation: Dialogue, start: int, name: str) -> Dialogue:
    """Return the turns of a conversation from `start` on, which are an answer."""
    turns = conversation.turns[start:]
    if not turns or turns[0]["role"] != "assistant":
        actual = f"a turn of the {turns[0]['role']}" if turns else "nothing"
        raise BadRowError(f"{name} has {actual} after the prompt; expected an answer of the assistant")
    return conversation._replace(turns=turns, learnt=tuple(k - start for k in conversation.learnt if k >= start))


def _stripped(turn: Turn) -> Turn:
    return {**turn, "content": turn["content"].strip()}


def _split_system(turns: tuple[Turn, ...]) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    count = 1 if turns and turns[0]["role"] in ("system", "developer") else 0
    return turns[:count], turns[count:]


def _parse_prompts(cells: Cells) -> Example:
    """Read a prompt with or without an expected answer. Without one, the answer is empty."""
    known = next((known for known in FORMATS.values() if all(name in cells for name in known.needs)), None)
    if known is not None and known.name in ("prompt_completion", "instruction"):
        return until_last_answer(known.parse(cells))
    column = known.name if known is not None and known.name != "text" else "prompt"
    if column not in cells:
        raise BadRowError(f"no column prompt or messages; it has {show_names(cells.row)}")
    if column == "prompt":
        prompt = read_prompt(cells, column)
        if isinstance(prompt, str):
            return Example("prompt_completion", prompt=refuse_blank(prompt, cells.name("prompt")), is_of_texts=True)
        dialogue = prompt
    else:
        dialogue = with_system(parse_turns(cells[column], cells.name(column), cells.get("tools")), cells)
    if dialogue.turns[-1]["role"] != "assistant":
        turns = (*dialogue.turns, text_turn("assistant", ""))
        is_of_texts = column == "prompt" and isinstance(cells["prompt"], str)
        return Example(
            "messages", messages=turns, learnt=(len(dialogue.turns),), tools=dialogue.tools, is_of_texts=is_of_texts
        )
    if column != "prompt":
        return until_last_answer(as_conversation(dialogue))
    raise BadRowError(
        f"{cells.name('prompt')} ends with a turn of the assistant, so there is nothing to answer; expected that turn "
        "in a column completion, or all turns in a column messages"
    )


def until_last_answer(example: Example) -> Example:
    """Leave out turns after the last answer that counts, which is the expected one; the prompt ends before it."""
    if example.row_type != "messages":
        return example
    return example._replace(messages=example.messages[: example.learnt[-1] + 1])


def as_messages(example: Example) -> Example:
    """Return a row of prompt and completion as turns."""
    if example.row_type != "prompt_completion":
        return example
    turns = (text_turn("user", example.prompt), text_turn("assistant", example.completion))
    return example._replace(row_type="messages", messages=turns, learnt=(1,), prompt="", completion="")


def as_conversation(dialogue: Dialogue, history: tuple[Turn, ...] = ()) -> Example:
    """Make an example of a conversation that follows the turns of a prompt."""
    if not dialogue.learnt:
        roles = [turn["role"] for turn in dialogue.turns]
        if "assistant" in roles:
            raise BadRowError("every assistant turn has weight 0, so nothing to learn; expected one with weight 1")
        raise BadRowError(f"no assistant turn (roles: {', '.join(roles)}), so nothing to learn; expected at least one")
    dialogue = _following(history, dialogue)
    return Example("messages", messages=dialogue.turns, learnt=dialogue.learnt, tools=dialogue.tools)


def _following(history: tuple[Turn, ...], dialogue: Dialogue) -> Dialogue:
    """Return the conversation with these turns before it, which carry no loss."""
    return dialogue._replace(
        turns=(*history, *dialogue.turns), learnt=tuple(index + len(history) for index in dialogue.learnt)
    )


def with_system(dialogue: Dialogue, cells: Cells) -> Dialogue:
    """Put the text of the column `system` before a conversation."""
    if not cells.has("system"):
        return dialogue
    system = text_turn("system", cells.text("system"))
    own, _ = _split_system(dialogue.turns)
    if own and _stripped(own[0]) != _stripped(system):
        raise BadRowError(f"there is a column {cells.name('system')} and a system turn too; expected one of them")
    return dialogue if own else _following((system,), dialogue)


BESIDE_TURNS = ("system", "tools")
OF_PROMPT = ("input", "system", "history", "tools")
"""Columns that belong to a prompt in another column."""


def _has_prompt(cells: Cells, _: Mapping[str, str]) -> bool:
    return bool(cells.keys() & {"prompt", "messages", "conversations"} or cells.keys() >= {"instruction", "output"})


FORMATS = {
    known.name: known
    for known in (
        Format("messages", ("messages",), BESIDE_TURNS, partial(_parse_turns, "messages")),
        Format("conversations", ("conversations",), BESIDE_TURNS, partial(_parse_turns, "conversations")),
        Format(
            "prompt_completion", ("prompt", "completion"), OF_PROMPT, partial(_parse_answered, "prompt", "completion")
        ),
        Format("instruction", ("instruction", "output"), OF_PROMPT, partial(_parse_answered, "instruction", "output")),
        Format("text", ("text",), (), _parse_plain_text, _is_whole_text),
    )
}
"""The formats of supervised training by name, in the order in which they are tried."""
PROMPTS = Format(
    "prompts",
    (),
    tuple(dict.fromkeys(name for known in FORMATS.values() for name in known.columns)),
    _parse_prompts,
    _has_prompt,
)
"""The format of rows whose answers are generated."""


def find_unread(
    row: Mapping[str, Any],
    example: Example,
    known: Format,
    renamed: Mapping[str, str],
    reads: Reads,
    format: str = "auto",
) -> Iterator[str]:
    """Yield the names of the columns that hold a part of a row and are not read. `format` is `data.format`."""
    if reads == "rejected":  # the chosen side has named them
        return
    decided = [column for column, name in renamed.items() if name == "none" or name in row]
    if reads == "prompts":  # reward functions get all columns
        decided += ["messages", "prompt", "completion", "chosen", "rejected", "mask"]
    if format != "auto":
        decided += ["messages"]
    if known.name == "text":
        decided += ["messages", "input", "system", "tools", "chat_template_kwargs", "images"]
        decided += ["prompt", "completion", "history"] if "text" in (format, *renamed) else []
    columns = find_columns(row, renamed)
    read = [columns[column] for column in known.columns if column in columns]
    yield from unread_columns(row, read, decided, lambda: example.contents)
