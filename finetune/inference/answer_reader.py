"""Read the thinking, the text and the tool calls of an answer, by the marks that the chat template puts around them.

The marks are found by rendering an answer whose thinking, text and call are known. A template that renders no thinking
may serve a model that writes it all the same, as Phi-4-reasoning does: then it ends at `</think>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.turns import REASONING_KEYS, Dialogue, Turn, text_turn
from finetune.data.values import BadRowError

if TYPE_CHECKING:
    from finetune.data.templates import AnswerTokens

_END_OF_THINKING = "</think>"
_QUESTION = text_turn("user", "a")
_THINKING, _TEXT = "probe-1", "probe-2"


class Answer(NamedTuple):
    """An answer in its parts."""

    text: str
    """All that follows the thinking, calls included, without special tokens and marks. It is what is scored."""
    reasoning: str = ""
    content: str = ""
    """The text before the calls."""
    calls: tuple[dict[str, Any], ...] = ()
    """Each call with its name and its arguments."""

    def as_turn(self) -> Turn:
        """Return the turn of the assistant, for a template to render in the next prompt."""
        turn = text_turn("assistant", self.content)
        turn |= {REASONING_KEYS[0]: self.reasoning} if self.reasoning else {}
        calls = [{"type": "function", "function": call} for call in self.calls]
        return turn | ({"tool_calls": calls} if calls else {})


class _Marks(NamedTuple):
    """The texts before and after a part of an answer."""

    before: str
    after: str


class AnswerReader:
    """Reads the answers of a model. Its tokenizer may have no chat template."""

    def __init__(self, tokens: AnswerTokens) -> None:
        self._tokens = tokens
        self._thinking = self._find_thinking()
        self._call = self._find_call()

    def read(self, ids: Sequence[int]) -> Answer:
        """Split an answer into its parts. Thinking that does not end leaves an empty text."""
        decoded = str(self._tokens.tokenizer.decode(list(ids), skip_special_tokens=False))
        thought, end, rest = decoded.partition(self._thinking.after)
        opening = self._thinking.before
        if not end and not (opening and decoded.lstrip().startswith(opening)):
            thought, rest = "", decoded
        reasoning = self._plain(thought.strip().removeprefix(opening))
        content, calls = self._split_calls(rest)
        # Some tokenizers decode special tokens with white space around them, so text alone is decoded without them.
        if reasoning or end or calls:
            text = self._plain(rest)
        else:
            text = str(self._tokens.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()
        return Answer(text, reasoning, self._plain(content) if calls else text, tuple(calls))

    def _split_calls(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the text before the first call, and the calls."""
        if self._call is None:
            return text, []
        mark = self._call.before
        content, separator, rest = text.partition(mark) if mark else ("", text.lstrip()[:1] in ("{", "["), text)
        calls: list[dict[str, Any]] = []
        while separator:
            value, end = _leading_json(rest)
            for call in value if isinstance(value, list) else [value]:
                if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
                    return text, []
                calls.append({"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))})
            _, separator, rest = rest[end:].partition(mark) if mark else ("", "", "")
        return content, calls

    def _plain(self, text: str) -> str:
        for mark in self._call or ():
            text = text.replace(mark, "") if mark else text
        return self._tokens.without_special_text(text).strip()

    def _find_thinking(self) -> _Marks:
        body = self._render_answer({**text_turn("assistant", _TEXT), REASONING_KEYS[0]: _THINKING})
        before, thinking, rest = body.partition(_THINKING)
        after = rest.partition(_TEXT)[0].strip() if thinking else ""
        return _Marks(before.strip(), after) if after else _Marks("", _END_OF_THINKING)

    def _find_call(self) -> _Marks | None:
        """Return the marks around JSON that holds the calls; None if the template writes them in another way."""
        call = {"type": "function", "id": "probe0001", "function": {"name": _TEXT, "arguments": {}}}
        body = self._render_answer({**text_turn("assistant", ""), "tool_calls": [call]})
        for start in (place for place, character in enumerate(body) if character in "[{"):
            value, length = _leading_json(body[start:])
            if length and _TEXT in json.dumps(value):
                end = str(self._tokens.tokenizer.convert_ids_to_tokens(self._tokens.end_id))
                return _Marks(body[:start].strip(), body[start + length :].partition(end)[0].strip())
        return None

    def _render_answer(self, turn: Turn) -> str:
        """Render an answer without what stands before it; empty if the template refuses it."""
        if self._tokens.tokenizer.chat_template is None:
            return ""
        (prompt,) = self._tokens.template.render([Dialogue((_QUESTION,), ())], with_prompt=True)
        (conversation,) = self._tokens.template.render([Dialogue((_QUESTION, turn), (1,))])
        if isinstance(prompt, BadRowError) or isinstance(conversation, BadRowError):
            return ""
        return conversation.removeprefix(prompt)


def answer_text(turn: Turn) -> str:
    """Return the text of an answer in a row, or its calls as JSON: what `Answer.text` is for a generated one."""
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    return "".join([str(turn["content"]), json.dumps(calls, ensure_ascii=False) if calls else ""])


def _leading_json(text: str) -> tuple[Any, int]:
    """Read the JSON document at the beginning of a text; returns it and the place where it ends, 0 if there is none."""
    blank = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text[blank:])
    except (ValueError, RecursionError):
        return None, 0
    return value, blank + end
