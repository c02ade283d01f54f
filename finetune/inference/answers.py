"""Read generated answers, and compare them with the expected ones by built-in metrics and the user's own.

An answer has thinking, text and tool calls, between marks that the chat template puts around them. The marks are found
by rendering an answer whose thinking, text and call are known. A template that renders no thinking may serve a model
that writes it all the same, as Phi-4-reasoning does: then it ends at `</think>`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from finetune.data.turns import REASONING_KEYS, Dialogue, Turn, text_turn
from finetune.data.values import BadRowError, quote, refuse_constant, with_unique_keys
from finetune.errors import DataError
from finetune.signals import Terminated

if TYPE_CHECKING:
    from finetune.data.templates import AnswerTokens

_END_OF_THINKING = "</think>"
_QUESTION = text_turn("user", "a")
_THINKING, _TEXT = "probe-1", "probe-2"
Metric = Callable[[str, str], float]
"""(generated answer, expected answer) to a number. The score of a model is the mean over the rows."""
_CALL_ID = re.compile("[A-Za-z0-9]{9}")
"""The templates of Mistral refuse other ids."""
SHARES = frozenset({"exact_match", "json_valid", "json_equal"})
"""Metrics that are shares of the rows, shown as percentages."""


class Answer(NamedTuple):
    """An answer in its parts."""

    text: str
    """All that follows the thinking, without special tokens and marks. It is what is scored.

    Calls between marks are written as one JSON list, as in `answer_text`. Calls without marks stay as they are.
    """
    reasoning: str = ""
    content: str = ""
    """The text before the calls."""
    calls: tuple[dict[str, Any], ...] = ()
    """Each call with its name and its arguments."""
    problem: str = ""
    """Why a call that the answer begins cannot be read; empty if there is no problem."""
    call_ids: tuple[str, ...] = ()
    """The id that the model gave each call, as models of Mistral do; empty if it gave none."""

    def as_turn(self, *, num_earlier_calls: int = 0) -> Turn:
        """Return the turn of the assistant, for a template to render in the next prompt.

        Its calls get ids, because some templates need them. `num_earlier_calls` counts the calls of earlier turns.
        """
        turn = text_turn("assistant", self.content)
        turn |= {REASONING_KEYS[0]: self.reasoning} if self.reasoning else {}
        calls = [
            {"type": "function", "id": f"call{number:05}", "function": call}
            for number, call in enumerate(self.calls, start=num_earlier_calls)
        ]
        return turn | ({"tool_calls": calls} if calls else {})


class _Marks(NamedTuple):
    """The texts before and after a part of an answer."""

    before: str
    after: str


_MARKS_OF_CALLS = (_Marks("<|tool_call|>", "<|/tool_call|>"), _Marks("<tool_call>", "</tool_call>"))
"""Of Phi-4-mini, and of Hermes and Qwen."""


class AnswerReader:
    """Reads the answers of a model. Its tokenizer may have no chat template.

    Attributes:
        call_marks: the marks around calls; None if the chat template writes them in a form that is not read here.
    """

    def __init__(self, tokens: AnswerTokens) -> None:
        self._tokens = tokens
        self._thinking = self._find_thinking()
        self.call_marks = self._find_call()

    def read(self, ids: Sequence[int]) -> Answer:
        """Split an answer into its parts. Thinking that does not end leaves an empty text."""
        decoded = str(self._tokens.tokenizer.decode(list(ids), skip_special_tokens=False))
        thought, end, rest = decoded.partition(self._thinking.after)
        opening = self._thinking.before
        if not end and not (opening and decoded.lstrip().startswith(opening)):
            thought, rest = "", decoded
        reasoning = self._plain(thought.strip().removeprefix(opening))
        content, calls, problem, after = self._split_calls(rest)
        # Some tokenizers decode special tokens with white space around them, so text alone is decoded without them.
        if calls and self.call_marks and self.call_marks.before:
            text = f"{self._plain(content)}{_calls_as_json(calls)}{self._plain(after)}"
        elif reasoning or end or calls:
            text = self._plain(rest)
        else:
            text = str(self._tokens.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()
        call_ids = self._find_ids(rest, len(calls))
        return Answer(text, reasoning, self._plain(content) if calls else text, tuple(calls), problem, call_ids)

    def _split_calls(self, text: str) -> tuple[str, list[dict[str, Any]], str, str]:
        """Return the text before the first call, the calls, why they cannot be read, and the text after the calls."""
        if self.call_marks is None:
            return text, [], "", ""
        mark = self.call_marks.before
        content, separator, rest = text.partition(mark) if mark else ("", text.lstrip()[:1] in ("{", "["), text)
        calls: list[dict[str, Any]] = []
        after = ""
        while separator:
            value, end = _leading_json(rest)
            for call in value if isinstance(value, list) else [value]:
                if not _is_call(call, has_mark=bool(mark)):
                    problem = f"the call {quote(rest)} is not JSON with a name and arguments" if mark else ""
                    return text, [], problem, ""
                calls.append({"name": call["name"], "arguments": call.get("arguments", call.get("parameters", {}))})
            between, separator, rest = rest[end:].partition(mark) if mark else ("", "", "")
            after += between
        return content, calls, "", after

    def _find_ids(self, text: str, num_calls: int) -> tuple[str, ...]:
        """Return the id of each call in a text. Empty if a call has no id, or one that templates do not accept."""
        mark = self.call_marks.before if self.call_marks else ""
        values = [_leading_json(part)[0] for part in (text.split(mark)[1:] if mark else [text])] if num_calls else []
        calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
        ids = [str(call.get("id")) for call in calls if isinstance(call, Mapping)]
        return tuple(ids) if len(ids) == num_calls and all(map(_CALL_ID.fullmatch, ids)) else ()

    def _plain(self, text: str) -> str:
        for mark in self.call_marks or ():
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
        # Phi-4-mini's own template renders no calls, but its tokenizer has their marks.
        tokens = self._tokens.tokenizer.get_added_vocab()
        return next((marks for marks in _MARKS_OF_CALLS if set(marks) <= tokens.keys()), None)

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
    return "".join([str(turn["content"]), _calls_as_json(calls) if calls else ""])


def _calls_as_json(calls: Sequence[Any]) -> str:
    text = json.dumps(calls, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # the model wrote half a surrogate pair, which no file can hold
        return json.dumps(calls)
    return text


def _is_call(value: Any, *, has_mark: bool) -> bool:
    """Return whether a JSON value is a call. Without a mark it may be an answer in JSON, which may have a name too."""
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return False
    has_type = value.get("type", "function") == "function"
    keys = value.keys() - {"type", "id"}
    return has_mark or (has_type and keys in ({"name", "arguments"}, {"name", "parameters"}))


def _leading_json(text: str) -> tuple[Any, int]:
    """Read the JSON document at the beginning of a text; returns it and the place where it ends, 0 if there is none.

    A document with a key twice is none, see `json_equal`.
    """
    blank = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder(object_pairs_hook=with_unique_keys).raw_decode(text[blank:])
    except (ValueError, RecursionError):
        return None, 0
    return value, blank + end


def exact_match(answer: str, expected: str) -> float:
    """Return 1 if both are equal, ignoring white space around them, else 0."""
    return float(answer.strip() == expected.strip())


def json_valid(answer: str, expected: str) -> float:
    """Return 1 if the answer is a JSON object or array, else 0; a bare number or string does not count."""
    return float(isinstance(_document(answer), (dict, list)))


def json_equal(answer: str, expected: str) -> float:
    """Return 1 if both are equal as JSON documents, whatever the order of keys and the spacing, else 0.

    If an answer calls tools, only its calls are compared, and not the text before them.

    An answer with a key twice equals nothing: readers disagree about its value (RFC 8259, section 4), and a model that
    is rewarded for it learns to write several values.
    """
    parsed = _document(answer, object_pairs_hook=with_unique_keys)
    return float(isinstance(parsed, (dict, list)) and is_equal(parsed, _document(expected)))


def token_f1(answer: str, expected: str) -> float:
    """Return the harmonic mean of precision and recall over words, as in SQuAD (Rajpurkar et al., arXiv:1606.05250).

    Words are split at white space and compared in lower case. Unlike SQuAD, articles are kept, since removing them
    suits English only.
    """
    answer_words, expected_words = answer.lower().split(), expected.lower().split()
    common = (Counter(answer_words) & Counter(expected_words)).total()
    if not answer_words or not expected_words:
        return float(answer_words == expected_words)
    # With precision common / a and recall common / e, the harmonic mean is 2 * common / (a + e).
    return 2 * common / (len(answer_words) + len(expected_words))


def parse_json(text: str, **how: Any) -> object:
    """Parse JSON text with `json.loads(text, **how)`. Return None for any other text."""
    try:
        return json.loads(text, parse_constant=refuse_constant, **how)
    except (ValueError, RecursionError):
        return None


def _document(text: str, **how: Any) -> object:
    """Return the JSON document that an answer consists of, or its calls if it has text before them; None without."""
    document, start = parse_json(text, **how), text.find('[{"name": ')
    if document is not None or start < 0:
        return document
    calls = parse_json(text[start:], **how)
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return None
    return calls if all(call.keys() == {"name", "arguments"} for call in calls) else None


def is_equal(answer: object, expected: object) -> bool:
    """Compare JSON values. Unlike in Python, true is not 1."""
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(is_equal(value, expected[key]) for key, value in answer.items())
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(is_equal, answer, expected))
    return answer == expected and isinstance(answer, bool) == isinstance(expected, bool)


METRICS: Mapping[str, Metric] = {each.__name__: each for each in (exact_match, json_valid, json_equal, token_f1)}


def measure(name: str, metric: Metric, answer: str, expected: str) -> float:
    """Return the metric's value for an answer: `metric(answer, expected)` as a float.

    Raises:
        DataError: a user's own metric failed, or did not return a number below 1e100 in size.
    """
    if name not in METRICS:
        from finetune.own_calls import without_exit

        metric = without_exit(metric)
    try:
        value = math.nan if isinstance(given := metric(answer, expected), str) else float(given)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # it is the user's own code
        raise DataError(f"the metric {name} failed on the answer {answer[:60]!r}: {error!r}. Correct it.") from error
    if not abs(value) < 1e100:  # the sum over the rows is finite too
        raise DataError(f"the metric {name} gave {quote(given)} for {answer[:60]!r}; expected a number below 1e100.")
    return value
