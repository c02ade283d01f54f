"""Run tools and environments in a process of its own, which the run can kill. Imports no torch.

The first request names the functions, and each later one is a call. What a function prints is kept apart: it reaches
neither the model nor the run's own output.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import json
import operator
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from finetune.config.own_functions import resolve_functions
from finetune.errors import ConfigError
from finetune.signals import leave_signals_to_parent

_MOST_PRINTED = 2000
"""Characters that are kept of what a call prints."""
_MOST_POWER = 64
_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    **{ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}


def calculator(expression: str) -> float:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.
    """
    value: float = _value(ast.parse(expression.strip(), mode="eval").body)
    return value


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and not (abs(left) <= _MOST_POWER and abs(right) <= _MOST_POWER):
            raise ValueError(f"base and exponent of ** may be at most {_MOST_POWER}")
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError("only numbers, + - * / // % ** and parentheses are computed")


_EVENT_LOOP = asyncio.Runner()
"""One for all calls, so that `step` of an environment can use a session that `reset` opened."""
BUILT_IN: Mapping[str, Callable[..., Any]] = {"calculator": calculator}


class _Printed(io.TextIOBase):
    """Keeps the first characters that are written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        """Keep the beginning of a text."""
        self.text += text[: _MOST_PRINTED - len(self.text)]
        return len(text)


def _attempt(call: Callable[[], Any], most: int, convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Call a function. Return its value as text of at most `most` characters, whether it failed, and what it printed.

    A text is given to the model as it is, and anything else as JSON. `convert` makes plain values of what JSON cannot
    express.
    """
    printed, failed = _Printed(), False
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            value = _finished(call())
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=convert)
    except BaseException as error:  # it is the user's own code, which may call sys.exit
        failed, text = True, error_text(f"{type(error).__name__}: {error}")
    shown = text[:most].encode(errors="replace").decode()  # a half of a surrogate pair is no text
    return {"text": shown, "failed": failed, "characters": len(text), "printed": printed.text}


def _finished(value: Any) -> Any:
    """Wait for the value of an `async` function."""
    return _EVENT_LOOP.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _plain(value: Any) -> Any:
    """Return the numbers of an array or a tensor. Refuse other objects: their text would be read as a turn."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"returned an object of the type {type(value).__qualname__}; expected text, numbers or turns")


def error_text(message: str) -> str:
    """Return the result of a call that failed, as the model reads it."""
    return json.dumps({"error": message}, ensure_ascii=False)


def _describe(tools: Mapping[str, Callable[..., Any]]) -> str:
    """Return the JSON schemas of tools. If a tool cannot be described, raise a ConfigError."""
    from transformers.utils.chat_template_utils import get_json_schema

    schemas = []
    for name, tool in tools.items():
        try:
            schema = get_json_schema(tool)
        except Exception as error:  # each problem of types or docstring has its own class
            raise ConfigError(
                f"rollout.tools is {name}, which prompts cannot describe: {error} Give each argument a type, and write "
                "a docstring that says what the function does and has each argument under Args:."
            ) from error
        schemas.append(schema)
    return json.dumps(schemas, ensure_ascii=False)


def _play(games: dict[int, Any], create: Callable[[], Any], request: Mapping[str, Any]) -> list[Any]:
    """Call a method of the environment of a conversation, and return its value in a list. `reset` makes a new one."""
    if request["method"] == "reset":
        games[request["place"]] = create()
    return [_finished(getattr(games[request["place"]], request["method"])(*request["given"]))]


def _serve(connection: Connection[Any, Any]) -> None:
    """Answer requests until the connection ends."""
    leave_signals_to_parent()
    asked = json.loads(connection.recv_bytes())
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    try:
        asked_by = asked["asked_by"]
        known = {} if asked_by == "rollout.environment" else BUILT_IN
        functions = resolve_functions(asked["tools"], known, asked["tools_from"], asked_by=asked_by, awaits=True)
        tools = {name.rpartition(".")[2]: function for name, function in functions.items()}
        ready = {"schemas": _describe(tools) if asked["describes"] else "", "problem": None}
    except ConfigError as error:
        ready = {"schemas": "", "problem": str(error)}
    connection.send_bytes(json.dumps(ready).encode())
    games: dict[int, Any] = {}
    own_id = os.getpid()
    while True:
        request = json.loads(connection.recv_bytes())
        function = tools[request["name"]]
        plays = "method" in request
        call = partial(_play, games, function, request) if plays else partial(function, **request["arguments"])
        result = _attempt(call, request["most"], _plain if plays else str)
        if os.getpid() != own_id:
            os._exit(1)  # a forked child: the next call would get its answer
        connection.send_bytes(json.dumps(result).encode())


if __name__ == "__main__":
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(Connection(int(sys.argv[1])))
