"""Rows that are refused, and a reader that follows the advice of the refusal.

In these rows, every question ends with a question mark, an answer that must not be learnt is `In Spain.`, and what must
not even be read has the word WRONG. So what a run would learn can be checked without looking at each row.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config.objectives import OBJECTIVES
from finetune.config.schema import DataSection
from finetune.data.encode import encode_examples
from finetune.data.encoded import EncodedExamples
from finetune.data.examples import load_examples
from finetune.data.preferences import encode_labelled, encode_preferences
from finetune.errors import ConfigError, DataError
from finetune.fallbacks import Fallbacks
from tests.tiny import tiny_tokenizer

_SETTING = r"(?:'(?:data|training)\.[^']+'|(?:data|training)\.[\w.]+=[^\s,;)']*[^\s,;:)'.])"
_SETTINGS = re.compile(rf"{_SETTING}(?: {_SETTING})*")
_COMMAND = re.compile(r"`(finetune [a-z]+)|(?:^|[Rr]un )(finetune [a-z]+)")
_MUST_NOT_BE_LEARNT = ("?", "In Spain.", "WRONG")


class Rows(NamedTuple):
    """Rows, and how they are read."""

    rows: list[Any]
    objective: str = "sft"
    settings: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    suffix: str = "jsonl"


def write(folder: Path, case: Rows) -> str:
    """Write the rows to a file; returns its path."""
    path = folder / f"rows.{case.suffix}"
    if case.suffix == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, case.rows[0])
            writer.writeheader()
            writer.writerows(case.rows)
    else:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in case.rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def section_of(folder: Path, path: str, settings: dict[str, Any]) -> DataSection:
    """A data section with settings as an override gives them: `columns.prompt` is a key of `columns`."""
    keys: dict[str, Any] = {"path": path, "cache_dir": str(folder / "cache"), "validation": None, "columns": {}}
    for key, value in settings.items():
        if key.startswith("columns."):
            keys["columns"] = {**keys["columns"], key.removeprefix("columns."): value}
        else:
            keys[key] = {**keys["columns"], **value} if key == "columns" else value
    return DataSection(**keys)


def encode(section: DataSection, objective: str) -> tuple[EncodedExamples, ...]:
    """The training rows as an objective encodes them, under `strict`; a pair has two sides."""
    tokenizer, strict = tiny_tokenizer(), Fallbacks(strict=True)
    rows = OBJECTIVES[objective].rows
    if rows == "pairs":
        return encode_preferences(section, tokenizer, fallbacks=strict).train.sides
    if rows == "labelled":
        return encode_labelled(section, tokenizer, fallbacks=strict).train.sides
    return encode_examples(load_examples(section, rows), tokenizer, section, fallbacks=strict).train.sides


def learnt(examples: EncodedExamples) -> list[str]:
    """The text of each row that carries loss, without special tokens, of rows that are good."""
    rows = [examples[row] for row in range(len(examples)) if bool(examples.is_good[row])]
    return [str(tiny_tokenizer().decode(row.input_ids[row.is_target], skip_special_tokens=True)) for row in rows]


def refusal(folder: Path, case: Rows) -> str:
    """What the rows are refused with; empty if they are read."""
    try:
        encode(section_of(folder, write(folder, case), case.settings), case.objective)
    except (DataError, ConfigError) as error:
        return str(error)
    return ""


def proposals(message: str) -> list[list[tuple[str, str]]]:
    """The settings that a message proposes. Those with one space between them belong together."""
    assert not (_COMMAND.search(message)), f"the advice has a command, which no test runs: {message}"
    groups = [re.findall(_SETTING, group) for group in _SETTINGS.findall(message)]
    split = [[setting.strip("'").partition("=")[::2] for setting in group] for group in groups]
    return [[(key, value) for key, value in group] for group in split]


def follow(folder: Path, case: Rows, message: str) -> int:
    """Follow each proposal of a refusal, and check what is learnt then. Returns how many there were.

    If a message has several problems, one proposal of each is followed at a time.
    """
    problems = message.split("\n  ")[1:] if message.startswith("the data has ") else [message]
    known = {(f"data.{key}", str(value)) for key, value in case.settings.items()}  # these describe the refused run
    found = [[group for group in proposals(problem) if not known & set(group)] for problem in problems]
    assert all(found) or len(problems) == 1, f"a problem has no proposal: {message}"
    num_followed = max(map(len, found))
    for number in range(num_followed):
        group = [setting for of_problem in found for setting in of_problem[min(number, len(of_problem) - 1)]]
        told = f"{' '.join('='.join(setting) for setting in group)}, which is proposed by: {message}"
        objective, settings = case.objective, dict(case.settings)
        for key, value in group:
            if key == "training.objective":
                objective = value
            else:
                settings[key.removeprefix("data.")] = value
        here = folder / str(number)
        here.mkdir()
        section = section_of(here, write(here, case), settings)
        try:
            first = encode(section, objective)[0]
        except (DataError, ConfigError) as error:
            raise AssertionError(f"{error} follows {told}") from error
        if section.format == "text" or OBJECTIVES[objective].rows == "prompts":
            continue  # the whole text carries loss, or nothing does
        for text in learnt(first):
            assert not any(part in text for part in _MUST_NOT_BE_LEARNT), f"{text!r} is learnt after {told}"
        for row in range(len(first)):
            assert "WRONG" not in (text := str(tiny_tokenizer().decode(first[row].input_ids))), (
                f"{text} is read: {told}"
            )
    return num_followed
