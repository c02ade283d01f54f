"""The turns of a chat, and what a line typed into it means."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.inference.prompts import Prompt, Turn, with_system_turn

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system turn and begin anew; without TEXT show it, with - have none",
    "/compare": "answer with the base too, or no longer",
    "/help": "this list",
    "/exit": "leave; Ctrl-D does too",
}


@dataclass
class Conversation:
    """What was said so far."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """A user's turn."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The assistant's turn. One that says nothing takes the question back: no template renders it well."""
        if text.strip():
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> None:
        """Forget the last question."""
        self.turns.pop()

    def forget_unanswered(self) -> None:
        """Forget the last question where no answer was noted."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.take_back()

    def reset(self) -> None:
        """Forget all but the system turn."""
        self.turns.clear()

    def as_prompt(self) -> Prompt:
        """What the model is given next."""
        return Prompt(source="the conversation", messages=tuple(with_system_turn(self.turns, self.system)))


@dataclass(frozen=True)
class Command:
    """A line that is for the program: `/system Be brief.`"""

    name: str
    text: str = ""


def read_line(line: str) -> Command | str | None:
    """A command, what the user says, or None for a blank line. `//` at the start says a text that begins with `/`."""
    text = line.strip()
    if not text:
        return None
    if text.startswith("//"):
        return text[1:]
    if text.startswith("/"):
        name, _, rest = text.partition(" ")
        return Command(name, rest.strip())
    return text
