"""The process that renders chat templates and matches regular expressions for `rendering.py`. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.data.rendering import CHARACTERS_PER_BYTE, MEMORY, ROW_SECONDS, Rendered, attempt, match_all
from finetune.signals import leave_signals_to_parent

_IDLE_SECONDS, _ANSWER_EVERY_SECONDS = 10.0, 0.25
_MEMORY_PER_BYTE = 24
"""Bytes that the process may take beside `MEMORY` for each byte of the rows."""
_ROW_CHARACTERS = 1 << 16
"""Characters that a template may make of a row beside `CHARACTERS_PER_BYTE`."""


def _render_until_it_ends(connection: Connection[Any, Any]) -> None:
    """Answer requests until the connection ends, or until no request has come for `_IDLE_SECONDS`."""
    leave_signals_to_parent()
    render = _load_renderer()
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 2)  # a template that crashes Python would make it print
    connection.send_bytes(b"ready")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while connection.poll(_IDLE_SECONDS):
            _answer(connection, connection.recv_bytes(), render)


def _load_renderer() -> Callable[..., str]:
    """Import the renderer of transformers, if possible without the rest of transformers, which takes half a second."""
    spec = find_spec("transformers")
    for name in ("transformers", "transformers.utils"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [
            str(Path(place, *name.split(".")[1:])) for place in (spec and spec.submodule_search_locations) or ()
        ]
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except Exception:  # another version may import more
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return lambda *arguments, **settings: render_jinja_template(*arguments, **settings)[0][0]


def _answer(connection: Connection[Any, Any], content: bytes, render: Callable[..., str]) -> None:
    """Render the conversations of a request. Slow ones are answered one by one, so that the parent need not wait."""
    _limit_memory(MEMORY + _MEMORY_PER_BYTE * len(content))
    request = json.loads(content)
    connection.send_bytes(json.dumps([[], None]).encode())  # it has begun
    if "patterns" in request:
        _limit_seconds(request["seconds"])
        connection.send_bytes(json.dumps([[[True, json.dumps(match_all(request))]], None]).encode())
        return
    conversations, template = request["conversations"], request["template"]
    left = len(conversations) * (_ROW_CHARACTERS + 2 * len(template)) + CHARACTERS_PER_BYTE * len(content)
    settings = {**request["tokens"], "tools": request["tools"], "add_generation_prompt": request["with_prompt"]}
    rendered: list[Rendered] = []
    answered, failure = 0.0, None
    for conversation in conversations:
        if time.monotonic() - answered > _ANSWER_EVERY_SECONDS:
            connection.send_bytes(json.dumps([rendered, None]).encode())
            rendered, answered = [], time.monotonic()
            _limit_seconds(ROW_SECONDS)
        try:
            rendered.append(attempt(partial(render, [conversation], chat_template=template, **settings)))
        except MemoryError:
            failure = "needs too much memory"
        left -= len(rendered[-1][1]) if failure is None else 0
        if left < 0:
            failure = "makes too much text"
        if failure is not None:
            rendered = []
            break
    connection.send_bytes(json.dumps([rendered, failure]).encode())


def _limit_memory(num_bytes: int) -> None:
    with suppress(ImportError, OSError, ValueError):  # a system without such limits, or with a lower one
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, most))


def _limit_seconds(seconds: float) -> None:
    """Let this process end, in the middle of C code too, once it has taken so much more processor time."""
    with suppress(AttributeError):  # Windows has no such timer
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it has its children ignore it
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    _render_until_it_ends(Connection(int(sys.argv[1])))
