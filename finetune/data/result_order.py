"""Find results of tools that a chat template leaves without a sign of the call that they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby

from finetune.data.chat_template import ChatTemplate
from finetune.data.turns import Turn, dialogue_of, text_turn


def are_results_reordered(turns: Sequence[Turn], template: ChatTemplate) -> bool:
    """Return whether results stand in another order than their calls, and the template writes nothing to match them."""
    calls: list[str | None] = []
    for is_result, group in groupby(turns, key=lambda turn: turn["role"] == "tool"):
        of_group = [*group]
        if not is_result:
            calls = [call.get("id") for call in of_group[-1].get("tool_calls", ())]
            continue
        ids = [turn.get("tool_call_id") for turn in of_group]
        if ids != calls and Counter(ids) == Counter(calls):
            names = {turn["name"] for turn in of_group if "name" in turn}
            is_named = len(names) == len(of_group) and template.renders(("tool", "name"))
            if not (is_named or _writes_ids(template)):
                return True
    return False


@lru_cache(maxsize=1)
def _writes_ids(template: ChatTemplate) -> bool:
    """Return whether a rendered conversation says which result belongs to which of two calls."""
    ids = ("probe0001", "probe0002")
    calls = [
        {"type": "function", "id": each, "function": {"name": f"probe_{each[-1]}", "arguments": {}}} for each in ids
    ]
    before = [text_turn("user", "a"), {**text_turn("assistant", ""), "tool_calls": calls}]
    orders = [[{**text_turn("tool", "c"), "tool_call_id": each} for each in order] for order in (ids, ids[::-1])]
    first, second = template.render([dialogue_of([*before, *results]) for results in orders])
    return first != second
