"""Read the tool calls of a conversation, and check that results name them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.values import BadRowError, dump_json, json_in_cell, parse_text, quote, refuse_blank, refuse_python


def parse_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Read the tool calls of a turn.

    Raises:
        BadRowError: they cannot be used.
    """
    if not isinstance(calls, list):
        raise BadRowError(f"{where}.tool_calls is {quote(calls)}; expected a list of calls")
    return [_parse_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]


def join_calls(turns: list[dict[str, Any]], where: str) -> None:
    """Join the last turn, which is tool calls, to a turn of the assistant just before it. `where` names the last turn.

    Raises:
        BadRowError: the last turn has thinking, which would stand before the text of the turn that it is joined to.
    """
    *_, before, last = [{"role": "user", "content": ""}, *turns]
    if before["role"] != "assistant" or before.get("weight", 1) != last.get("weight", 1):
        return
    thinking = last.get("reasoning_content")
    if thinking is not None and thinking != before.get("reasoning_content"):
        raise BadRowError(
            f"{where} has reasoning_content, but its call belongs to the answer in the turn before it, and an answer "
            "thinks before its text; expected the thinking in the turn before it"
        )
    before["tool_calls"] = [*before.get("tool_calls", ()), *last["tool_calls"]]
    before |= {key: value for key, value in last.items() if key not in before}
    turns.pop()


def check_links(turns: Sequence[Mapping[str, Any]], column: str) -> None:
    """Check that each result names an earlier call. Most templates match results and calls by their order."""
    known: set[str] = set()
    for number, turn in enumerate(turns):
        known |= {call["id"] for call in turn.get("tool_calls", ()) if "id" in call}
        call_id = turn.get("tool_call_id")
        if call_id is not None and known and call_id not in known:
            raise BadRowError(
                f"{column}[{number}].tool_call_id is {quote(call_id)}; expected the id of a call before it: "
                f"{', '.join(sorted(known))}"
            )


def _parse_call(call: object, where: str) -> dict[str, Any]:
    """Read a tool call. Its arguments are an object afterwards, also where they are JSON text, as in OpenAI's files."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise BadRowError(
            f'{where} is {quote(call)}; expected {{"type": "function", "function": {{"name": …, "arguments": …}}}}'
        )
    written, place = function.get("arguments"), f"{where}.function.arguments"
    if isinstance(written, str):
        arguments = json_in_cell(parse_text(written, place) or "{}")
    else:
        arguments = json.loads(dump_json(written, place)) or {}
    if not isinstance(arguments, dict):
        refuse_python(written, place, is_text=False)
        raise BadRowError(f"{place} is {quote(written)}; expected an object, or JSON text of one")
    name = refuse_blank(parse_text(function.get("name"), f"{where}.function.name"), f"{where}.function.name")
    identity = {"id": parse_text(call["id"], f"{where}.id")} if call.get("id") is not None else {}
    return {"type": "function", **identity, "function": {"name": name, "arguments": arguments}}
