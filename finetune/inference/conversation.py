"""The turns of a chat, and the commands that a user may type into it."""

from __future__ import annotations

from dataclasses import dataclass, field

from finetune.data.turns import Turn, text_turn
from finetune.inference.answer_reader import Answer
from finetune.inference.prompts import Prompt, with_system_turn

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system turn and start again; - removes it, and without TEXT it is shown",
    "/tool TEXT": "give the result of a tool that the model has called",
    "/compare": "switch the answers of the base on or off",
    "/help": "this list",
    "/exit": "leave, like Ctrl-D",
}


@dataclass
class Conversation:
    """The system turn, the tools and the turns so far."""

    system: str | None = None
    tools: str = ""
    turns: list[Turn] = field(default_factory=list)

    def ask(self, text: str) -> None:
        """Add a user's turn."""
        self.turns.append(text_turn("user", text))

    def tell(self, result: str) -> None:
        """Add the result of a tool."""
        self.turns.append(text_turn("tool", result))

    @property
    def waits_for_tool(self) -> bool:
        """Whether the last answer calls a tool."""
        return bool(self.turns) and bool(self.turns[-1].get("tool_calls"))

    def answer(self, answer: Answer) -> None:
        """Add the assistant's turn. If it is empty, remove the question instead, because templates expect an answer."""
        if answer.text:
            self.turns.append(answer.as_turn())
        else:
            self.forget_unanswered()

    def forget_unanswered(self) -> None:
        """Remove the last question if it has no answer."""
        if self.turns and self.turns[-1]["role"] != "assistant":
            self.turns.pop()

    def reset(self) -> None:
        """Remove all turns but the system turn."""
        self.turns.clear()

    def as_prompt(self) -> Prompt:
        """Return the prompt for the next answer."""
        turns = with_system_turn(self.turns, self.system)
        return Prompt(source="the conversation", messages=tuple(turns), tools=self.tools)


@dataclass(frozen=True)
class Command:
    """A command of the chat, such as `/system Be brief.`"""

    name: str
    text: str = ""


def read_line(line: str) -> Command | str | None:
    """Read a line as a command, as the user's words, or as None if it is blank. A leading `//` stands for `/`."""
    text = line.strip()
    if not text:
        return None
    if text.startswith("//"):
        return text[1:]
    if text.startswith("/"):
        name, _, rest = text.partition(" ")
        return Command(name, rest.strip())
    return text
