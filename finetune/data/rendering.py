"""Render chat templates and match regular expressions in a process of its own, with limits. Imports no torch.

A chat template is a program from whoever wrote the model folder. Jinja's sandbox keeps it from files and modules, but
not from endless loops or texts without limit. A regular expression may take exponential time. The process starts with
the first text and ends when it has been idle.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, DataError
from finetune.signals import leave_signals_to_parent
from finetune.units import name_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_SECONDS, MATCH_SECONDS = 5, 2
"""Seconds of processor time that a template may take for a row, and regular expressions for all their texts."""
_TAKES_NO_TIME = re.compile(r"[\w\s.,:;=<>/@'\"!&%#~-]*")
"""Expressions that neither repeat nor choose, such as the name of a layer."""
_ANSWER_SECONDS = 120.0
"""Seconds until the process must have started, or answered, on the busiest machine."""
_IDLE_SECONDS, _ENDING_SECONDS, _ANSWER_EVERY_SECONDS = 10.0, 5.0, 0.25
_MEMORY, _MEMORY_PER_BYTE = 1 << 30, 24
"""Bytes that the process may take, and more for each byte of the rows."""
_MOST_SHOWN = 60
_ROW_CHARACTERS, _CHARACTERS_PER_BYTE = 1 << 16, 16
"""Characters that a template may make of a row, and more for each byte of the rows."""

Rendered = tuple[bool, str]
"""Whether the template rendered the conversation, and the text, or why the template refused it."""


def render_conversations(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Any],
    tools: list[dict[str, Any]] | None = None,
    *,
    with_prompt: bool,
    name: str = "",
) -> list[Rendered]:
    """Render each conversation with the chat template of a tokenizer, as `apply_chat_template` does.

    Raises:
        DataError: the template exceeds a limit. `name` names it.
    """
    from transformers import PreTrainedTokenizerBase

    own = type(tokenizer).apply_chat_template
    if own is not PreTrainedTokenizerBase.apply_chat_template:  # code that was allowed to run here
        call: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": with_prompt}
        return [_attempt(partial(own, tokenizer, conversation, **call)) for conversation in conversations]
    return render_template(
        tokenizer.get_chat_template(tools=tools),
        conversations,
        tools,
        with_prompt=with_prompt,
        tokens=tokenizer.special_tokens_map,
        name=name or tokenizer.name_or_path or "the tokenizer",
    )


def render_template(
    template: str,
    conversations: Sequence[Any],
    tools: list[dict[str, Any]] | None = None,
    *,
    with_prompt: bool,
    tokens: Mapping[str, Any] | None = None,
    name: str,
) -> list[Rendered]:
    """Render each conversation with a chat template. `tokens` are the special tokens that it may write.

    Raises:
        DataError: the template exceeds a limit. `name` names it.
    """
    request = {
        "template": template,
        "conversations": conversations,
        "tools": tools,
        "with_prompt": with_prompt,
        "tokens": tokens or {},
    }
    answer: list[Rendered] = []
    with _Renderer.lock:
        failure = _Renderer.render(json.dumps(request, default=str).encode(), answer, len(conversations))
    if failure is None:
        return answer
    raise DataError(
        f"the chat template of {name} {failure}, so it was stopped. A row may take {ROW_SECONDS} s, {_MEMORY >> 30} "
        f"GiB of memory and {_CHARACTERS_PER_BYTE} times its own length, beside a fixed part. Set another template: "
        "data.chat_template."
    )


def match_patterns(
    patterns: Sequence[str], texts: Sequence[str], *, name: str, form: str = "{}", flags: int = 0
) -> list[list[bool]]:
    """Return for each regular expression whether it matches each whole text. `form` has `{}` where it is put.

    Names of layers are matched here, and what repeats or chooses in the process with limits.

    Raises:
        re.error: one is no regular expression.
        ConfigError: they take too long. `name` names them.
    """
    expressions = [form.replace("{}", pattern) for pattern in patterns]
    for expression in expressions:
        re.compile(expression, flags)
    request = {"patterns": expressions, "texts": list(texts), "flags": flags, "seconds": MATCH_SECONDS}
    slow = [pattern for pattern in patterns if not _TAKES_NO_TIME.fullmatch(pattern)]
    if not slow:
        return _match(request)
    answer: list[Rendered] = []
    with _Renderer.lock:
        failure = _Renderer.render(json.dumps(request).encode(), answer, 1)
    if failure is not None:
        shown = name_first([pattern[:_MOST_SHOWN] for pattern in slow], 3)
        raise ConfigError(
            f"{name} is {shown}, which takes longer than {MATCH_SECONDS} s to match. Write an expression without "
            "a repetition inside of another, such as (a+)+."
        )
    matches: list[list[bool]] = json.loads(answer[0][1])
    return matches


def start_child(module: str, **variables: str) -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    """Start `python -m module DESCRIPTOR`, and return the process and the connection to it."""
    package = str(Path(__file__).resolve().parents[2])
    inherited_path = os.environ.get("PYTHONPATH")
    path = f"{package}{os.pathsep}{inherited_path}" if inherited_path else package
    parent_end, child_end = Pipe()
    with child_end:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(child_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # text that a library prints must not mix with the output of the command
            pass_fds=[child_end.fileno()],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables},
        )
    return process, parent_end


class _Renderer:
    """The process that renders for this one."""

    lock = threading.Lock()
    _process: subprocess.Popen[bytes] | None = None
    _connection: Connection[Any, Any]
    _pid = 0

    @classmethod
    def render(cls, request: bytes, answer: list[Rendered], count: int) -> str | None:
        """Append a text, or a refusal, for each of `count` conversations. Return how the template exceeds a limit."""
        for is_last in (False, True):
            has_begun = False
            try:
                has_begun = cls._ensure()
                cls._connection.send_bytes(request)
                while len(answer) < count:
                    if not cls._connection.poll(_ANSWER_SECONDS):
                        return cls._end(f"did not finish within {_ANSWER_SECONDS:g} s")
                    (rendered, failure), has_begun = json.loads(cls._connection.recv_bytes()), True
                    answer += map(tuple, rendered)
                    if failure is not None:
                        return str(failure)
                return None
            except (EOFError, OSError):
                cls._end("")
                if has_begun or is_last:  # else it ended because it was idle
                    return f"took longer than {ROW_SECONDS} s, or crashed Python"
            except BaseException:  # a signal: the rest of the answer must not be taken for the next one
                cls._end("")
                raise
        raise AssertionError

    @classmethod
    def _ensure(cls) -> bool:
        """Start the process if it does not run, and return whether it was started."""
        if cls._pid == os.getpid() and cls._process is not None and cls._process.poll() is None:
            return False
        if cls._pid != os.getpid():  # also in a forked child, which must leave the parent's process alone
            atexit.register(cls._end, "")
        cls._process, cls._connection = start_child("finetune.data.rendering", OPENBLAS_NUM_THREADS="1")
        cls._pid = os.getpid()
        if not cls._connection.poll(_ANSWER_SECONDS):
            raise EOFError
        cls._connection.recv_bytes()
        return True

    @classmethod
    def _end(cls, reason: str) -> str:
        if cls._process is not None and cls._pid == os.getpid():
            cls._connection.close()
            cls._process.kill()
            cls._process.wait(_ENDING_SECONDS)
            cls._process = None
        return reason


def _attempt(render: Callable[[], Any]) -> Rendered:
    try:
        return True, str(render())
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it can fail in any way
        return False, str(error) or type(error).__name__


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


def _match(request: Mapping[str, Any]) -> list[list[bool]]:
    compiled = [re.compile(pattern, request["flags"]) for pattern in request["patterns"]]
    return [[pattern.fullmatch(text) is not None for text in request["texts"]] for pattern in compiled]


def _answer(connection: Connection[Any, Any], content: bytes, render: Callable[..., str]) -> None:
    """Render the conversations of a request. Slow ones are answered one by one, so that the parent need not wait."""
    _limit_memory(_MEMORY + _MEMORY_PER_BYTE * len(content))
    request = json.loads(content)
    connection.send_bytes(json.dumps([[], None]).encode())  # it has begun
    if "patterns" in request:
        _limit_seconds(request["seconds"])
        connection.send_bytes(json.dumps([[[True, json.dumps(_match(request))]], None]).encode())
        return
    conversations, template = request["conversations"], request["template"]
    left = len(conversations) * (_ROW_CHARACTERS + 2 * len(template)) + _CHARACTERS_PER_BYTE * len(content)
    settings = {**request["tokens"], "tools": request["tools"], "add_generation_prompt": request["with_prompt"]}
    rendered: list[Rendered] = []
    answered, failure = 0.0, None
    for conversation in conversations:
        if time.monotonic() - answered > _ANSWER_EVERY_SECONDS:
            connection.send_bytes(json.dumps([rendered, None]).encode())
            rendered, answered = [], time.monotonic()
            _limit_seconds(ROW_SECONDS)
        try:
            rendered.append(_attempt(partial(render, [conversation], chat_template=template, **settings)))
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
