"""The table of columns: what the name of a column means, here and in other tools.

Sources: the pages on data of TRL, LLaMA-Factory, axolotl, ms-swift, argilla and OpenAI's preference format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from finetune.config.schema import ROW_COLUMNS
from finetune.data.turns import MASK_NAME, is_transcript
from finetune.data.values import parse_text, refuse_python, turns_in_cell
from finetune.terminal import visible

BAD_LABELS = ("is_bad", "bad", "undesirable", "thumbs_down")
"""Labels that are true for a bad answer."""
LABEL_WORDS = (("true", "false"), ("good", "bad"), ("thumbs_up", "thumbs_down"))
"""Pairs of texts that are labels, and never the classes of a classification set."""

NO_LABELS = ("parallel_tool_calls", "stream", "store", "logprobs")
"""Arguments of OpenAI's requests that are true or false, and no labels."""


class Meaning(NamedTuple):
    """What is known about the names of a column."""

    part: str
    """The part of a row that the column holds. If several columns of a row hold the same part, one of them is read."""
    also: tuple[str, ...] = ()
    """Names that other tools give the column. It is read under them as well; a row's own name comes first."""
    means: tuple[str, ...] = ()
    """Names that mean the column, but are read only if `data.columns` says so."""
    may_mean: tuple[str, ...] = ()
    """Names that often mean the column, the likeliest first. They are only proposed."""


PROMPT, ANSWER, CHOSEN, REJECTED = "a prompt", "an answer", "a chosen answer", "a rejected answer"
CONVERSATION, EARLIER, SYSTEM, CONTEXT = "a conversation", "earlier turns", "a system turn", "context of a prompt"
TOOLS, TEMPLATE, TEXT, LABEL = "tools", "arguments of the chat template", "a text", "a label"
MASK, ROLE, MEDIA, SPLIT = "what carries loss", "the role of a turn", "images or sound of a prompt", "a split"
_LONG_TEXTS = ("context", "text", "dialogue", "article", "document", "passage", "user", "human", "source")
MEANINGS: Mapping[str, Meaning] = {
    "messages": Meaning(CONVERSATION),
    "conversations": Meaning(CONVERSATION, ("conversation",)),
    "prompt": Meaning(
        PROMPT,
        ("query",),
        ("question", "problem", "user_prompt", "user_message", "user_input"),
        ("input", "inputs", "request", *_LONG_TEXTS),
    ),
    "completion": Meaning(
        ANSWER,
        ("response",),
        ("answer", "answers", "reply", "solution", "assistant_response", "model_response"),
        (
            *("target", "targets", "outputs", "assistant", "gpt"),
            *("summary", "highlights", "canonical_solution", "code", "chosen", "text"),
        ),
    ),
    "instruction": Meaning(PROMPT),
    "input": Meaning(CONTEXT, ("context",), (), ("passage", "article", "document")),
    "output": Meaning(ANSWER, ("response",)),
    "system": Meaning(SYSTEM, ("system_prompt",), ("system_message", "system_instruction", "system_instructions")),
    "history": Meaning(
        EARLIER,
        (),
        (
            *("chat_history", "conversation_history", "dialogue_history", "previous_turns"),
            *("parent_id", "parent", "reply_to"),
        ),
    ),
    "tools": Meaning(TOOLS, ("functions",)),
    "text": Meaning(TEXT),
    "chosen": Meaning(
        CHOSEN,
        ("chosen_response", "preferred_output"),
        (),
        ("accept", "good_answer", "better", "preferred", "winner", "positive"),
    ),
    "rejected": Meaning(
        REJECTED,
        ("rejected_response", "rejected_messages", "non_preferred_output"),
        (),
        ("reject", "bad_answer", "worse", "dispreferred", "loser", "negative"),
    ),
    "label": Meaning(LABEL, ("kto_tag", "is_good", "good", "accepted", "desirable", "thumbs_up", *BAD_LABELS)),
    "mask": Meaning(MASK),  # and names that match MASK_NAME
    "chat_template_kwargs": Meaning(TEMPLATE, (), ("template_kwargs", "custom_instructions", "enable_thinking")),
    "images": Meaning(MEDIA, (), ("image", "videos", "video", "audios", "audio")),
    "role": Meaning(ROLE),
    "split": Meaning(SPLIT, ("data_split", "partition")),
}
"""What each column means, by its name here. The last five are columns that no format reads."""
_MAY_BE_UNREAD = (CONTEXT, TOOLS, TEMPLATE, MEDIA)
"""Columns of these parts often hold something else. If they are not read, that is a fallback and no refusal."""


class Cells(dict[str, Any]):
    """The cells of a row by our names of the columns. `names` has their names in the row.

    Attributes:
        row: the whole row.
        is_table: whether the row is of a table without types (CSV), in which a list of turns is text as well.
    """

    def __init__(self, row: Mapping[str, Any], names: Mapping[str, str], *, is_table: bool = False) -> None:
        super().__init__((column, row[name]) for column, name in names.items())
        self.row, self.names, self.is_table = row, names, is_table

    def name(self, column: str) -> str:
        """Return the name that a column has in the row."""
        return self.names.get(column, column)

    def has(self, column: str) -> bool:
        """Return whether a row has something in a column, see `holds_something`."""
        return holds_something(self.get(column))

    def text(self, column: str) -> str:
        """Return the text in a column. Raise a BadRowError for any other value, and for the text of a Python object."""
        text = parse_text(self[column], self.name(column))
        refuse_python(text, self.name(column))
        return text

    def text_or_turns(self, column: str) -> Any:
        """Return the text in a column, or the value that holds turns.

        A text is never parsed, except in a table without types and for the transcripts of Anthropic's hh-rlhf.
        """
        value = self[column]
        if isinstance(value, str) and self.is_table:
            value = turns_in_cell(value)
        if isinstance(value, (list, Mapping)) or (isinstance(value, str) and is_transcript(value)):
            return value
        return self.text(column)


def holds_something(value: object) -> bool:
    """Return whether a cell holds something: not null, and neither an empty list nor blank text."""
    return bool(value.strip() if isinstance(value, str) else value)


def show_names(names: Collection[object]) -> str:
    """Return the names of columns for a message: invisible characters as code points, blanks at the ends in quotes."""
    shown = (visible(str(name), also_unseen=True).replace("\n", "<U+000A>") for name in names)
    return ", ".join(name if name == name.strip() and name else repr(name) for name in shown) or "none"


def find_columns(row: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return our columns that a row has, each with its name in the row. `renamed` is `data.columns`."""
    columns = dict(_find_columns(tuple(row), tuple(renamed.items())))
    if "completion" in columns and "prompt" not in columns and "messages" not in columns:
        completion = row[columns["completion"]]  # a conversation without a column for its prompt
        if isinstance(completion, list) or (isinstance(completion, str) and is_transcript(completion)):
            columns["messages"] = columns.pop("completion")
    return columns


@lru_cache(maxsize=64)  # most rows of a file have the same columns
def _find_columns(names: Sequence[str], renamed: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Return our columns among these names, each with its name."""
    configured, columns = dict(renamed), {}
    for column in ROW_COLUMNS:
        usual_names = (name for name in (column, *MEANINGS[column].also) if name not in configured.values())
        candidates = (configured[column],) if column in configured else usual_names
        name = next((name for name in candidates if name in names), None)
        if name is not None:
            columns[column] = name
    if "input" in columns and "input" not in configured:
        is_instruction = "instruction" in columns or columns.get("prompt") == "instruction"
        # Beside a prompt that is no instruction, it may be anything. Alone, it is a prompt under its own name.
        if not is_instruction and ("prompt" in columns or columns["input"] != "input"):
            del columns["input"]
    return columns


@lru_cache(maxsize=1024)
def meaning_of(name: str) -> str | None:
    """Return our column that a name means, whether or not it is read under this name; None if it is not known."""
    lower = name.strip().lower()
    column = next((our for our, of in MEANINGS.items() if lower in (our, *of.also, *of.means)), None)
    return "mask" if column is None and MASK_NAME.fullmatch(lower) else column


def is_beside_text(name: str) -> bool:
    """Return whether a column of this name makes a text beside it a part of the row, and not the whole row."""
    lower, column = name.strip().lower(), meaning_of(name)
    if column is not None and MEANINGS[column].part in (PROMPT, ANSWER, EARLIER, ROLE):
        return True
    return any(lower in MEANINGS[our].may_mean and lower not in _LONG_TEXTS for our in ("prompt", "completion"))


def unread_columns(
    row: Mapping[str, Any], read: Collection[str], decided: Collection[str], read_texts: Callable[[], Sequence[str]]
) -> Iterator[str]:
    """Yield the names of columns that hold a part of a row and are not read. Labels and splits have own checks.

    A column is accounted for if the user decided on its part, or if it repeats what was read.

    Args:
        row: the row.
        read: the names of the columns that are read.
        decided: our columns on which the user decided, for example in `data.columns`.
        read_texts: returns all texts that were read of the row.
    """
    for name, part in _columns_with_meaning(tuple(row), tuple(read), tuple(decided)):
        value = row[name]
        if part == MASK:
            is_unread = _leaves_out(name, value)
        else:
            holds_part = holds_something(value) and not isinstance(value, bool)
            is_unread = holds_part and not _repeats(value, part, [text.strip() for text in read_texts()])
        if is_unread:
            yield name


@lru_cache(maxsize=64)
def _columns_with_meaning(names: Sequence[str], read: Sequence[str], decided: Sequence[str]) -> list[tuple[str, str]]:
    """Return the names, and their parts, that mean a part of a row which is neither read nor decided on."""
    parts = {name: MEANINGS[our].part for name in names if name not in read and (our := meaning_of(name)) is not None}
    known = {LABEL, TEXT, ROLE, SPLIT, *(MEANINGS[column].part for column in decided)}
    return [(name, part) for name, part in parts.items() if part not in known]


def may_be_unread(name: str) -> bool:
    """Return whether an unread column of this name is a fallback. Otherwise it is refused."""
    return MEANINGS[meaning_of(name) or "text"].part in _MAY_BE_UNREAD


def _leaves_out(name: str, value: object) -> bool:
    """Return whether the value of a mask leaves out its row, or a part of it. A loss, for example, may be a number."""
    if isinstance(value, list):
        return any(_leaves_out(name, each) for each in value)
    word = str(value).strip().lower()
    is_part = "weight" in name.lower() and isinstance(value, float) and 0 < value < 1
    means_no = any(part in name.lower() for part in ("masked", "ignore", "skip"))
    return is_part or word in (("1", "1.0", "true") if means_no else ("0", "0.0", "false"))


def _repeats(value: Any, part: str, texts: Sequence[str]) -> bool:
    """Return whether a column repeats what was read of its row."""
    if isinstance(value, list):
        contents = [turn.get("content", turn.get("value")) for turn in value if isinstance(turn, Mapping)]
        return bool(contents) and all(str(content).strip() in texts for content in contents)
    text = str(value).strip() if part in (PROMPT, ANSWER, CHOSEN, SYSTEM) else ""  # not of the bytes of an image
    return bool(text) and any(text in read or (read and read in text) for read in texts)
