"""`finetune generate`: ask a finished run, one answer per prompt."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    JsonOption,
    MaxNewTokensOption,
    RunFolderArgument,
    SeedOption,
    SetOption,
    SystemOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    refuse_password,
)
from finetune.errors import DataError

if TYPE_CHECKING:
    from finetune.cli.answering import Answering
    from finetune.inference.prompts import Prompt

_STANDARD_INPUT = "-"


def generate(
    run_folder: RunFolderArgument,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]…", help="What the user says.", show_default=False)
    ] = None,
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Rows with prompt, messages or text; - reads JSON lines from a pipe.",
            callback=refuse_password,
        ),
    ] = None,
    system: SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts to the model as they stand, no template.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="The base's answer beside the tuned model's.")] = False,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = 0,
    batch_size: Annotated[int | None, typer.Option(help="Prompts decoded together.", min=1, show_default=False)] = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a finished run: one answer per PROMPT, or per row of --from FILE, or to what comes through a pipe."""
    from finetune.cli.answering import Answering, AnswerSettings
    from finetune.inference.finished_run import find_run, load_finished_run

    wished = AnswerSettings(
        system=system, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
    )
    wished.check()
    run = find_run(run_folder, settings or [], base=base, checkpoint=checkpoint, is_alone=True)
    asked = [_as_it_stands(prompt) if raw else prompt for prompt in _read_prompts(prompts or [], from_file)]

    from finetune.distributed.launch import launch

    with launch(run.config, trains=False) as runtime:
        answering = Answering(load_finished_run(runtime, run), run, wished)
        if compare:
            answering.require_base()
        names = ["base", "tuned"] if compare else ["tuned"]
        answers = _answer_all(answering, asked, names, batch_size or run.config.testing.batch_size)
    _show(answers, as_json=as_json, compare=compare)


@dataclass(frozen=True)
class _Answered:
    """A prompt with each model's answer: its text, and whether a stop id or the length ended it."""

    prompt: Prompt
    texts: dict[str, str]
    ended_by: dict[str, str]
    num_prompt_tokens: int
    num_tokens: dict[str, int]

    def as_record(self) -> dict[str, Any]:
        """Plain values for --json."""
        models = {
            name: {"answer": text, "ended_by": self.ended_by[name], "num_tokens": self.num_tokens[name]}
            for name, text in self.texts.items()
        }
        record: dict[str, Any] = {"source": self.prompt.source, "prompt": self.prompt.shown}
        record |= {} if self.prompt.expected is None else {"expected": self.prompt.expected}
        record |= {"num_prompt_tokens": self.num_prompt_tokens, **models.pop("tuned")}
        return record | models


def _read_prompts(words: list[str], from_file: str | None) -> list[Prompt]:
    from finetune.inference.prompts import read_file, read_json_lines, read_text, read_words

    if words and from_file is not None:
        raise DataError("both PROMPT and --from are given: which is meant? Drop one.")
    if words:
        return read_words(words)
    if from_file == _STANDARD_INPUT:
        return read_json_lines(sys.stdin, "standard input")
    if from_file is not None:
        return read_file(Path(from_file).expanduser())
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError(
            "there is nothing to answer. Give a PROMPT, --from FILE, or a text through a pipe; `finetune chat` asks "
            "for one line after the other."
        )
    return read_text(sys.stdin.read(), "standard input")


def _as_it_stands(prompt: Prompt) -> Prompt:
    from finetune.inference.prompts import Prompt

    if len(prompt.messages) > 1:
        raise DataError(
            f"{prompt.source} has {len(prompt.messages)} turns, which --raw cannot put together. Drop --raw."
        )
    return Prompt(source=prompt.source, text=prompt.shown, expected=prompt.expected)


def _answer_all(answering: Answering, prompts: list[Prompt], names: list[str], batch_size: int) -> list[_Answered]:
    from finetune.inference.decoding import generate_answers, room_for_answer

    decoding = answering.decoding
    encoded = [answering.encode(prompt) for prompt in prompts]
    answers = {}
    for name in names:
        with answering.as_model(name) as model:
            answers[name] = generate_answers(
                model,
                encoded,
                stop_ids=decoding.stop_ids,
                max_new_tokens=decoding.max_new_tokens,
                batch_size=batch_size,
                sampling=decoding.sampling,
            )
    rooms = [room_for_answer(answering.model, ids, decoding.max_new_tokens) for ids in encoded]
    return [
        _Answered(
            prompt=prompt,
            texts={name: answering.text(answers[name][row]).strip() for name in names},
            ended_by={name: "stop" if len(answers[name][row]) < rooms[row] else "length" for name in names},
            num_prompt_tokens=len(encoded[row]),
            num_tokens={name: len(answers[name][row]) for name in names},
        )
        for row, prompt in enumerate(prompts)
    ]


def _show(answers: list[_Answered], *, as_json: bool, compare: bool) -> None:
    from finetune.terminal import print_json, visible

    if as_json:
        for answer in answers:
            print_json(answer.as_record(), indent=None)
    elif compare:
        _show_beside(answers)
    else:
        sys.stdout.writelines(f"{visible(answer.texts['tuned'])}\n" for answer in answers)


def _show_beside(answers: list[_Answered]) -> None:
    """A table for each prompt; texts stand as they are, since rich could take a part of one for markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from finetune.terminal import visible

    console = Console()
    for answer in answers:
        table = Table(title=Text(visible(answer.prompt.shown)), title_justify="left", expand=False)
        shown = {**answer.texts, **({} if answer.prompt.expected is None else {"expected": answer.prompt.expected})}
        for name in shown:
            table.add_column(name, overflow="fold", ratio=1)
        table.add_row(*(Text(visible(text)) for text in shown.values()))
        console.print(table)
