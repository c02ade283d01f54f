"""Read the values that a sweep tries from its arguments, and draw the trials."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from finetune.config.keys import expected, fields
from finetune.errors import ConfigError

_RANGE = re.compile(r"(log|uniform|int)\((.*)\)")
_DIGITS = 4
"""Significant digits of a number that is drawn, so that a trial's command is short."""
_OWN_KEYS = ("output_dir", "resume", "run")
"""Keys that a sweep cannot try several values of: it sets the first two for each trial."""


@dataclass(frozen=True)
class Choices:
    """A list of values: `8,16,32`."""

    values: tuple[str, ...]

    @property
    def size(self) -> float:
        """The number of values."""
        return len(self.values)

    def draw(self, uniform: float) -> str:
        """Return the value for a number from 0 up to 1."""
        return self.values[int(uniform * len(self.values))]


@dataclass(frozen=True)
class Range:
    """An interval with both ends: `log(1e-5,1e-3)`, `uniform(0,0.1)` or `int(1,8)`."""

    scale: Literal["log", "uniform", "int"]
    low: float
    high: float

    @property
    def size(self) -> float:
        """The number of values; infinite for numbers that are not whole."""
        return self.high - self.low + 1 if self.scale == "int" else math.inf

    def draw(self, uniform: float) -> str:
        """Return the value for a number from 0 up to 1."""
        if self.scale == "int":
            return str(int(self.low) + int(uniform * self.size))
        if self.scale == "log":
            value = self.low * (self.high / self.low) ** uniform
        else:
            value = self.low + (self.high - self.low) * uniform
        return f"{min(max(float(f'{value:.{_DIGITS}g}'), self.low), self.high):g}"


Values = Choices | Range


def read_space(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate the arguments of all trials from the keys with several values.

    Returns:
        The arguments of all trials, and for each other key its values as they were written.

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
        elif key in space or key in _OWN_KEYS:
            why = "is given twice" if key in space else "cannot have several values in a sweep"
            problems.append(f"{argument}: {key} {why}. Remove it.")
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


def read_values(key: str, text: str) -> Values | None:
    """Read the values of a key; None if it has one value only.

    Raises:
        ConfigError: a range is not two numbers in ascending order, or a list has an empty value or one twice.
    """
    if found := _RANGE.fullmatch(text.strip()):
        return _read_range(key, found)
    parts = [part.strip() for part in _split_at_commas(text)]
    takes_list = key in fields() and "a list (" in expected(key)
    # validation.metrics=exact_match,json_valid is one list, as in `finetune train`.
    if len(parts) == 1 or (takes_list and not any(part.startswith("[") for part in parts)):
        return None
    if "" in parts or len(set(parts)) < len(parts):
        what = "an empty value" if "" in parts else "a value twice"
        raise ConfigError(f"{key}={text}: the list has {what}. Write {key}=A,B, or quotes around a value with commas.")
    return Choices(tuple(parts))


def draw_trials(space: Mapping[str, str], *, seed: int, num_trials: int | None) -> list[dict[str, str]]:
    """Draw trials from the values that `read_space` found. More trials with the same seed begin with the same ones.

    No combination of lists and whole numbers is drawn twice. If `num_trials` is None, every combination of lists is
    tried, in order.

    Raises:
        ConfigError: every combination of a range is asked for, or more trials than there are combinations.
    """
    values = {key: read_values(key, text) for key, text in space.items()}
    several = {key: found for key, found in values.items() if found is not None}
    size = math.prod(found.size for found in several.values())
    if num_trials is None:
        if ranges := [f"{key}={space[key]}" for key, found in several.items() if isinstance(found, Range)]:
            raise ConfigError(f"{' and '.join(ranges)}: a range needs --trials N, the number of trials to draw.")
        lists = [found.values for found in several.values() if isinstance(found, Choices)]
        return [dict(zip(several, combination, strict=True)) for combination in itertools.product(*lists)]
    if num_trials > size:
        raise ConfigError(
            f"--trials is {num_trials}, but these values have only {size:.0f} combinations. Leave out --trials to try "
            "all of them (lists only), or lower it."
        )
    generator = random.Random(seed)
    drawn: list[dict[str, str]] = []
    while len(drawn) < num_trials:
        trial = {key: found.draw(generator.random()) for key, found in several.items()}
        if size == math.inf or trial not in drawn:
            drawn.append(trial)
    return drawn


def _read_range(key: str, found: re.Match[str]) -> Range:
    scale, numbers = found[1], found[2].split(",")
    convert = int if scale == "int" else float
    try:
        low, high = (convert(number) for number in numbers)
        is_range = -math.inf < low < high < math.inf and (scale != "log" or low > 0)
    except ValueError:
        is_range = False
    if not is_range:
        of = {"int": "two whole numbers", "log": "two numbers above 0"}.get(scale, "two numbers")
        raise ConfigError(f"{key}={found[0]}: expected {scale}(LOW,HIGH) with {of}, the lower one first.")
    return Range(scale, low, high)  # type: ignore[arg-type]


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
