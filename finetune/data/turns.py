"""The turns of a conversation and the tools that it offers, read from the messages of OpenAI's files or from ShareGPT.

A turn is what chat templates read: an object with `role` and `content`, and where the row has them `reasoning_content`,
`tool_calls`, `tool_call_id`, `name`, and keys that are unknown here.
Source: https://developers.openai.com/api/reference/resources/chat and
https://huggingface.co/docs/transformers/chat_extras (in templates, the arguments of tool calls are objects).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from finetune.data.values import (
    BadRowError,
    dump_json,
    json_in_cell,
    list_in_cell,
    parse_text,
    quote,
    refuse_blank,
    refuse_python,
    without_nulls,
)
from finetune.terminal import visible

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "thinking")
"""The names of an answer's thinking. A turn here has the first; a template may read either."""

Turn = dict[str, Any]

_OTHER_ROLES = {
    **{"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **dict.fromkeys(("observation", "function", "tool_response", "function_response", "ipython"), "tool"),
}
"""Our role for the roles of other files: ShareGPT's, Vertex AI's, OpenAI's older ones, ms-swift's and Llama 3's."""
_CALL_ROLES = ("function_call", "tool_call")
"""Roles of turns that hold a tool call as JSON text, in LLaMA-Factory and ms-swift."""
MASKS = {**dict.fromkeys(("weight", "loss", "train", "training", "trainable", "loss_weight"), True), "masked": False}
"""Keys that say whether an answer carries loss, in OpenAI's files, ms-swift, axolotl and others; False: 1 means no."""
MASK_NAME = re.compile(r"(.*_)?(mask(ed)?|weight)|loss|train(able|ing)?(_detail|_on_turn)?|ignored?|skip(ped)?")
"""Names that mean a mask, of a turn or of a row."""
_EXCHANGES = (("human", "assistant"), ("input", "output"))
"""Keys of objects that hold a question and its answer."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of text parts in OpenAI's two interfaces, Chat Completions and Responses."""


class _TurnKeys(NamedTuple):
    """The keys of a turn's role and text, and the usual roles, for messages."""

    role: str
    content: str
    roles: tuple[str, ...]


_ROLE_AND_CONTENT = _TurnKeys("role", "content", ROLES)
_FROM_AND_VALUE = _TurnKeys(
    "from", "value", ("system", "human", "user", "gpt", "assistant", "function_call", "observation", "tool")
)


class Dialogue(NamedTuple):
    """A conversation as it was read."""

    turns: tuple[Turn, ...]
    learnt: tuple[int, ...]
    """The indices of the assistant's turns, without turns of weight 0."""
    tools: str = ""
    """JSON text of a list of tools; empty if there are none."""


def dialogue_of(turns: Sequence[Turn]) -> Dialogue:
    """Make a conversation in which each answer counts."""
    return Dialogue(tuple(turns), tuple(k for k, turn in enumerate(turns) if turn["role"] == "assistant"))


def text_turn(role: str, content: str) -> Turn:
    """Make a turn of text."""
    return {"role": role, "content": content}


def parse_turns(value: object, column: str, tools: object = None) -> Dialogue:
    """Read the list of turns in a column, or JSON text of one.

    `tools` is the column `tools` of the row. Tools may stand in the system turn instead, for Phi-4-mini's template.

    Raises:
        BadRowError: it cannot be used.
    """
    turns = list_in_cell(value)
    if isinstance(turns, str) and is_transcript(turns):
        from finetune.data.turn_spellings import turns_of_transcript

        turns = turns_of_transcript(turns)
    if isinstance(turns, Mapping):
        turns = [turns]
    first = turns[0] if isinstance(turns, list) and turns else None
    keys = _FROM_AND_VALUE if isinstance(first, Mapping) and first.get("from") is not None else _ROLE_AND_CONTENT
    if not isinstance(turns, list):
        refuse_python(turns, column, is_text=False)
        raise BadRowError(f"{column} is {quote(value)}; expected a list of objects with {keys.role} and {keys.content}")
    if not turns:
        raise BadRowError(f"{column} is empty; expected a user's turn and the assistant's answer")
    parsed: list[Turn] = []
    if isinstance(first, Mapping) and (speakers := next((keys for keys in _EXCHANGES if {*keys} <= {*first}), None)):
        from finetune.data.turn_spellings import turns_of_exchanges

        turns = turns_of_exchanges(turns, speakers)
    for number, turn in enumerate(turns):
        parsed.append(_parse_turn(turn, f"{column}[{number}]", keys))
        if str(turn.get(keys.role)).lower() in _CALL_ROLES:
            from finetune.data.tool_calls import join_calls

            join_calls(parsed, f"{column}[{number}]")
    weights = [turn.pop("weight", 1) for turn in parsed]
    offered = [turn.pop("tools") for turn in parsed if "tools" in turn]
    of_row = parse_tools(tools)
    if offered and of_row:
        raise BadRowError("there is a column tools and a turn with tools too; expected one of them")
    if any(json.loads(other) != json.loads(offered[0]) for other in offered[1:]):
        raise BadRowError(f"{column} has turns with tools that differ; expected one list of tools for the conversation")
    if any("tool_call_id" in turn for turn in parsed):
        from finetune.data.tool_calls import check_links

        check_links(parsed, column)
    learnt = (k for k, turn in enumerate(parsed) if turn["role"] == "assistant" and weights[k])
    return Dialogue(tuple(parsed), tuple(learnt), next(iter(offered), of_row))


def parse_tools(tools: object, where: str = "tools") -> str:
    """Read the tools of a row as JSON text; empty if there are none. Text stays as it is written.

    Raises:
        BadRowError: they are no list of objects, nor JSON text of one.
    """
    if tools is None or tools == [] or (isinstance(tools, str) and not tools.strip()):
        return ""
    text = tools if isinstance(tools, str) else dump_json(tools, where)
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    if not isinstance(listed, list) or not all(isinstance(tool, Mapping) for tool in listed):
        refuse_python(tools, where, is_text=False)
        raise BadRowError(f"{where} is {quote(tools)}; expected a list of objects, or JSON as text")
    return parse_text(text, where) if listed else ""


def _parse_turn(turn: object, where: str, keys: _TurnKeys) -> Turn:
    """Read a turn. Its `weight` and `tools` stand in it until the caller takes them out."""
    if not isinstance(turn, Mapping):
        raise BadRowError(f"{where} is {quote(turn)}; expected an object with {keys.role} and {keys.content}")
    role, text = turn.get("role"), turn.get("content")
    if len(turn) == 2 and role in ROLES and isinstance(text, str) and keys is _ROLE_AND_CONTENT:  # most turns
        parse_text(text, where := f"{where}.content")
        return text_turn(role, refuse_blank(text, f"{where} (the assistant's)") if role == "assistant" else text)
    # A table has every key in every turn, with null for those that are absent.
    present = {str(key): value for key, value in turn.items() if value is not None}
    if keys.role not in present:
        names = visible(", ".join(present) or "none", also_unseen=True)
        raise BadRowError(f"{where} has the keys {names}; expected {keys.role} and {keys.content}")
    written = present.pop(keys.role)
    lower = written.lower() if isinstance(written, str) else ""
    role = "assistant" if lower in _CALL_ROLES else _OTHER_ROLES.get(lower, lower)
    if role not in ROLES:
        *others, last = keys.roles
        raise BadRowError(f"{where}.{keys.role} is {quote(written)}; expected {', '.join(others)} or {last}")
    texts = {key: parse_text(present.pop(key), f"{where}.{key}") for key in REASONING_KEYS if key in present}
    thinking = text if (text := _only_value(texts, where) or "").strip() else ""
    calls: list[dict[str, Any]] = []
    if written_calls := _take_calls(present, keys, lower, where):
        from finetune.data.tool_calls import parse_calls

        calls = parse_calls(written_calls, where)
    weight = _take_weight(present, role, where)
    says_more = role == "assistant" and bool(thinking or calls)
    text = present.pop(keys.content, None)
    if text is None and role == "assistant":
        text = present.pop("refusal", None)  # OpenAI's models refuse in a key of its own
    content = _parse_content(turn, text, f"{where}.{keys.content}", keys, says_more)
    parsed = text_turn(role, content)
    parsed |= {REASONING_KEYS[0]: thinking} if thinking else {}
    parsed |= {"tool_calls": calls} if calls else {}
    if (calls or thinking) and role != "assistant":
        key = "tool_calls" if calls else "reasoning_content"
        raise BadRowError(f"{where} has {key}, but its role is {role}; expected them in turns of the assistant")
    parsed |= {} if weight is None else {"weight": weight}
    if "tools" in present and (tools := parse_tools(present.pop("tools"), f"{where}.tools")):
        parsed["tools"] = tools
    for key in filter(present.__contains__, ("role", "content")):  # they would replace those of `from` and `value`
        raise BadRowError(f"{where} has {keys.role}, {keys.content} and {key} too; expected one pair of keys")
    for key in filter(present.__contains__, ("name", "tool_call_id")):
        parsed[key] = parse_text(present.pop(key), f"{where}.{key}")
    parsed |= {key: json.loads(dump_json(value, f"{where}.{key}")) for key, value in present.items() if value != []}
    if role == "assistant" and not says_more and parsed.get("weight", 1):
        refuse_blank(content, f"{where}.{keys.content} (the assistant's)")
    return parsed


def _only_value(values: Mapping[str, Any], where: str) -> Any:
    """Return the value that several keys of a turn have; None if there is none. Refuse values that differ."""
    first, *others = values.values() or [None]
    if any(other != first for other in others):
        raise BadRowError(f"{where} has {' and '.join(values)} that differ; expected one of them")
    return first


def _parse_content(turn: Mapping[Any, Any], content: object, where: str, keys: _TurnKeys, says_more: bool) -> str:
    """Read a turn's text, or the parts of it. It may be null beside tool calls or thinking."""
    if content is None and says_more:
        return ""
    if content is None and keys.content not in turn:
        raise BadRowError(f"{where.rpartition('.')[0]} has no {keys.content}; expected text")
    if not isinstance(content, list):
        return parse_text(content, where)
    parts = [without_nulls(part) for part in content]
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or part.get("type", "text") not in _TEXT_PARTS or "text" not in part:
            raise BadRowError(
                f"{where}[{number}] is {quote(part)}; expected a part of text: "
                '{"type": "text", "text": …}, since only text can be trained on'
            )
    return "".join(parse_text(part["text"], f"{where}[{number}].text") for number, part in enumerate(parts))  # type: ignore[index]


def _take_calls(present: dict[str, Any], keys: _TurnKeys, role: str, where: str) -> object:
    """Take the tool calls out of a turn: `tool_calls`, OpenAI's older `function_call`, or a turn that is a call."""
    if role in _CALL_ROLES:
        written = present.pop(keys.content, None)
        calls = value if isinstance(value := json_in_cell(written), list) else [value]
        if not all(isinstance(call, Mapping) and "name" in call for call in calls):
            raise BadRowError(
                f'{where}.{keys.content} is {quote(written)}; expected a call as JSON: {{"name": …, "arguments": …}}'
            )
        return [{"function": call} for call in calls]
    given = {"tool_calls": calls} if (calls := present.pop("tool_calls", None)) else {}
    if (older := present.pop("function_call", None)) is not None:
        given["function_call"] = [{"function": older}]
    return _only_value(given, where)


def _take_weight(present: dict[str, Any], role: str, where: str) -> int | None:
    """Take the keys that mask an answer out of a turn: 0 or 1; None if it has none of them."""
    others = [key for key in present if key not in MASKS and MASK_NAME.fullmatch(key.lower())]
    if others:
        raise BadRowError(
            f"{where} has {others[0]}, which may mask parts of its text; expected turns that carry loss as a whole, or "
            "weight: 0 for a turn without loss"
        )
    masks = {key: _parse_mask(present.pop(key), role, key, f"{where}.{key}") for key in MASKS if key in present}
    weight: int | None = _only_value(masks, where)
    return weight


def _parse_mask(mask: object, role: str, key: str, where: str) -> int:
    """Return the weight of a turn, 0 or 1, that a mask gives it."""
    if mask not in (0, 1) or (isinstance(mask, bool) and key == "weight"):
        expected = "0 (context without loss) or 1" if MASKS[key] else "true (context without loss) or false"
        raise BadRowError(f"{where} is {quote(mask)}; expected {expected}")
    weight = int(bool(mask) is MASKS[key])
    if weight and role != "assistant" and key != "masked":
        raise BadRowError(
            f"{where} is {json.dumps(mask)}, but its role is {role}; expected a weight in turns of the assistant, "
            "the only ones that carry loss"
        )
    return weight


def is_transcript(text: str) -> bool:
    """Return whether a text begins with `Human:` and has a paragraph that begins with `Assistant:`."""
    return (start := text.lstrip()).startswith("Human:") and "\n\nAssistant:" in start
