"""`finetune generate`: ask a finished run, one answer per prompt."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from finetune.cli.run_options import (
    BaseOption,
    CheckpointOption,
    JsonOption,
    MaxNewTokensOption,
    OptionRules,
    RunFolderArgument,
    SeedOption,
    SetOption,
    SystemOption,
    TemperatureOption,
    ToolsOption,
    TopKOption,
    TopPOption,
    giving_back_logs,
    log_as_this_rank,
    read_run_arguments,
    read_seed_option,
    read_tools_option,
    refuse_password,
)
from finetune.errors import ConfigError, DataError
from finetune.logs import waiting
from finetune.terminal import EMPTY, print_json, print_table, visible
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.inference.finished_run import FinishedRun
    from finetune.inference.generator import AnswerSettings, Generator
    from finetune.inference.prompts import Prompt

_log = logging.getLogger(__name__)
_STANDARD_INPUT = "-"
_FLAGS = frozenset({"raw", "compare"})
_OPTIONS = _FLAGS | {
    *("system", "tools", "max-new-tokens", "temperature", "top-p", "top-k", "seed", "batch-size", "base", "checkpoint")
}
"""The options that a user may write as NAME=VALUE, as other commands take overrides."""


class AnswerOfRun(NamedTuple):
    """The answer of a finished run to one prompt."""

    source: str
    """Which prompt it is, for messages: `prompt 2`."""
    prompt: str
    """The last turn of the prompt."""
    answer: str
    """The exact text. If the answer has thinking or calls, it has no white space around it."""
    ended_by: Literal["stop", "length"]
    """`length` if the answer did not end within `max_new_tokens` or the model's context."""
    num_tokens: int
    num_prompt_tokens: int
    expected: str | None = None
    """The answer in the row, if it has one."""
    reasoning: str = ""
    """What the model wrote before the answer between the tokens of thinking."""
    tool_calls: Sequence[Any] = ()
    base: str | None = None
    """The answer of the base, if it was asked as well."""


@giving_back_logs()
def generate(
    run: str | Path,
    prompts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
    *,
    system: str | None = None,
    compare: bool = False,
    base: str | Path | None = None,
    checkpoint: str | int | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
    **options: Any,
) -> list[AnswerOfRun]:
    """Ask a finished run, as `finetune generate` does without `--raw` and `--batch-size`.

    Call it without a launcher, or in one process of a launch.

    Args:
        run: the run's folder, or its name in `runs`.
        prompts: a text or a row with `prompt`, `messages` or `text`, or a list of them.
        system: the system turn, empty for none; None: the most frequent one in the training rows.
        compare: ask the base as well.
        options: `max_new_tokens`, `temperature`, `top_p`, `top_k` and `seed`, as of the command; `tools`, the tools to
            offer as a list or JSON text, empty for none. None: the most frequent ones in the training rows.
        base: another place of the base.
        checkpoint: a step or `latest`.
        overrides: keys of the run's configuration.

    Raises:
        FinetuneError: see its subclasses in `finetune.errors`.
    """
    from finetune.config.python_values import overrides_of
    from finetune.inference.finished_run import find_run
    from finetune.inference.prompts import read_json_lines, user_prompt

    settings = _read_options({"system": system, **options})
    if isinstance(prompts, (str, Mapping)):
        prompts = [prompts]
    elif not isinstance(prompts, Iterable) or type(prompts).__name__ == "DataFrame":  # which iterates over its columns
        raise DataError(
            f"prompts is {type(prompts).__name__}; expected a text, a row as a dict, or a list of them. For a "
            'DataFrame, give frame.to_dict("records").'
        )
    questions: list[Prompt] = []
    for place, prompt in enumerate(prompts, start=1):
        source = f"prompt {place}"
        if isinstance(prompt, str):
            questions.append(user_prompt(prompt, source))
        else:
            line = _as_json_line(prompt, source)
            questions += [replace(each, source=source) for each in read_json_lines([line], source)]
    log_as_this_rank(logging.WARNING)
    folder, base, checkpoint = read_run_arguments(run, base, checkpoint)
    found = find_run(folder, overrides_of(overrides), base=base, checkpoint=checkpoint, is_alone=True)
    records = _answer(found, questions, settings, compare=compare, limit="max_new_tokens")
    return [AnswerOfRun(**{**each, "base": each["base"]["answer"]} if compare else each) for each in records]


def _as_json_line(row: object, source: str) -> str:
    """Write a row of a script as JSON. Dates and numbers of other types become text.

    Raises:
        DataError: the row is no dict, has bytes, or has keys that are not text.
    """

    def as_text(value: object) -> str:
        if isinstance(value, (bytes, bytearray, memoryview)):
            raise DataError(f"{source} has {type(value).__name__}; expected text. Decode it first: value.decode().")
        return str(value)

    if not isinstance(row, Mapping):
        raise DataError(f"{source} is {type(row).__name__}; expected a text, or a row as a dict.")
    try:
        return json.dumps(dict(row), default=as_text)
    except (TypeError, ValueError) as error:
        raise DataError(f"{source} cannot be read as a row: {error}.") from error


def _read_options(options: Mapping[str, Any]) -> AnswerSettings:
    """Read the options of `generate`.

    Raises:
        ConfigError: an option is unknown, or has a value that it cannot have.
    """
    from finetune.data.turns import parse_tools
    from finetune.data.values import BadRowError
    from finetune.inference.generator import AnswerSettings

    known = [option.name for option in fields(AnswerSettings)]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(f"generate has no argument {unknown[0]}. Its options are {', '.join(known)}.")
    try:
        tools = None if options.get("tools") is None else parse_tools(options["tools"])
    except BadRowError as error:
        raise ConfigError(f"generate: {error}.") from None
    return AnswerSettings(**{"max_new_tokens": 256, **options, "tools": tools})


def generate_command(
    run_folder: RunFolderArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]…", help="A prompt to answer.")] = None,
    from_file: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="A file of rows with prompt, messages or text; - reads JSON lines from a pipe.",
            callback=refuse_password,
        ),
    ] = None,
    system: SystemOption = None,
    tools: ToolsOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts to the model without a template.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show the base's answer beside the tuned model's.")
    ] = False,
    max_new_tokens: MaxNewTokensOption = 256,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Prompts decoded together.", min=1)] = None,
    base: BaseOption = None,
    checkpoint: CheckpointOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the answers to the prompts of the command line, a file, rows or a pipe."""
    from finetune.inference.finished_run import find_run
    from finetune.inference.generator import AnswerSettings
    from finetune.inference.prompts import Prompt

    OptionRules({"--raw": raw, "--system": system, "--tools": tools}).exclude(
        "--raw",
        "--system",
        "--tools",
        because="the chat template writes them, and --raw leaves the chat template out. Drop --raw, or write them "
        "into the prompt.",
    )
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
    if run.config.parallel.sharding != "none":
        if from_file == _STANDARD_INPUT or not (prompts or from_file):
            raise DataError("the ranks of a sharded model do not share a pipe. Give PROMPT or --from FILE.")
        run = run.on_all_ranks()
    is_told_separator = any(each.startswith("data.separator=") for each in settings or [])
    separator = run.config.data.separator if is_told_separator else None  # not that of the training rows
    questions = _read_prompts(prompts or [], from_file, separator)
    if raw:
        if several := [prompt.source for prompt in questions if len(prompt.messages) > 1]:
            raise DataError(f"{several[0]} has several turns, but --raw takes a single text. Drop --raw.")
        questions = [Prompt(source=each.source, text=each.shown, expected=each.expected) for each in questions]
    records = _answer(run, questions, answer_settings, compare=compare, batch_size=batch_size)
    show_records(records, as_json=as_json, compare=compare)


def _answer(
    run: FinishedRun,
    questions: list[Prompt],
    settings: AnswerSettings,
    *,
    compare: bool,
    batch_size: int | None = None,
    limit: str = "--max-new-tokens",
) -> list[dict[str, Any]]:
    """Launch, load the run and answer the prompts. Return the records of `_answer_all`, on the main process alone.

    `limit` is what the user calls the limit of tokens.
    """
    from finetune.inference.generator import Generator
    from finetune.model.base import max_context

    with Generator.open(run, settings) as generator, waiting("answering"):
        if compare:
            generator.require_base()
        models = ["base", "tuned"] if compare else ["tuned"]
        records = _answer_all(generator, questions, models, batch_size or run.config.testing.batch_size)
    if not generator.runtime.is_main_process:
        return []
    answers = [each for record in records for each in ([record, record["base"]] if compare else [record])]
    lengths = [answer["num_tokens"] for answer in answers if answer["ended_by"] == "length"]
    num_at_limit = sum(length >= settings.max_new_tokens for length in lengths)
    if num_at_limit:
        _log.warning(
            "%d of %s did not end within %s. Ask with a larger %s.",
            *(num_at_limit, counted(len(answers), "answer"), counted(settings.max_new_tokens, "token"), limit),
        )
    if num_at_context := len(lengths) - num_at_limit:
        _log.warning(
            "%d of %s did not end within the model's context of %s tokens, which includes the prompt.",
            *(num_at_context, counted(len(answers), "answer"), f"{max_context(generator.model):,}"),
        )
    return records


def _refuse_settings(arguments: list[str]) -> None:
    """Refuse an argument that is an option or a key with a value, which other commands take as an override."""
    from finetune.config.keys import fields

    for place, argument in enumerate(arguments, start=1):
        name, equals, value = argument.partition("=")
        option = name.replace("_", "-")
        if equals and (option in _OPTIONS or name in fields()):
            instead = f"--{option}" + ("" if option in _FLAGS else f"={value}")
            instead = instead if option in _OPTIONS else f"--set {argument}"
            raise DataError(
                f"prompt {place} is {argument}, which is a setting in other commands. Write {instead}. If it is a "
                "prompt, ask it with --from FILE or through a pipe."
            )


def _read_prompts(arguments: list[str], from_file: str | None, separator: str | None) -> list[Prompt]:
    """Read the prompts. `separator` is the one between the cells of a CSV file, see `FileRows`."""
    from finetune.inference.prompts import read_json_lines, read_prompts_file, user_prompt

    _refuse_settings(arguments)
    if blank := next((place for place, text in enumerate(arguments, start=1) if not text.strip()), None):
        raise DataError(f"prompt {blank} is blank: there is nothing to answer.")
    if arguments and from_file is not None:
        raise DataError("PROMPT and --from are both given. Drop one.")
    if arguments:
        return [user_prompt(text, f"prompt {place}") for place, text in enumerate(arguments, start=1)]
    if from_file == _STANDARD_INPUT:
        return read_json_lines(sys.stdin, "standard input")
    if from_file is not None:
        return read_prompts_file(Path(from_file).expanduser(), separator=separator)
    if sys.stdin is None or sys.stdin.isatty():
        raise DataError(
            "there is nothing to answer. Give a PROMPT, --from FILE, or a text through a pipe; `finetune chat` reads "
            "one line after another."
        )
    text = sys.stdin.read()
    if not text.strip():
        raise DataError("standard input is blank: there is nothing to answer.")
    return [user_prompt(text.rstrip("\r\n"), "standard input")]


def _answer_all(
    generator: Generator, prompts: list[Prompt], models: list[str], batch_size: int
) -> list[dict[str, Any]]:
    """Make the record of each prompt that --json prints: the tuned model's answer, and the base's under `base`."""
    from finetune.inference.decoding import room_for_answer

    encoded = generator.encode(prompts)
    rooms = [room_for_answer(generator.model, ids, generator.decoding.max_new_tokens) for ids in encoded]
    records: list[dict[str, Any]] = [
        {
            "source": prompt.source,
            "prompt": prompt.shown,
            **({} if prompt.expected is None else {"expected": prompt.expected}),
            "num_prompt_tokens": len(ids),
        }
        for prompt, ids in zip(prompts, encoded, strict=True)
    ]
    for model in reversed(models):
        answers = generator.batch(model, encoded, batch_size=batch_size)
        for record, ids, room in zip(records, answers, rooms, strict=True):
            parts, exact = generator.read(ids), generator.text(ids)  # the text of `parts` is stripped, to score it
            answer = {
                "answer": exact if exact.strip() == parts.text else parts.text,
                **({"reasoning": parts.reasoning} if parts.reasoning else {}),
                **({"tool_calls": parts.calls} if parts.calls else {}),
                "ended_by": "stop" if len(ids) < room else "length",
                "num_tokens": len(ids),
            }
            record |= answer if model == "tuned" else {model: answer}
    return records


def show_records(records: list[dict[str, Any]], *, as_json: bool, compare: bool) -> None:
    """Print the answers as JSON lines, in a table with the answers of the base, or as plain text."""
    for record in records:
        if as_json:
            print_json(record, indent=None)
        elif compare:
            answers = {"base": record["base"]["answer"].strip() or EMPTY, "tuned": record["answer"].strip() or EMPTY}
            answers |= {"expected": record["expected"]} if "expected" in record else {}
            print_table(list(answers), [list(answers.values())], title=record["prompt"])
        else:
            sys.stdout.write(f"{visible(record['answer'].strip()) or EMPTY}\n")
