"""Read the values that a sweep tries from its arguments, and draw the trials."""

from __future__ import annotations

import itertools
import math
import random
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune.config.key_advice import expected
from finetune.config.keys import fields
from finetune.errors import ConfigError

_RANGE = re.compile(r"(log|uniform|int)\((.*)\)")
_DIGITS = 4
"""Significant digits of a number that is drawn, so that a trial's command is short."""
_OWN_KEYS = ("output_dir", "resume", "run")
"""Keys that a sweep cannot try several values of: it sets the first two for each trial."""


@dataclass(frozen=True)
class ValueRange:
    """An interval with both ends: `log(1e-5,1e-3)`, `uniform(0,0.1)` or `int(1,8)`."""

    scale: str
    """`log`, `uniform` or `int`."""
    low: float
    high: float

    @property
    def size(self) -> float:
        """The number of values; infinite for numbers that are not whole."""
        return self.high - self.low + 1 if self.scale == "int" else math.inf


def read_space(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of all trials, and for each key with several values these as they were written.

    Raises:
        ConfigError: no key has several values, or one is named twice or has values that cannot be read.
    """
    same, space, problems = [], {}, []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        try:
            values = read_values(key, text) if equals else None
        except ConfigError as error:
            problems.append(str(error))
            continue
        if values is None:
            same.append(argument)
        elif key in space:
            problems.append(f"{argument}: {key} is given twice. Remove it.")
        elif key in _OWN_KEYS:
            quoted = f'"{text}"'
            problems.append(
                f"{argument}: {key} cannot have several values in a sweep. Remove it, or put quotes around a value "
                f"with commas: {shlex.quote(f'{key}={quoted}')}."
            )
        else:
            space[key] = text
    if not space and not problems:
        problems.append(
            "a sweep needs a key with several values: a list (lora.r=8,16,32) or a range, in quotes for the shell "
            "('optim.learning_rate=log(1e-5,1e-3)', uniform(LOW,HIGH), int(LOW,HIGH)). For one run: finetune train."
        )
    if problems:
        raise ConfigError("\n  ".join(problems))
    return same, space


def read_values(key: str, text: str) -> list[str] | ValueRange | None:
    """Read the list or the range of values of a key; None if it has one value only.

    Raises:
        ConfigError: a range is not two numbers in ascending order, or a list has an empty value or one twice.
    """
    if match := _RANGE.fullmatch(text.strip()):
        return _read_range(key, text, *match.groups())
    values = [value.strip() for value in _split_at_commas(text)]
    takes_list = key in fields() and "a list (" in expected(key)
    # validation.metrics=exact_match,json_valid is one list, as in `finetune train`.
    if len(values) == 1 or (takes_list and not any(value.startswith("[") for value in values)):
        return None
    if "" in values or len(set(values)) < len(values):
        problem = "an empty value" if "" in values else "a value twice"
        raise ConfigError(
            f"{key}={text}: the list has {problem}. Write {key}=A,B, or quotes around a value with commas."
        )
    return values


def _read_range(key: str, text: str, scale: str, numbers: str) -> ValueRange:
    try:
        low, high = map(int if scale == "int" else float, numbers.split(","))
        if -math.inf < low < high < math.inf and (scale != "log" or low > 0):
            return ValueRange(scale, low, high)
    except ValueError:
        pass
    of = {"int": "two whole numbers", "log": "two numbers above 0"}.get(scale, "two numbers")
    raise ConfigError(f"{key}={text}: expected {scale}(LOW,HIGH) with {of}, the lower one first.")


def _split_at_commas(text: str) -> list[str]:
    """Split at the commas that are neither in brackets nor in quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if character == "," and not depth and not quote:
            parts.append("")
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and not parts[-1][-1:].isalnum():
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        parts[-1] += character
    return parts


def draw_trials(space: Mapping[str, str], *, seed: int, num_trials: int | None) -> list[dict[str, str]]:
    """Draw trials from the values that `read_space` found. More trials with the same seed begin with the same ones.

    No combination of lists and whole numbers is drawn twice. If `num_trials` is None, every combination of lists is
    tried, in order.

    Raises:
        ConfigError: every combination of a range is asked for, or more trials than there are combinations.
    """
    candidates = {key: values for key, text in space.items() if (values := read_values(key, text)) is not None}
    if num_trials is None:
        if ranges := [f"{key}={space[key]}" for key, values in candidates.items() if isinstance(values, ValueRange)]:
            raise ConfigError(f"{' and '.join(ranges)}: a range needs --trials N, the number of trials to draw.")
        lists = (values for values in candidates.values() if isinstance(values, list))
        return [dict(zip(candidates, combination, strict=True)) for combination in itertools.product(*lists)]
    size = math.prod(len(values) if isinstance(values, list) else values.size for values in candidates.values())
    if num_trials > size:
        raise ConfigError(
            f"--trials is {num_trials}, but these values have only {size:.0f} combinations. Leave out --trials to try "
            "all of them (lists only), or lower it."
        )
    generator = random.Random(seed)
    trials: list[dict[str, str]] = []
    while len(trials) < num_trials:
        trial = {key: _draw(values, generator.random()) for key, values in candidates.items()}
        if size == math.inf or trial not in trials:
            trials.append(trial)
    return trials


def _draw(values: list[str] | ValueRange, uniform: float) -> str:
    """Map a number in [0, 1) to a value, evenly on a linear or logarithmic scale."""
    if isinstance(values, list):
        return values[int(uniform * len(values))]
    low, high = values.low, values.high
    if values.scale == "int":
        return str(int(low) + int(uniform * values.size))
    value = low * (high / low) ** uniform if values.scale == "log" else low + (high - low) * uniform
    return f"{min(max(float(f'{value:.{_DIGITS}g}'), low), high):g}"
