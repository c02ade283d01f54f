"""The turns of a chat, and the commands among the lines that are typed into it."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.inference.prompts import Prompt, Turn, with_system_turn

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system turn and start again; - removes it, and without TEXT it is shown",
    "/compare": "switch the answers of the base on or off",
    "/help": "this list",
    "/exit": "leave, like Ctrl-D",
}


@dataclass
class Conversation:
    """The turns so far, and the system turn before them."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add a user's turn."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the assistant's turn. An empty one takes the question back, since no template renders it well."""
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
        """The prompt for the next answer."""
        return Prompt(source="the conversation", messages=tuple(with_system_turn(self.turns, self.system)))


@dataclass(frozen=True)
class Command:
    """A line for the program: `/system Be brief.`"""

    name: str
    text: str = ""


def read_line(line: str) -> Command | str | None:
    """Read a line as a command, as the user's words, or as None if it is blank. `//` at its start stands for `/`."""
    text = line.strip()
    if not text:
        return None
    if text.startswith("//"):
        return text[1:]
    if text.startswith("/"):
        name, _, rest = text.partition(" ")
        return Command(name, rest.strip())
    return text
