"""`finetune chat`: talk with a finished run. Answers appear token by token."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    MaxNewTokensOption,
    RunFolderArgument,
    SeedOption,
    SetOption,
    SystemOption,
    TemperatureOption,
    ToolsOption,
    TopKOption,
    TopPOption,
    log_as_this_rank,
    read_seed_option,
    read_tools_option,
)
from finetune.errors import ConfigError, DataError
from finetune.terminal import EMPTY, fold, visible

if TYPE_CHECKING:
    from finetune.data.turns import Turn
    from finetune.inference.answers import Answer
    from finetune.inference.generator import Generator
    from finetune.inference.prompts import Prompt

_PROMPT = "> "
_COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system turn and start again; - removes it, and without TEXT it is shown",
    "/tool TEXT": "give the result of a tool that the model has called; of several calls, the first that has none",
    "/compare": "switch the answers of the base on or off",
    "/help": "this list",
    "/exit": "leave, like Ctrl-D",
}


def chat(
    run_folder: RunFolderArgument,
    system: SystemOption = None,
    tools: ToolsOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Let the base answer too, from the same turns.")] = False,
    max_new_tokens: MaxNewTokensOption = 1024,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
) -> None:
    """Read what is typed, and print each answer while it is generated, until the input ends."""
    from finetune.inference.finished_run import find_run
    from finetune.inference.generator import AnswerSettings, Generator

    answer_settings = AnswerSettings(
        system=system,
        tools=read_tools_option(tools),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=read_seed_option(seed, temperature, top_p, top_k),
    )
    log_as_this_rank(logging.WARNING)
    run = find_run(run_folder, settings or [], base=base, checkpoint=checkpoint, is_alone=True)
    with Generator.open(run, answer_settings) as generator:
        ChatSession(generator, compare=compare).run()


@dataclass
class Conversation:
    """The system turn, the tools and the turns so far."""

    system: str | None = None
    tools: str = ""
    turns: list[Turn] = field(default_factory=list)

    def add(self, role: str, text: str) -> None:
        """Add a turn of the user, or the result of the first tool call that waits for one."""
        from finetune.data.turns import text_turn

        call = {"tool_call_id": self.waiting_calls[0]["id"]} if role == "tool" else {}
        self.turns.append(text_turn(role, text) | call)

    @property
    def waiting_calls(self) -> list[dict[str, Any]]:
        """The tool calls of the last answer that have no result yet."""
        results = list(takewhile(lambda turn: turn["role"] == "tool", reversed(self.turns)))
        before = self.turns[: len(self.turns) - len(results)]
        return before[-1].get("tool_calls", [])[len(results) :] if before else []

    def answer(self, answer: Answer) -> None:
        """Add the assistant's turn. If it is empty, remove the question instead, because templates expect an answer."""
        if answer.text:
            num_calls = sum(len(turn.get("tool_calls", ())) for turn in self.turns)
            self.turns.append(answer.as_turn(num_earlier_calls=num_calls))
        else:
            self.forget_unanswered()

    def forget_unanswered(self) -> None:
        """Remove the last question if it has no answer."""
        if self.turns and self.turns[-1]["role"] != "assistant":
            self.turns.pop()

    def as_prompt(self) -> Prompt:
        """Return the prompt for the next answer."""
        from finetune.inference.opening import with_system_turn
        from finetune.inference.prompts import Prompt

        turns = with_system_turn(self.turns, self.system)
        return Prompt(source="the conversation", messages=tuple(turns), tools=self.tools)


class ChatSession:
    """A conversation at the keyboard, or with the lines of a pipe; with a pipe, only answers go to standard output."""

    def __init__(self, generator: Generator, *, compare: bool) -> None:
        from finetune.data.chat_template import WITHOUT_TEMPLATE

        if generator.tokenizer.chat_template is None:
            raise ConfigError(
                "the run's tokenizer has no chat template, which a conversation needs. Use `finetune generate`, or "
                f"give a template with --set {WITHOUT_TEMPLATE}."
            )
        if compare:
            generator.require_base()
        self._generator = generator
        self._compare = compare
        self._conversation = Conversation(generator.opening.system, generator.opening.tools)
        self._at_keyboard = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Answer lines up to the last one, or to /exit. A leading `//` stands for `/`."""
        tools = f" tools: {self._conversation.tools}." if self._conversation.tools else ""
        self._note(f"{self._describe_system()}{tools} /help lists commands; Ctrl-D leaves.")
        for line in map(str.strip, self._lines()):
            if line == "/exit":
                return
            try:
                if not _is_text(line):
                    self._note("not sent: the line has bytes that are not text; expected UTF-8.")
                elif line.startswith("/") and not line.startswith("//"):
                    name, _, text = line.partition(" ")
                    self._obey(name, text.strip())
                elif line:
                    self._conversation.add("user", line.removeprefix("/"))
                    self._answer_last_turn()
            except KeyboardInterrupt:  # pressed when the answer had just ended
                self._conversation.forget_unanswered()

    def _lines(self) -> Iterator[str]:
        if not self._at_keyboard:
            yield from sys.stdin
            return
        with suppress(ImportError):
            import readline  # gives `input` a history and editing

            # Python switches this off. Without it, each line of a pasted text would be a question of its own.
            readline.parse_and_bind("set enable-bracketed-paste on")
        while True:
            try:
                yield input(_PROMPT)
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                self._note("Ctrl-D or /exit leaves.")

    def _answer_last_turn(self) -> None:
        try:
            ids = self._generator.encode_whole(self._conversation.as_prompt())
            if self._compare:
                self._answer("base", ids)
            answer = self._answer("tuned", ids)
        except DataError as error:
            self._conversation.forget_unanswered()
            self._note(f"not sent: {error} /reset starts again.")
            return
        # Keep the part of a stopped answer that was shown: the next question may refer to it.
        self._conversation.answer(answer)

    def _answer(self, name: str, ids: list[int]) -> Answer:
        """Print one model's answer token by token, up to its end or to Ctrl-C."""
        from finetune.inference.decoding import count_unended
        from finetune.model.base import max_context

        if self._compare:
            self._write(f"{name}: ")
        answer_ids: list[int] = []
        try:
            self._generator.stream(name, ids, self._write, answer_ids)
        except KeyboardInterrupt:
            self._write("\n")
            self._note("stopped.")
        else:
            self._write("\n" if self._generator.text(answer_ids).strip() else f"{EMPTY}\n")
            limit = self._generator.decoding.max_new_tokens
            if count_unended(self._generator.model, [ids], [answer_ids], limit) and len(answer_ids) < limit:
                context = max_context(self._generator.model)
                self._note(f"the answer reached the end of the model's context ({context:,} tokens).")
            elif len(answer_ids) >= limit:
                self._note(f"the answer did not end within {limit:,} tokens (--max-new-tokens).")
        return self._generator.read(answer_ids)

    def _obey(self, command: str, text: str) -> None:
        conversation = self._conversation
        if command == "/reset":
            conversation.turns.clear()
            self._note("the conversation starts again.")
        elif command == "/system":
            if text:
                conversation.system = None if text == "-" else text
                conversation.turns.clear()
            self._note(self._describe_system())
        elif command == "/tool" and conversation.waiting_calls:
            if text:
                conversation.add("tool", text)
            if waiting := conversation.waiting_calls:
                self._note(f"the call of {waiting[0]['function']['name']} waits for its result: /tool TEXT.")
            else:
                self._answer_last_turn()
        elif command == "/tool":
            self._note("the last answer calls no tool that waits for its result.")
        elif command == "/compare" and self._generator.has_base:
            self._compare = not self._compare
            self._note(f"the base answers {'too' if self._compare else 'no longer'}.")
        elif command == "/compare":
            self._note("this run trained every weight: there is no adapter to switch off.")
        elif command == "/help":
            self._note("\n".join(f"{name:<13} {meaning}" for name, meaning in _COMMANDS.items()))
        else:
            self._note(
                f"{command} is not a command (/help lists them). To send the line to the model, begin it with //."
            )

    def _describe_system(self) -> str:
        system = self._conversation.system or "none"
        return f"system: {system}" + ("" if system.endswith((".", "!", "?")) else ".")

    def _write(self, text: str) -> None:
        sys.stdout.write(visible(text))
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        """Write a note to standard error, because standard output is for answers."""
        sys.stdout.flush()
        sys.stderr.write(f"{fold(text, sys.stderr, indent='  ')}\n")
        sys.stderr.flush()


def _is_text(line: str) -> bool:
    """Return whether a line was read as text: Python reads other bytes as halves of surrogate pairs."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True
