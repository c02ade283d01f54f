"""The answers of a vLLM server that finetune reads. All their types, ranges and counts are checked here."""

from __future__ import annotations

import re
import reprlib
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic.functional_validators import model_validator

_MOST_TOKEN_IDS = 1 << 22
"""More than any vocabulary has. A table of logits is as wide as the largest token id."""
_LEAST, _MOST = -1e4, 1e-3
"""The range of log p. vLLM writes -9999 for minus infinity, and rounding may put a probability a little above 1."""

_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=_MOST_TOKEN_IDS)]], Field(fail_fast=True)]
_LogProbabilities = Annotated[list[Annotated[float, Field(ge=_LEAST, le=_MOST)]], Field(fail_fast=True)]


def _by_token(given: object) -> dict[int, float]:
    """Convert `{"token_id:5": -0.1}` to `{5: -0.1}`. Stop at the first wrong entry; pydantic would list all of them."""
    found: dict[int, float] = {}
    if not isinstance(given, dict | None):
        raise ValueError(f"log p of a position is {reprlib.repr(given)}")
    for name, value in (given or {}).items():
        token = re.fullmatch(r"token_id:(\d{1,7})", name, re.ASCII)
        is_token = token is not None and int(token[1]) < _MOST_TOKEN_IDS
        if token is None or not is_token or not isinstance(value, int | float) or not _LEAST <= value <= _MOST:
            raise ValueError(f"log p of {reprlib.repr(name)} is {reprlib.repr(value)}")
        found[int(token[1])] = float(value)
    return found


class _Answer(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


AnyAnswer = TypeVar("AnyAnswer", bound=_Answer)


class LoadedModel(_Answer):
    """A model or an adapter that the server has loaded."""

    id: Annotated[str, Field(min_length=1, max_length=1000)]
    parent: str | None = None
    """The model that an adapter is for; None for a model."""
    root: str | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None


class ModelList(_Answer):
    """The answer of `/v1/models`."""

    data: Annotated[list[LoadedModel], Field(fail_fast=True)]


class Tokenized(_Answer):
    """The answer of `/tokenize`."""

    tokens: _TokenIds


class Detokenized(_Answer):
    """The answer of `/detokenize`."""

    prompt: str


class Version(_Answer):
    """The answer of `/version`."""

    version: Annotated[str, Field(pattern=r"^[\w.+-]{1,100}$")]


class LogProbabilities(_Answer):
    """Log p of the tokens of an answer, and of the most likely tokens at each of its positions."""

    token_logprobs: _LogProbabilities
    top_logprobs: (
        Annotated[list[Annotated[dict[int, float], BeforeValidator(_by_token)]], Field(fail_fast=True)] | None
    ) = None


class Choice(_Answer):
    """An answer to a prompt."""

    index: int
    token_ids: _TokenIds | None = None
    finish_reason: str | None = None
    logprobs: LogProbabilities | None = None


class Limits(NamedTuple):
    """What was asked for. A completion may not hold more."""

    num_answers: int
    max_tokens: int
    vocabulary: int
    num_likely: int | None
    """Log p of at least so many tokens at the first position; None: of none."""


class Completion(_Answer):
    """The answer of `/v1/completions`."""

    choices: Annotated[list[Choice], Field(fail_fast=True)]

    @model_validator(mode="after")
    def _check_limits(self, info: ValidationInfo) -> Completion:
        asked: Limits = info.context  # type: ignore[assignment]
        self.choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in self.choices] != list(range(asked.num_answers)):
            raise ValueError(
                f"it has {len(self.choices)} answers, or their indices are wrong; expected "
                f"{asked.num_answers}, numbered from 0"
            )
        for choice in self.choices:
            ids, logprobs = choice.token_ids, choice.logprobs
            if ids is None:
                raise ValueError("it has no token ids; vLLM returns them from version 0.10.2 on, so upgrade it")
            if not 1 <= len(ids) <= asked.max_tokens:
                raise ValueError(f"an answer has {len(ids):,} tokens; asked for 1 to {asked.max_tokens:,}")
            if max(ids) >= asked.vocabulary:
                raise ValueError(f"an answer has token {max(ids)}; the vocabulary has {asked.vocabulary:,}")
            if asked.num_likely is None:
                continue
            if logprobs is None or len(logprobs.token_logprobs) != len(ids):
                raise ValueError("an answer has log p of more or fewer tokens than it has")
            if asked.num_likely and len((logprobs.top_logprobs or [{}])[0]) < asked.num_likely:
                raise ValueError(f"it has log p of fewer than {asked.num_likely:,} tokens at the first position")
        return self


def read_answer(shape: type[AnyAnswer], text: bytes, limits: Limits | None = None) -> AnyAnswer:
    """Read the JSON of an answer. A completion needs limits.

    Raises:
        ValueError: the first thing that is wrong, in one sentence without a full stop.
    """
    try:
        return shape.model_validate_json(text, context=limits)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        got = "" if first["type"] == "value_error" else f", got {reprlib.repr(first['input'])}"
        raise ValueError(f"{place}{': ' if place else ''}{message}{got}") from None
