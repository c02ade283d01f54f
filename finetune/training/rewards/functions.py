"""Functions that reward generated answers: built-in ones and the user's own, with TRL's signature.

Security: a function is code, so it is looked up like a metric (`finetune.config.own_functions`): a module must be
installed and allowed by the command line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from finetune.config.own_functions import resolve_functions
from finetune.data.rendering import match_patterns
from finetune.data.turns import Turn, text_turn
from finetune.data.values import quote
from finetune.deadlines import DeadlineExceededError, call_within
from finetune.errors import ConfigError, DataError
from finetune.inference.answers import exact_match, json_equal, json_valid, token_f1
from finetune.own_calls import without_exit
from finetune.signals import Terminated, received_stop_signal
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.config.schema import Config, RewardSection


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """An answer to reward."""

    source: str
    """The file and line of its prompt."""
    prompt: Any
    """The turns of the prompt, or its text."""
    expected: str
    """The expected answer after its thinking; empty if the row has none."""
    columns: Mapping[str, Any]
    """The other columns of the row."""
    text: str
    """The answer after its thinking."""
    whole: str
    """The whole answer, without special tokens."""
    marked: str
    """The whole answer with special tokens, because the marks of thinking may be some. The end token is left out."""
    ids: Sequence[int]
    """Its tokens, including the end token."""
    turns: Sequence[Turn] | None = None
    """All turns after the prompt, in a run with tools or an environment. There, `ids` has the tokens of all turns, and
    the texts are from the last answer."""
    score: float = math.nan
    """The score of the environment."""
    num_read: int = 0
    """How many of `ids` the model read, because they are of results or of turns of the environment."""


Score = Callable[[GeneratedAnswer], float]
RewardFunction = Callable[..., Any]
"""(prompts, completions, completion_ids, and each other column of the rows, all by name) to a list of numbers, one for
each completion; None where a completion has no reward. As in TRL, prompt and completion are lists of turns where the
row has turns, and text where it has text."""

_PARAMETERS = "prompts, completions, completion_ids, expected, **columns"
_THINKS_FIRST = re.compile(r"\s*<think>(?!.*<think>).*?</think>\s*\S.*", flags=re.DOTALL)


def built_in_functions(section: RewardSection, *, longest: int) -> dict[str, Score]:
    """Return the built-in functions, by name. `length` compares generated tokens with `longest`."""

    def regex(answer: GeneratedAnswer) -> float:
        ((is_match,),) = match_patterns(
            [section.pattern or ""], [answer.text.strip()], flags=re.DOTALL, name="reward.pattern"
        )
        return float(section.pattern is not None and is_match)

    return {
        "exact_match": lambda answer: exact_match(answer.text, answer.expected),
        "json_equal": lambda answer: json_equal(answer.text, answer.expected),
        "json_valid": lambda answer: json_valid(answer.text, answer.expected),
        "token_f1": lambda answer: token_f1(answer.text, answer.expected),
        "regex": regex,
        "format_think": lambda answer: float(_THINKS_FIRST.fullmatch(answer.marked) is not None),
        "length": lambda answer: 1 - (len(answer.ids) - answer.num_read) / longest,
        "environment": lambda answer: answer.score,
    }


LARGEST_REWARD = 1e100
"""Rewards are smaller than this in size, so that the sums of their squares are finite."""
_LATER_SECONDS = 2.0
_NEED_EXPECTED = ("exact_match", "json_equal", "token_f1")


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The reward functions of a run. The user's own are imported by `check`, or when they are first called."""

    names: tuple[str, ...]
    """The names of the functions, as metrics name them."""
    weights: tuple[float, ...]
    """The weight of each function."""
    timeout_seconds: float
    """The longest that a function may take."""
    _scores: Mapping[str, Score] = field(repr=False)
    _config: Config = field(repr=False)

    @classmethod
    def of(cls, config: Config) -> Rewards:
        """Make the functions of a configuration.

        Raises:
            ConfigError: its settings do not fit each other.
        """
        section = config.reward
        if not section.functions:
            raise ConfigError(
                "reward.functions is empty, but training.objective=grpo learns from rewards. Name functions: "
                "reward.functions=json_equal."
            )
        weights = section.weights or [1.0] * len(section.functions)
        if len(weights) != len(section.functions) or not all(map(math.isfinite, weights)) or not any(weights):
            raise ConfigError(
                f"reward.weights is {weights}, but reward.functions names {len(section.functions)}: "
                f"{', '.join(section.functions)}. Give one finite number for each, at least one of them not 0."
            )
        if len(set(section.functions)) < len(section.functions):
            raise ConfigError(f"reward.functions names one twice: {', '.join(section.functions)}. Name each once.")
        if "environment" in section.functions and not config.rollout.environment:
            raise ConfigError("reward.functions names environment, but rollout.environment is not set. Set it.")
        _refuse_bad_pattern(section)
        known = built_in_functions(section, longest=config.rollout.max_completion_length)
        return cls(
            names=tuple(section.functions),
            weights=tuple(weights),
            timeout_seconds=section.timeout_seconds,
            _scores={name: known[name] for name in section.functions if name in known},
            _config=config,
        )

    def check(self) -> None:
        """Import the user's own functions.

        Raises:
            ConfigError: a name is unknown or not allowed, or it is no function that takes what rewards are called with.
        """
        self._own  # noqa: B018  # looked up here

    @cached_property
    def _own(self) -> dict[str, RewardFunction]:
        section = self._config.reward
        known: dict[str, RewardFunction] = built_in_functions(section, longest=1)
        names = [name for name in self.names if name not in self._scores]
        return resolve_functions(
            names, known, section.functions_from, asked_by="reward.functions", parameters=_PARAMETERS
        )

    @property
    def metrics(self) -> dict[str, str]:
        """The name of each function's metric: `reward_` and the last part of its name, or all if two are alike.

        `reward_std` is the spread within groups.
        """
        short = [name.rpartition(".")[2] for name in self.names]
        return {
            name: f"reward_{last if [*short, 'std'].count(last) == 1 else name}"
            for name, last in zip(self.names, short, strict=True)
        }

    @property
    def need_columns(self) -> bool:
        """Whether a function reads the prompts and the columns of the rows."""
        return any(name not in self._scores for name in self.names)

    @property
    def needing_expected(self) -> tuple[str, ...]:
        """The functions that compare with expected answers."""
        return tuple(name for name in self.names if name in _NEED_EXPECTED)

    def __call__(
        self,
        answers: Sequence[GeneratedAnswer],
        *,
        deadline: Callable[[float, str], AbstractContextManager[None]] = lambda _seconds, _late: nullcontext(),
    ) -> list[list[float]]:
        """Return the rewards of all functions for each answer, nan where one gives none.

        `deadline` ends what call_within cannot: a C call that holds the interpreter's lock, see `Liveness.deadline`.

        Raises:
            DataError: a function fails.
        """
        by_function = []
        for name in self.names:
            score = self._scores.get(name)
            with deadline(self.timeout_seconds + _LATER_SECONDS, self._late(name, answers)):
                by_function.append(self._ask(name, answers) if score is None else [*map(score, answers)])
        return [list(of_answer) for of_answer in zip(*by_function, strict=True)]

    def _late(self, name: str, answers: Sequence[GeneratedAnswer]) -> str:
        return (
            f"the reward function {name} has not returned after {self.timeout_seconds:g} s for {len(answers)} answers, "
            f"the first to {answers[0].source}. Make it faster, or raise reward.timeout_seconds."
        )

    def _ask(self, name: str, answers: Sequence[GeneratedAnswer]) -> list[float]:
        """Call a function of the user's.

        Each answer has copies of its row's values, so that a function which changes them changes no other answer's and
        no later step's.
        """
        columns = {column for answer in answers for column in answer.columns}
        arguments = {column: [deepcopy(answer.columns.get(column)) for answer in answers] for column in sorted(columns)}
        arguments |= {
            "prompts": [deepcopy(answer.prompt) for answer in answers],
            "completions": [_completion_of(answer) for answer in answers],
            "completion_ids": [list(answer.ids) for answer in answers],
            "expected": [answer.expected for answer in answers],
        }
        values = self._in_time(name, arguments, answers)
        is_list = isinstance(values, Sequence) and not isinstance(values, str)
        if not is_list or len(values) != len(answers):
            actual = counted(len(values), "value") if is_list else quote(values)
            raise DataError(
                f"the reward function {name} returned {actual} for {len(answers)} answers; expected a list with one "
                "number, or None, for each."
            )
        return [_as_number(name, value, answer) for value, answer in zip(values, answers, strict=True)]

    def _in_time(self, name: str, arguments: Mapping[str, Any], answers: Sequence[GeneratedAnswer]) -> Any:
        first = f"{len(answers)} answers, the first to {answers[0].source}"
        try:
            return call_within(
                self.timeout_seconds, lambda: _called(self._own[name], arguments), name=f"reward function {name}"
            )
        except DeadlineExceededError:
            raise DataError(self._late(name, answers)) from None
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # it is the user's own code, which may call sys.exit
            raise DataError(f"the reward function {name} failed on {first}: {error!r}. Correct it.") from error


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a function in a thread, where no signal raises KeyboardInterrupt: it is the function's own error."""
    try:
        return _as_list(without_exit(function)(**arguments))
    except KeyboardInterrupt as error:
        if received_stop_signal() is not None:  # perhaps of a program that the function started, and Ctrl-C ended
            raise
        raise RuntimeError("it raised KeyboardInterrupt") from error


def _as_list(values: Any) -> Any:
    """Turn an array or a tensor into a list. Other values stay as they are."""
    return values.tolist() if hasattr(values, "tolist") else values


def _completion_of(answer: GeneratedAnswer) -> str | list[Turn]:
    if answer.turns is not None:
        return list(answer.turns)
    return answer.whole if isinstance(answer.prompt, str) else [text_turn("assistant", answer.whole)]


def _refuse_bad_pattern(section: RewardSection) -> None:
    uses_pattern = "regex" in section.functions
    if uses_pattern and section.pattern is None:
        raise ConfigError("reward.functions names regex, but reward.pattern is not set. Set the expression to match.")
    if section.pattern is None:
        return
    if not uses_pattern:
        raise ConfigError("reward.pattern is set, but reward.functions does not name regex. Add regex, or remove it.")
    try:
        re.compile(section.pattern)
    except re.error as error:
        raise ConfigError(f"reward.pattern is {section.pattern!r}, which is no regular expression: {error}.") from None


def _as_number(name: str, value: object, answer: GeneratedAnswer) -> float:
    if value is None:
        return math.nan
    try:
        # What is no number raises an error, except for text of one.
        number = math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except Exception:  # an object of the user's may raise any error
        number = math.nan
    if not abs(number) < LARGEST_REWARD:
        raise DataError(
            f"the reward function {name} gave {quote(value)} for the answer {answer.whole[:60]!r} to {answer.source}; "
            f"expected a number below {LARGEST_REWARD:g} in size, or None for no reward."
        )
    return number
