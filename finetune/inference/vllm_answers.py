"""The answers of a vLLM server that finetune reads. All their types, ranges and counts are checked here."""

from __future__ import annotations

import re
import reprlib
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

_MOST_TOKEN_IDS = 1 << 22
"""More than any vocabulary has. A table of logits is as wide as the largest token id."""
_LEAST, _MOST = -1e4, 1e-3
"""The range of log p. vLLM writes -9999 for minus infinity, and rounding may put a probability a little above 1."""
_FIRST_ONLY = Field(fail_fast=True)
"""Pydantic would otherwise describe each of a million wrong entries."""

_TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=_MOST_TOKEN_IDS)]], _FIRST_ONLY]


def _by_token(logprobs: object) -> dict[int, float]:
    """Convert `{"token_id:5": -0.1}` to `{5: -0.1}`."""
    by_token: dict[int, float] = {}
    if not isinstance(logprobs, dict | None):
        raise ValueError(f"log p of a position is {reprlib.repr(logprobs)}")
    for name, value in (logprobs or {}).items():
        token = re.fullmatch(r"token_id:(\d{1,7})", name, re.ASCII)
        is_number = isinstance(value, int | float) and _LEAST <= value <= _MOST
        if token is None or int(token[1]) >= _MOST_TOKEN_IDS or not is_number:
            raise ValueError(f"log p of {reprlib.repr(name)} is {reprlib.repr(value)}")
        by_token[int(token[1])] = float(value)
    return by_token


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class LoadedModel(_Fields):
    """A model or an adapter that the server has loaded."""

    id: Annotated[str, Field(min_length=1, max_length=1000)]
    parent: str | None = None
    """The model that an adapter is for; None for a model."""
    root: str | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None


class LogProbabilities(_Fields):
    """Log p of the tokens of an answer, and of the most likely tokens at each of its positions."""

    token_logprobs: Annotated[list[Annotated[float, Field(ge=_LEAST, le=_MOST)]], _FIRST_ONLY]
    top_logprobs: Annotated[list[Annotated[dict[int, float], BeforeValidator(_by_token)]], _FIRST_ONLY] | None = None


class Choice(_Fields):
    """An answer to a prompt."""

    index: int
    token_ids: _TokenIds | None = None
    finish_reason: str | None = None
    logprobs: LogProbabilities | None = None


class Limits(NamedTuple):
    """The limits of a request. An answer of the server that exceeds one is refused."""

    num_answers: int
    max_tokens: int
    vocabulary: int
    num_likely: int | None
    """The least number of tokens at the first position that have log p. None: no log p was asked for."""


def _read(text: bytes, name: str, shape: Any) -> Any:
    """Read one field of an answer in JSON. Raises a ValueError that names the first fault, without a full stop."""
    fields: Any = {name: (shape, ...)}
    try:
        answer = create_model("Answer", __base__=_Fields, **fields).model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise ValueError(f"{place}: {first['msg']}, got {reprlib.repr(first['input'])}") from None
    return getattr(answer, name)


read_models = partial(_read, name="data", shape=Annotated[list[LoadedModel], _FIRST_ONLY])
read_tokens = partial(_read, name="tokens", shape=_TokenIds)
read_text = partial(_read, name="prompt", shape=str)
read_version = partial(_read, name="version", shape=Annotated[str, Field(pattern=r"^[\w.+-]{1,100}$")])


def read_choices(text: bytes, limits: Limits) -> list[Choice]:
    """Read the answers to a prompt, in the order of their indices.

    Raises:
        ValueError: the answers are malformed, or differ from what was asked for.
    """
    choices: list[Choice] = _read(text, "choices", Annotated[list[Choice], _FIRST_ONLY])
    choices.sort(key=lambda choice: choice.index)
    if [choice.index for choice in choices] != list(range(limits.num_answers)):
        raise ValueError(f"it has {len(choices)} answers or wrong indices; asked for {limits.num_answers}")
    for choice in choices:
        ids, logprobs = choice.token_ids, choice.logprobs
        if ids is None:
            raise ValueError("it has no token ids; vLLM returns them from version 0.10.2 on, so upgrade it")
        if not 1 <= len(ids) <= limits.max_tokens:
            raise ValueError(f"an answer has {len(ids):,} tokens; asked for 1 to {limits.max_tokens:,}")
        if max(ids) >= limits.vocabulary:
            raise ValueError(f"an answer has token {max(ids)}; the vocabulary has {limits.vocabulary:,}")
        if limits.num_likely is None:
            continue
        if logprobs is None or len(logprobs.token_logprobs) != len(ids):
            raise ValueError("an answer has log p of more or fewer tokens than it has")
        if len((logprobs.top_logprobs or [{}])[0]) < limits.num_likely:
            raise ValueError(f"it has log p of fewer than {limits.num_likely:,} tokens at the first position")
    return choices
