"""Render conversations with a tokenizer's chat template, and find out which keys of a row it renders. Imports no torch.

To find out whether a template renders a key, a small conversation is rendered with two values of the key. If the texts
differ, the key is rendered. This is tried once for each key. For this, no template is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from io import TextIOWrapper
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.config_files import local_path
from finetune.data.rendering import render_conversations
from finetune.data.turns import REASONING_KEYS, Dialogue, Turn, text_turn
from finetune.data.values import BadRowError
from finetune.errors import ConfigError
from finetune.limits import MOST_BYTES, open_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATES = Path(__file__).parent / "chat_templates"
WITHOUT_TEMPLATE = (
    "data.chat_template=plain (Instruct: … Output: …) or alpaca (### Instruction: …), which need no special tokens, or "
    "data.chat_template=FILE.jinja for your own. chatml, gemma, llama3, mistral and phi4_mini are for tokenizers that "
    "have their tokens"
)
"""What to set for a tokenizer without a chat template."""
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>[^'"]*)(?P=quote)\s*\)""")
"""The function that transformers gives to templates."""
_TOOLS = ("", "tools")
_TOOLS_OF_SYSTEM = ("system", "tools")

RowKey = tuple[str, str]
"""A key of a turn with its role, or of the row itself with an empty role."""


class ChatTemplate:
    """The chat template of a tokenizer. `name` names it in messages. Default: the name of the tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "") -> None:
        self.tokenizer = tokenizer
        self.name = name or str(tokenizer.name_or_path) or type(tokenizer).__name__
        self._known: dict[RowKey, bool] = {}
        self._added_tokens = frozenset(tokenizer.get_added_vocab())

    def render(self, dialogues: Sequence[Dialogue], *, with_prompt: bool = False) -> list[str | BadRowError]:
        """Render each conversation as text, or say why the template refuses it.

        With `with_prompt`, each text ends with the header of the assistant's turn, for an answer to follow.
        """
        texts: list[str | BadRowError] = []
        for tools, group in groupby(dialogues, key=lambda dialogue: dialogue.tools):
            tool_list = json.loads(tools) if tools and self.renders(_TOOLS) else None
            texts += self._call([self._as_read(dialogue) for dialogue in group], tool_list, with_prompt)
        return texts

    def renders(self, key: RowKey) -> bool:
        """Whether the template renders the values of a key."""
        if key not in self._known:
            first, second = (self._call(*_probe(key, value), False)[0] for value in ("probe-1", "probe-2"))
            self._known[key] = isinstance(first, str) and isinstance(second, str) and first != second
        return self._known[key]

    def ignored(self, dialogue: Dialogue) -> set[RowKey]:
        """Return the keys of a conversation that the template does not render."""
        return {key for key in _keys_of(dialogue) if not any(self.renders(name) for name in _names_of(key))}

    def has_foreign_header(self, role: str, text: str) -> bool:
        """Whether the template wrote a marker like `<|developer|>` for a role, which is no token of the tokenizer."""
        marker = f"<|{role}|>"
        return marker in text and marker not in self._added_tokens

    def _as_read(self, dialogue: Dialogue) -> list[Turn]:
        """Return the turns with thinking and tools under the keys that the template reads."""
        turns = list(dialogue.turns)
        own_key, other_key = REASONING_KEYS
        if any(own_key in turn for turn in turns) and not self.renders(("assistant", own_key)):
            turns = [{other_key if key == own_key else key: value for key, value in turn.items()} for turn in turns]
        if dialogue.tools and not self.renders(_TOOLS) and self.renders(_TOOLS_OF_SYSTEM):
            system, rest = (turns[0], turns[1:]) if turns[0]["role"] == "system" else (text_turn("system", ""), turns)
            turns = [{**system, "tools": dialogue.tools}, *rest]
        return turns

    def _call(
        self, conversations: list[list[Turn]], tools: list[dict[str, Any]] | None, with_prompt: bool
    ) -> list[str | BadRowError]:
        """Render each conversation, or say why the template refuses it."""
        results = render_conversations(self.tokenizer, conversations, tools, with_prompt=with_prompt, name=self.name)
        return [text if ok else BadRowError(f"the chat template refuses the row: {text}") for ok, text in results]


def use_chat_template(tokenizer: PreTrainedTokenizerBase, setting: str | None, date: str | None = None) -> None:
    """Give a tokenizer, in place, the chat template of `data.chat_template`, with the date of `data.template_date`.

    Args:
        tokenizer: its saved copies have the same template.
        setting: the name of a shipped template, or the path of a .jinja file; None: its own.
        date: written wherever the template asks for today's date, YYYY-MM-DD; None: today's is.

    Raises:
        ConfigError: there is no such template.
    """
    if setting is not None:
        tokenizer.chat_template = _read_template(setting)
    if date is not None and isinstance(tokenizer.chat_template, str):
        day = datetime.fromisoformat(date)
        tokenizer.chat_template = _DATE_CALL.sub(
            lambda call: json.dumps(day.strftime(call["format"])), tokenizer.chat_template
        )


def asks_for_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template of a tokenizer writes today's date, so that rows differ from day to day."""
    template = tokenizer.chat_template
    return isinstance(template, str) and _DATE_CALL.search(template) is not None


def _read_template(setting: str) -> str:
    shipped = {path.stem: path for path in _TEMPLATES.glob("*.jinja")}
    path = shipped.get(setting) or local_path(setting)
    try:
        return read_template_file(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template is {setting}, which is neither a shipped template ({', '.join(sorted(shipped))}) nor "
            f"a file that can be read ({getattr(error, 'strerror', None) or error}). Name one of these, or the path of "
            "a .jinja file."
        ) from error


def read_template_file(path: Path) -> str:
    """Read the file of a template. Raises an OSError, also for a device, and UnicodeDecodeError."""
    with TextIOWrapper(open_regular(path, most=MOST_BYTES, follows_links=True), encoding="utf-8") as file:
        return file.read()


def describe_key(key: RowKey) -> str:
    """Name a key for messages: `tool_calls (role assistant)`."""
    role, name = key
    return f"{name} (role {role})" if role else name


def _keys_of(dialogue: Dialogue) -> Iterator[RowKey]:
    """Yield the keys that a template should render.

    `tool_call_id` is left out, and so is the name of a result if an earlier call has that name: they only link results
    to calls, which was checked when the rows were read.
    """
    if dialogue.tools:
        yield _TOOLS
    called: set[str] = set()
    for turn in dialogue.turns:
        called |= {call["function"]["name"] for call in turn.get("tool_calls", ())}
        for key in turn:
            is_link = key == "tool_call_id" or (key == "name" and turn["role"] == "tool" and turn[key] in called)
            if key not in ("role", "content") and not is_link:
                yield turn["role"], key


def _names_of(key: RowKey) -> tuple[RowKey, ...]:
    """The places where a template may read a key."""
    if key == _TOOLS:
        return _TOOLS, _TOOLS_OF_SYSTEM
    role, name = key
    return tuple((role, other) for other in REASONING_KEYS) if name == REASONING_KEYS[0] else (key,)


def _probe(key: RowKey, value: str) -> tuple[list[list[Turn]], list[dict[str, Any]] | None]:
    """Make a conversation in which a key has a value, and the tools that it offers."""
    role, name = key
    call = {"type": "function", "id": "probe0001", "function": {"name": "probe", "arguments": {}}}
    tool = {"type": "function", "function": {"name": value, "description": "", "parameters": {"type": "object"}}}
    question, answer = text_turn("user", "a"), text_turn("assistant", "b")
    if key == _TOOLS:
        return [[question, answer]], [tool]
    if name == "tool_calls":
        changed = {**call, "function": {"name": value, "arguments": {}}}
        return [[question, {**text_turn("assistant", ""), name: [changed]}]], None
    turn = {**text_turn(role, "c"), name: value}
    if role == "tool":
        calling = {**text_turn("assistant", ""), "tool_calls": [call]}
        return [[question, calling, {"tool_call_id": "probe0001", **turn}, answer]], None
    before = [question] if role == "assistant" else []
    after = {"user": [answer], "assistant": []}.get(role, [question, answer])
    return [[*before, turn, *after]], None
