"""Call the tools that a model may use, in a process with a time limit, and describe them for its prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.config.own_functions import fingerprint_functions
from finetune.data.formats import Example, as_messages
from finetune.data.rendering import start_child
from finetune.data.turns import ROLES, Turn, text_turn
from finetune.data.values import BadRowError, quote
from finetune.errors import ConfigError, DataError, RunFailedError
from finetune.training.rewards.functions import LARGEST_REWARD
from finetune.training.rewards.tool_process import error_text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from subprocess import Popen

    from finetune.config.schema import Config, RolloutSection

_START_SECONDS = 120.0
"""Seconds until the process must have imported the tools, on the busiest machine."""
_ENDING_SECONDS = 5.0
_CHARACTERS_PER_TOKEN = 16
"""A longer text than `max_result_tokens` times this is cut before it is tokenised."""
_MOST_CHARACTERS = 1 << 20
"""Of the turns that an environment returns."""
_MOST_LEVELS = 64
"""Of the arguments of a call. Python reads and writes JSON to a depth of about 900 levels."""
_MADE_UP = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
"""An argument of each JSON type. Any other argument is a text."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a call."""

    name: str
    """The name in the call; empty if the call cannot be read."""
    arguments: Any
    """The arguments in the call; null if the call cannot be read, or nests them too deeply."""
    text: str
    """What the model reads."""
    failed: bool
    """Whether it is an error."""
    characters: int = 0
    """The length of the whole result. `text` may be only its beginning."""
    role: str = "tool"
    """The role of its turn: an environment's may be another one."""
    id: str = ""
    """The id that the model gave its call; empty if it gave none."""
    printed: str = ""
    """What the tool printed, at most 2,000 characters."""
    seconds: float = 0.0
    """How long the tool took."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for the file of a rollout. What JSON or UTF-8 cannot express becomes other text."""
        text = json.dumps(vars(self), ensure_ascii=False).encode(errors="replace").decode()
        record: dict[str, Any] = json.loads(text, parse_constant=str)
        return record


def offered_tools(config: Config) -> str:
    """Return the schemas of a run's tools as JSON text, empty if it has none. A recorded run has them on record.

    Raises:
        ConfigError: a tool cannot be imported or described.
    """
    section = config.rollout
    if not section.tools:
        return ""
    names = [name.rpartition(".")[2] for name in section.tools]
    if len(set(names)) < len(names):
        raise ConfigError(f"rollout.tools is {', '.join(section.tools)}: two of them have one name. Rename one.")
    if section.tool_schemas is not None and not section.tools_from:
        return section.tool_schemas  # a replay, which imports no code
    code = fingerprint_functions(section.tools, section.tools_from)
    return _schemas_of(tuple(section.tools), tuple(section.tools_from), code)


def with_tools(example: Example, tools: str) -> Example:
    """Return a row, as turns, that offers the tools of the run."""
    example = as_messages(example)
    if example.tools and json.loads(example.tools) != json.loads(tools):
        raise BadRowError("the row has other tools than rollout.tools; expected a row without tools")
    return example._replace(tools=tools)


def made_up_call(schemas: str) -> dict[str, Any]:
    """Return a call of the first tool in `schemas`: its name, and an argument of the right type for each parameter."""
    function = json.loads(schemas)[0]["function"]
    properties = function["parameters"].get("properties", {})
    return {"name": function["name"], "arguments": {name: _made_up(schema) for name, schema in properties.items()}}


def _made_up(schema: Mapping[str, Any]) -> Any:
    """Return a value that fits a JSON schema, as far as `get_json_schema` of transformers writes it."""
    schema = schema.get("anyOf", [schema])[0]
    if "enum" in schema:
        return schema["enum"][0]
    types = schema.get("type", "string")
    return _MADE_UP.get(types[0] if isinstance(types, list) else types, "a text")


@cache
def _schemas_of(tools: tuple[str, ...], tools_from: tuple[str, ...], code: str) -> str:
    del code  # a notebook may change the files between two runs
    return ToolProcess(tools, tools_from, describes=True).schemas


class ToolProcess:
    """A process that has imported the tools. It starts when it is needed, and again after it was killed.

    Attributes:
        names: the names by which the model calls them.
        schemas: their JSON schemas as JSON text, if `describes`.
    """

    _process: Popen[bytes] | None = None
    _connection: Connection[Any, Any]

    def __init__(
        self,
        tools: Sequence[str],
        tools_from: Sequence[str],
        *,
        describes: bool = False,
        asked_by: str = "rollout.tools",
    ) -> None:
        self._asked: dict[str, Any] = {"tools": list(tools), "tools_from": list(tools_from)}
        self._asked |= {"describes": describes, "asked_by": asked_by}
        self.names = [name.rpartition(".")[2] for name in tools]

    def check(self) -> None:
        """Import the functions. Raises the errors of `call`."""
        if self._process is None:
            self._start()

    @property
    def schemas(self) -> str:
        """The JSON schemas of the tools, as JSON text."""
        return str(self._start()["schemas"])

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait(_ENDING_SECONDS)
            self._process = None

    def call(self, name: str, arguments: Any, *, seconds: float, most_tokens: int) -> Result:
        """Call a tool. Whatever it does, it has a result; a call that is late or ends its process has an error.

        Raises:
            ConfigError: the tools can no longer be imported.
        """
        if _is_nested(arguments, _MOST_LEVELS):
            message = f"the arguments of {name} are nested more than {_MOST_LEVELS} levels deep"
            return Result(name=name, arguments=None, text=error_text(message), failed=True)
        if name not in self.names:
            message = f"there is no tool {name!r}. There is: {', '.join(self.names)}"
            return Result(name=name, arguments=arguments, text=error_text(message), failed=True)
        if not isinstance(arguments, dict):
            message = f"the arguments of {name} are no JSON object"
            return Result(name=name, arguments=arguments, text=error_text(message), failed=True)
        started = time.monotonic()
        request = {"name": name, "arguments": arguments, "most": most_tokens * _CHARACTERS_PER_TOKEN}
        answer = self.ask(request, seconds)
        return Result(name=name, arguments=arguments, seconds=time.monotonic() - started, **answer)

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, and return what the process answers, or an error if it does not.

        Values that JSON does not know become text, such as the dates in a row.
        """
        late = f"{request['name']} has not returned within {seconds:g} s and was ended"
        try:
            if self._process is None:
                self._start()
            self._connection.send_bytes(json.dumps(request, default=str).encode())
            if self._connection.poll(seconds):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
            problem = late
        except (EOFError, OSError):
            problem = f"{request['name']} has ended its process"
        except BaseException:  # a signal: the answer must not be taken for the next one
            self.end()
            raise
        self.end()
        return {"text": error_text(problem), "failed": True}

    def _start(self) -> dict[str, Any]:
        self._process, self._connection = start_child("finetune.training.rewards.tool_process")
        try:
            self._connection.send_bytes(json.dumps(self._asked).encode())
            if not self._connection.poll(_START_SECONDS):
                raise EOFError
            ready: dict[str, Any] = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.end()
            raise RunFailedError(
                f"the process that imports {', '.join(self._asked['tools'])} ({self._asked['asked_by']}) has not "
                f"started within {_START_SECONDS:g} s, or has ended. Look for an import in their files that waits or "
                "leaves Python."
            ) from error
        except BaseException:
            self.end()
            raise
        if ready["problem"] is not None:
            self.end()
            raise ConfigError(ready["problem"])
        return ready


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether a JSON value has lists and objects in more than so many levels."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return parts is not None and (levels == 0 or any(_is_nested(part, levels - 1) for part in parts))


class Environment:
    """The environment of each conversation of a rollout, all in one process. If one fails, the run ends.

    Raises:
        ConfigError: several are named.
    """

    def __init__(self, section: RolloutSection) -> None:
        if len(section.environment) > 1:
            raise ConfigError(f"rollout.environment names {', '.join(section.environment)}. Name one class.")
        self._name = section.environment[0].rpartition(".")[2]
        self._seconds = section.tool_timeout_seconds
        self._process = ToolProcess(section.environment, section.environment_from, asked_by="rollout.environment")

    def check(self) -> None:
        """Import the class, or raise a ConfigError."""
        self._process.check()

    def turns(self, place: int, method: str, given: object) -> list[Turn] | None:
        """Call `reset` or `step` for the conversation at a place. Return the turns to add; None: there are none.

        Raises:
            DataError: the environment fails, is late, or returns no turns.
        """
        value = self._ask(place, method, given)
        if value is None:
            return None
        listed = [text_turn("user", value)] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(map(_is_turn, listed)):
            raise DataError(
                f"the environment {self._name} returned {quote(value)} from {method}; expected None, a text, or a list "
                "of turns with role and content."
            )
        return [text_turn(turn["role"], turn["content"]) for turn in listed]

    def score(self, place: int) -> float:
        """Return the score of the conversation at a place. Raises the errors of `turns`."""
        value = self._ask(place, "score")
        if not isinstance(value, (int, float)) or not abs(value) < LARGEST_REWARD:
            raise DataError(
                f"the environment {self._name} returned {quote(value)} from score; expected a number below "
                f"{LARGEST_REWARD:g} in size."
            )
        return float(value)

    def _ask(self, place: int, method: str, *given: object) -> Any:
        request = {"name": self._name, "method": method, "place": place, "given": given, "most": _MOST_CHARACTERS}
        answer = self._process.ask(request, self._seconds)
        if answer["failed"] or answer["characters"] > _MOST_CHARACTERS:
            problem = answer["text"] if answer["failed"] else f"it returned {answer['characters']:,} characters"
            raise DataError(f"the environment {self._name} failed in {method}: {problem}. Correct it.")
        (value,) = json.loads(answer["text"])
        return value


def _is_turn(turn: object) -> bool:
    return isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
