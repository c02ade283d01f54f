"""Find our columns in a row: under our names, under the names that other tools give them, or as `data.columns` says.

Sources: the pages on data of TRL, LLaMA-Factory, axolotl, ms-swift, argilla and OpenAI's preference format.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from finetune.config.schema import ROW_COLUMNS
from finetune.data.turns import is_transcript

BAD_LABEL = "is_bad"
"""A label that is true for a bad answer."""
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "conversations": ("conversation",),
    "prompt": ("query",),
    "completion": ("response",),
    "output": ("response",),
    "input": ("context",),
    "system": ("system_prompt",),
    "tools": ("functions",),
    "chosen": ("chosen_response", "preferred_output"),
    "rejected": ("rejected_response", "rejected_messages", "non_preferred_output"),
    "label": ("kto_tag", "is_good", BAD_LABEL, "good", "accepted", "desirable", "thumbs_up"),
}
"""The names that other tools give our columns, where their meaning is fixed. A row's own name comes first."""
CONTEXT = ("system", "history", "input", "context", "tools", "functions")
"""Columns that belong to the prompt, so that leaving one out changes what the model is asked."""
_MEANINGS = {
    **{"prompt": ("question", "problem", "instruction", "query", "request", "user", "human", "source", "inputs")},
    **{
        "completion": ("answer", "response", "reply", "output", "assistant", "target", "solution", "summary", "outputs")
    },
    **{"input": ("context", "input", "passage", "article", "document"), "system": ("system", "system_prompt")},
    **{"chosen": ("chosen", "accept", "good_answer", "better", "preferred"), "history": ("history",)},
    **{"rejected": ("rejected", "reject", "bad_answer", "worse", "dispreferred"), "tools": ("tools", "functions")},
}
"""What columns of no known format probably hold. Only proposed, never assumed."""


class Cells(dict[str, Any]):
    """The cells of a row by our names of the columns. `names` has their names in the row.

    Attributes:
        row: the whole row.
    """

    def __init__(self, row: Mapping[str, Any], names: Mapping[str, str]) -> None:
        super().__init__((column, row[name]) for column, name in names.items())
        self.row, self.names = row, names

    def name(self, column: str) -> str:
        """Return the name that a column has in the row."""
        return self.names.get(column, column)

    def has(self, column: str) -> bool:
        """Return whether a row has something in a column: not null, and neither an empty list nor blank text."""
        value = self.get(column)
        return bool(value.strip() if isinstance(value, str) else value)


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
        usual_names = (name for name in (column, *OTHER_NAMES.get(column, ())) if name not in configured.values())
        name = next(
            (name for name in ((configured[column],) if column in configured else usual_names) if name in names), None
        )
        if name is not None:
            columns[column] = name
    is_instruction = "instruction" in columns or columns.get("prompt", "instruction") == "instruction"
    if "input" not in configured and not is_instruction:
        columns.pop("input", None)  # beside a prompt that is no instruction, it may be anything
    return columns


def propose_columns(names: Collection[str], needs: Collection[str]) -> str:
    """Return overrides of `data.columns` for the column names whose meaning is known, or "" if these are not enough.

    They are not enough if two names have the same meaning, or if one of the columns in `needs` has no name.
    """
    settings: dict[str, str] = {}
    for name in names:
        column = next((column for column, meanings in _MEANINGS.items() if name.lower() in (column, *meanings)), None)
        if column in settings:
            return ""
        if column is not None:
            settings[column] = name
    if not settings.keys() >= set(needs):
        return ""
    return " ".join(f"data.columns.{column}={name}" for column, name in settings.items() if column != name)
