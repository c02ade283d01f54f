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
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import ConfigError, DataError
from finetune.units import name_first

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_SECONDS, MATCH_SECONDS = 5, 2
"""Seconds of processor time that a template may take for a row, and regular expressions for all their texts."""
_TAKES_NO_TIME = re.compile(r"[\w\s.,:;=<>/@'\"!&%#~-]*")
"""Expressions that neither repeat nor choose, such as the name of a layer."""
_ANSWER_SECONDS = 120.0
"""Seconds until the process must have started, or answered, on the busiest machine."""
_ENDING_SECONDS = 5.0
MEMORY, CHARACTERS_PER_BYTE = 1 << 30, 16
"""Bytes that the process may take, and characters that a template may make of each byte of the rows. More of both is
allowed, see `rendering_process.py`."""
_MOST_SHOWN = 60

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
        return [attempt(partial(own, tokenizer, conversation, **call)) for conversation in conversations]
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
        f"the chat template of {name} {failure}, so it was stopped. A row may take {ROW_SECONDS} s, {MEMORY >> 30} "
        f"GiB of memory and {CHARACTERS_PER_BYTE} times its own length, beside a fixed part. Set another template: "
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
        return match_all(request)
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
        cls._process, cls._connection = start_child("finetune.data.rendering_process", OPENBLAS_NUM_THREADS="1")
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


def attempt(render: Callable[[], Any]) -> Rendered:
    """Return the text that a template makes, or why it refuses."""
    try:
        return True, str(render())
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it can fail in any way
        return False, str(error) or type(error).__name__


def match_all(request: Mapping[str, Any]) -> list[list[bool]]:
    """Return for each regular expression of a request whether it matches each whole text, in this process."""
    compiled = [re.compile(pattern, request["flags"]) for pattern in request["patterns"]]
    return [[pattern.fullmatch(text) is not None for text in request["texts"]] for pattern in compiled]
