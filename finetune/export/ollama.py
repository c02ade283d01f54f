"""Write an Ollama Modelfile with a template that renders the same text as the tokenizer's own chat template.

finetune reads the text around each turn from conversations that the tokenizer renders. It puts other conversations
together from these pieces, and compares them with the chat template. It refuses a template that does more.
Formats: https://docs.ollama.com/modelfile and https://pkg.go.dev/text/template
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from finetune.data.rendering import render_conversations
from finetune.errors import ModelError
from finetune.export.served_comparison import Turns

_CHECKED: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)
"""The roles of the conversations on which the pieces are compared with the template."""


@dataclass(frozen=True)
class TurnPieces:
    """The text that a chat template puts around the contents of turns."""

    opening: str
    """The text before the first turn."""
    before: dict[str, str]
    """The text before the content of a turn, by role; turns of other roles are left out."""
    after: dict[str, str]
    """The text after the content of a turn, by role."""
    answer: str
    """The text after the last turn, where the answer begins."""
    default_system: str | None = None
    """The system turn that the template adds to a conversation that begins with another turn; None if it adds none."""

    def render(self, turns: Turns) -> str:
        """Render a conversation with the header of its next answer."""
        if self.default_system and turns[0]["role"] != "system":  # Ollama does not add an empty one
            turns = [{"role": "system", "content": self.default_system}, *turns]
        known_turns = [turn for turn in turns if turn["role"] in self.before]
        rendered = [self.before[turn["role"]] + turn["content"] + self.after[turn["role"]] for turn in known_turns]
        return self.opening + "".join(rendered) + self.answer

    def as_go_template(self) -> str:
        """Write the pieces as a Go template over Ollama's `.Messages`."""
        branches: list[str] = []
        for role in self.before:
            keyword = "if" if not branches else "else if"
            turn = f"{_literal(self.before[role])}{{{{ .Content }}}}{_literal(self.after[role])}"
            branches.append(f'{{{{ {keyword} eq .Role "{role}" }}}}{turn}')
        turns = f"{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}"
        return _literal(self.opening) + turns + _literal(self.answer)


def read_turn_pieces(tokenizer: Any) -> TurnPieces:
    """Take a tokenizer's chat template apart.

    Raises:
        ModelError: the template does more than put text around turns.
    """
    try:
        return _checked(tokenizer, _take_apart(tokenizer, "user"))
    except ValueError as error:
        with suppress(ValueError):
            return _checked(tokenizer, _take_apart(tokenizer, "system"))
        raise ModelError(
            f"the tokenizer's chat template cannot be written as a Modelfile: {error}. Use "
            "finetune export gguf with --no-modelfile, and serve the file with llama.cpp, which renders the chat "
            "template itself (--jinja)."
        ) from error


def modelfile(tokenizer: Any, model: str, stop_ids: Sequence[int]) -> str:
    """Write a Modelfile for a model with this tokenizer. Without a chat template, Ollama passes prompts on as they are.

    `model` is the GGUF file or model folder for `FROM`, seen from the Modelfile.

    Raises:
        ModelError: the chat template cannot be written as Ollama's, see `read_turn_pieces`.
    """
    template, system = "{{ .Prompt }}", None
    if tokenizer.chat_template is not None:
        pieces = read_turn_pieces(tokenizer)
        template, system = pieces.as_go_template(), pieces.default_system
    stops = [str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in stop_ids]
    lines = [f"FROM {model}", f'TEMPLATE """{template}"""']
    if system:
        lines.append(f'SYSTEM """{_refuse_signs(system)}"""')
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    return "\n".join(lines) + "\n"


def _take_apart(tokenizer: Any, first: str) -> TurnPieces:
    """Read the pieces from short conversations; `_checked` checks them.

    The text between two turns ends the first turn and begins the second. The part that it has in common with the
    beginning of a conversation begins a turn. A ValueError says why the template is not a sequence of turns.

    `first` is the role of the first turn in these conversations: user, or system for a template that adds a system turn
    to conversations without one.
    """
    roles = dict.fromkeys((first, "user"))
    start, *_, end = _gaps(tokenizer, *roles)
    _, between, _ = _gaps(tokenizer, "user", first)
    opening, before_first = _without_common_end(start, between)
    after_user = between.removesuffix(before_first)
    if not end.startswith(after_user):
        raise ValueError(f"the last turn ends in {end!r}, one before it in {after_user!r}")
    *_, assistant_start, assistant_end, to_user, _ = _gaps(tokenizer, *roles, "assistant", "user", "user")
    before_user = to_user.removeprefix(after_user)
    before = {"user": before_user, "assistant": assistant_start.removeprefix(after_user)}
    after = {"user": after_user, "assistant": assistant_end.removesuffix(before_user)}
    default = None
    if not _leaves_system_out(tokenizer):
        system_start, system_end, _ = _gaps(tokenizer, "system", "user")
        before = {"system": system_start.removeprefix(opening), **before}
        after = {"system": system_end.removesuffix(before_user), **after}
        if first == "system":
            default = _gaps(tokenizer, "user")[0].removeprefix(system_start).removesuffix(system_end)
    return TurnPieces(opening, before, after, end.removeprefix(after_user), default)


def _checked(tokenizer: Any, pieces: TurnPieces) -> TurnPieces:
    """Return the pieces. A ValueError says which conversation they render in another way than the template."""
    for roles in _CHECKED:
        # Ollama does not strip contents. The white space at their ends shows whether the template strips them.
        turns = [{"role": role, "content": f" {role} says {number}.\n"} for number, role in enumerate(roles)]
        if (expected := _render(tokenizer, turns)) != (rendered := pieces.render(turns)):
            raise ValueError(f"for {', '.join(roles)} it renders {expected!r}, its pieces give {rendered!r}")
    return pieces


def _leaves_system_out(tokenizer: Any) -> bool:
    """Tell whether a system turn changes nothing, as for Phi-4-reasoning, whose template has a fixed system turn."""
    user = {"role": "user", "content": "a"}
    return _render(tokenizer, [{"role": "system", "content": "b"}, user]) == _render(tokenizer, [user])


def _gaps(tokenizer: Any, *roles: str) -> list[str]:
    """Return the text before, between and after the contents of turns, with the header of the next answer."""
    marks = [f"\u27e6{number}\u27e7" for number in range(len(roles))]  # contents that no template spells itself
    rest = _render(tokenizer, [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
    gaps = []
    for mark in marks:
        gap, *others = rest.split(mark)
        if len(others) != 1:
            raise ValueError(f"it leaves out or repeats one of the turns {', '.join(roles)}")
        gaps.append(gap)
        rest = others[0]
    return [*gaps, rest]


def _render(tokenizer: Any, turns: Turns) -> str:
    ((is_rendered, text),) = render_conversations(tokenizer, [turns], with_prompt=True)
    if not is_rendered:
        raise ValueError(f"it refuses the turns {', '.join(turn['role'] for turn in turns)}: {text}")
    return text


def _without_common_end(text: str, other: str) -> tuple[str, str]:
    """Cut a text in two: the second part is the longest ending that both texts share."""
    length = 0
    while length < min(len(text), len(other)) and text[-1 - length] == other[-1 - length]:
        length += 1
    return text[: len(text) - length], text[len(text) - length :]


def _literal(text: str) -> str:
    """Write a text for a Go template, with white space at its end in quotes, because an editor could trim it."""
    bare = _refuse_signs(text, "{{", "}}").rstrip()
    return bare + (f"{{{{ {json.dumps(text[len(bare) :])} }}}}" if bare != text else "")


def _refuse_signs(text: str, *signs: str) -> str:
    if any(sign in text for sign in (*signs, '"""')):
        raise ModelError(
            f"the chat template contains {text!r}, which a Modelfile cannot hold. Write the Modelfile by hand."
        )
    return text
