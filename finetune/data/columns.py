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
        super().__init__((ours, row[theirs]) for ours, theirs in names.items())
        self.row, self.names = row, names

    def name(self, ours: str) -> str:
        """Return the name that a column has in the row."""
        return self.names.get(ours, ours)

    def has(self, ours: str) -> bool:
        """Return whether a row has something in a column: not null, and neither an empty list nor blank text."""
        value = self.get(ours)
        return bool(value.strip() if isinstance(value, str) else value)


def find_columns(row: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return our columns that a row has, each with its name in the row. `renamed` is `data.columns`."""
    found = dict(_find_columns(tuple(row), tuple(renamed.items())))
    if "completion" in found and "prompt" not in found and "messages" not in found:
        whole = row[found["completion"]]  # a conversation without a column for its prompt
        if isinstance(whole, list) or (isinstance(whole, str) and is_transcript(whole)):
            found["messages"] = found.pop("completion")
    return found


@lru_cache(maxsize=64)  # most rows of a file have the same columns
def _find_columns(names: Sequence[str], renamed: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """Return our columns among these names, each with its name."""
    theirs, found = dict(renamed), {}
    for ours in ROW_COLUMNS:
        own = (name for name in (ours, *OTHER_NAMES.get(ours, ())) if name not in theirs.values())
        name = next((name for name in ((theirs[ours],) if ours in theirs else own) if name in names), None)
        if name is not None:
            found[ours] = name
    if "input" not in theirs and "instruction" not in found and found.get("prompt", "instruction") != "instruction":
        found.pop("input", None)  # beside a prompt that is no instruction, it may be anything
    return found


def propose_columns(names: Collection[str], needs: Collection[str]) -> str:
    """Return settings of `data.columns` that read every column with a known meaning. Empty text if that is impossible.

    `needs` are our columns that a row must have.
    """
    settings: dict[str, str] = {}
    for name in names:
        ours = next((ours for ours, meanings in _MEANINGS.items() if name.lower() in (ours, *meanings)), None)
        if ours in settings:
            return ""
        if ours is not None:
            settings[ours] = name
    if not settings.keys() >= set(needs):
        return ""
    return " ".join(f"data.columns.{ours}={theirs}" for ours, theirs in settings.items() if ours != theirs)
