"""Call the tools that a model may use, in a process with a time limit, and describe them for its prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from finetune.data.rendering import start_child
from finetune.errors import ConfigError, RunFailedError
from finetune.training.rewards.tool_process import error_text

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from subprocess import Popen

    from finetune.config.schema import Config

_START_SECONDS = 120.0
"""Seconds until the process must have imported the tools, on the busiest machine."""
_ENDING_SECONDS = 5.0
_CHARACTERS_PER_TOKEN = 16
"""A longer text than `max_result_tokens` times this is cut before it is tokenised."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a call."""

    name: str
    """The name in the call; empty if the call cannot be read."""
    arguments: Any
    """The arguments in the call; null if the call cannot be read."""
    text: str
    """What the model reads."""
    failed: bool
    """Whether it is an error."""
    characters: int = 0
    """Characters of the whole result, of which `text` may be the beginning."""
    printed: str = ""
    """What the tool printed, at most 2,000 characters."""
    seconds: float = 0.0
    """How long the tool took."""

    def as_record(self) -> dict[str, Any]:
        """Convert to plain values for the file of a rollout. JSON has no infinite numbers, so they become text."""
        return asdict(self) | {"arguments": json.loads(json.dumps(self.arguments), parse_constant=str)}


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
    return _schemas_of(tuple(section.tools), tuple(section.tools_from))


@cache
def _schemas_of(tools: tuple[str, ...], tools_from: tuple[str, ...]) -> str:
    with ToolProcess(tools, tools_from, describes=True) as process:
        return process.schemas


class ToolProcess:
    """A process that has imported the tools. It starts when it is needed, and again after it was killed.

    Attributes:
        names: the names by which the model calls them.
        schemas: their JSON schemas as JSON text, if `describes`.
    """

    _process: Popen[bytes] | None = None
    _connection: Connection[Any, Any]

    def __init__(self, tools: Sequence[str], tools_from: Sequence[str], *, describes: bool = False) -> None:
        self._asked: dict[str, Any] = {"tools": list(tools), "tools_from": list(tools_from), "describes": describes}
        self.names = [name.rpartition(".")[2] for name in tools]

    @property
    def schemas(self) -> str:
        """The JSON schemas of the tools, as JSON text."""
        return str(self._start()["schemas"])

    def __enter__(self) -> ToolProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

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
        if name not in self.names:
            message = f"there is no tool {name!r}. There is: {', '.join(self.names)}"
            return Result(name=name, arguments=arguments, text=error_text(message), failed=True)
        if not isinstance(arguments, dict):
            message = f"the arguments of {name} are no JSON object"
            return Result(name=name, arguments=arguments, text=error_text(message), failed=True)
        if self._process is None:
            self._start()
        started = time.monotonic()
        request = {"name": name, "arguments": arguments, "most": most_tokens * _CHARACTERS_PER_TOKEN}
        answer = self._ask(request, seconds, f"{name} has not returned within {seconds:g} s and was ended")
        return Result(name=name, arguments=arguments, seconds=time.monotonic() - started, **answer)

    def _ask(self, request: Any, seconds: float, late: str) -> dict[str, Any]:
        try:
            self._connection.send_bytes(json.dumps(request).encode())
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
                f"the process that imports {', '.join(self._asked['tools'])} (rollout.tools) has not started within "
                f"{_START_SECONDS:g} s, or has ended. Look for an import in their files that waits or leaves Python."
            ) from error
        except BaseException:
            self.end()
            raise
        if ready["problem"] is not None:
            self.end()
            raise ConfigError(ready["problem"])
        return ready
