"""`finetune chat`: talk with a finished run. Answers appear token by token."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

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
    read_tools_option,
)
from finetune.errors import ConfigError, DataError
from finetune.terminal import EMPTY, fold, visible

if TYPE_CHECKING:
    from finetune.inference.answer_reader import Answer
    from finetune.inference.answering import Answering
    from finetune.inference.conversation import Command

_PROMPT = "> "


def chat(
    run_folder: RunFolderArgument,
    system: SystemOption = None,
    tools: ToolsOption = None,
    compare: Annotated[bool, typer.Option("--compare", help="Let the base answer too, from the same turns.")] = False,
    max_new_tokens: MaxNewTokensOption = 1024,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
) -> None:
    """Talk with a finished run. /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."""
    from finetune.inference.answering import AnswerSettings, open_answering
    from finetune.inference.finished_run import find_run

    wished = AnswerSettings(
        system=system,
        tools=read_tools_option(tools),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    log_as_this_rank()
    run = find_run(run_folder, settings or [], base=base, checkpoint=checkpoint, is_alone=True)
    with open_answering(run, wished) as answering:
        ChatSession(answering, compare=compare).run()


class ChatSession:
    """A conversation at the keyboard, or with the lines of a pipe; with a pipe, only answers go to standard output."""

    def __init__(self, answering: Answering, *, compare: bool) -> None:
        from finetune.data.chat_template import WITHOUT_TEMPLATE
        from finetune.inference.conversation import Conversation

        if answering.tokenizer.chat_template is None:
            raise ConfigError(
                "the run's tokenizer has no chat template, which a conversation needs. Use `finetune generate`, or "
                f"give a template with --set {WITHOUT_TEMPLATE}."
            )
        if compare:
            answering.require_base()
        self._answering = answering
        self._compare = compare
        self._conversation = Conversation(answering.opening.system, answering.opening.tools)
        self._at_keyboard = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Answer lines up to the last one, or to /exit."""
        from finetune.inference.conversation import Command, read_line

        tools = f" tools: {self._conversation.tools}." if self._conversation.tools else ""
        self._note(f"{_describe_system(self._conversation.system)}{tools} /help lists commands; Ctrl-D leaves.")
        for line in self._lines():
            said = read_line(line)
            if said == Command("/exit"):
                return
            try:
                if isinstance(said, Command):
                    self._obey(said)
                elif said is not None:
                    self._conversation.ask(said)
                    self._go_on()
            except KeyboardInterrupt:  # pressed when the answer had just ended
                self._conversation.forget_unanswered()

    def _lines(self) -> Iterator[str]:
        if not self._at_keyboard:
            yield from sys.stdin
            return
        with suppress(ImportError):
            import readline  # noqa: F401  # gives `input` a history and editing
        while True:
            try:
                yield input(_PROMPT)
            except EOFError:
                sys.stdout.write("\n")
                return
            except KeyboardInterrupt:
                sys.stdout.write("\n")
                self._note("Ctrl-D or /exit leaves.")

    def _go_on(self) -> None:
        """Answer the last turn."""
        try:
            ids = self._answering.encode(self._conversation.as_prompt())
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
        if self._compare:
            self._write(f"{name}: ")
        given: list[int] = []
        try:
            self._answering.stream(name, ids, self._write, given)
        except KeyboardInterrupt:
            self._write("\n")
            self._note("stopped.")
        else:
            self._write("\n" if self._answering.text(given).strip() else f"{EMPTY}\n")
        return self._answering.read(given)

    def _obey(self, command: Command) -> None:
        from finetune.inference.conversation import COMMANDS

        talk = self._conversation
        if command.name == "/reset":
            talk.reset()
            self._note("the conversation starts again.")
        elif command.name == "/system":
            if command.text:
                talk.system = None if command.text == "-" else command.text
                talk.reset()
            self._note(_describe_system(talk.system))
        elif command.name == "/tool":
            if talk.waits_for_tool:
                talk.tell(command.text)
                self._go_on()
            else:
                self._note("the last answer calls no tool.")
        elif command.name == "/compare":
            self._switch_compare()
        elif command.name == "/help":
            self._note("\n".join(f"{name:<13} {meaning}" for name, meaning in COMMANDS.items()))
        else:
            self._note(
                f"{command.name} is not a command (/help lists them). To send the line to the model, begin it with //."
            )

    def _switch_compare(self) -> None:
        if not self._answering.has_base:
            self._note("this run trained every weight: there is no adapter to switch off.")
            return
        self._compare = not self._compare
        self._note(f"the base answers {'too' if self._compare else 'no longer'}.")

    def _write(self, text: str) -> None:
        sys.stdout.write(visible(text))
        sys.stdout.flush()

    def _note(self, text: str) -> None:
        """Write a note to standard error, because standard output is for answers."""
        sys.stdout.flush()
        sys.stderr.write(f"{fold(text, sys.stderr, indent='  ')}\n")
        sys.stderr.flush()


def _describe_system(system: str | None) -> str:
    return f"system: {system or 'none'}" + ("" if (system or "").endswith((".", "!", "?")) else ".")
