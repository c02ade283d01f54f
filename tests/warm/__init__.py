"""Commands of tests without their imports: a process that has imported everything forks off what is run.

Importing torch and transformers takes 4 s of processor time in each process, and a test of two ranks starts three. In
tests marked as `warm` the interpreter is a program that asks a server (`server.py`) for a fork of itself, hands it its
streams, folder and variables, and stands for it until it ends: signals go through, and so does the status. The process
is a real one, and so are its ranks, those of `torch.multiprocessing.spawn` too. Where the program runs on a node that
is made of namespaces (`tests.two_nodes`, `tests.slurm`), the fork enters them. What is not as usual is its place in the
tree of processes, so tests that look at parents, at process groups, at processes that are stopped or at memory do
without; so does a `promise`, whatever its other markers.

What the package starts in another environment has a server there, where a test asks for it: `warm_environment`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest

_COLD = sys.executable
_HERE = Path(__file__).resolve().parent
_IMPORTED_ELSEWHERE = {
    "FINETUNE_VLLM": ("vllm.entrypoints.openai.api_server", "vllm.v1.worker.cpu_worker"),
    "FINETUNE_LLMCOMPRESSOR": (
        *("datasets", "llmcompressor.modifiers.gptq", "llmcompressor.modifiers.quantization"),
        *("transformers.models.phi3.modeling_phi3", "compressed_tensors.quantization"),
    ),
}
"""What takes long to import in an environment, by the variable that names its interpreter."""
at_start: dict[str, str] = {}
"""The variables before the first test."""


def pytest_sessionstart() -> None:
    """Know the variables that no test has changed yet."""
    at_start.update(os.environ)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The interpreter of a marked test and of its fixtures, also for commands that the package itself starts."""
    is_warm = item.get_closest_marker("warm") and not item.get_closest_marker("promise")
    if is_warm:
        forget_what_imports_have_set()
    with warm_interpreter() if is_warm else nullcontext():
        return (yield)


def forget_what_imports_have_set() -> None:
    """Some libraries set variables when a test imports them. The server would send back all later commands."""
    if sys.platform == "linux":
        from tests.warm.server import may_differ

        for name in [name for name in os.environ if name not in at_start and not may_differ(name)]:
            del os.environ[name]


@contextmanager
def warm_interpreter() -> Iterator[None]:
    """`sys.executable` is the program that asks the server, also for processes of `multiprocessing`."""
    before, sys.executable = sys.executable, _python()
    multiprocessing.set_executable(sys.executable)
    try:
        yield
    finally:
        sys.executable = before
        multiprocessing.set_executable(before)


def with_interpreter(command: Sequence[str | Path]) -> list[str]:
    """A command line whose interpreter is that of the running test; lists of words are often made before it begins."""
    return [sys.executable if word == _COLD else str(word) for word in command]


def refusals() -> str:
    """What the server of this process has said, such as which variables kept it from forking a command off."""
    return (Path(_python()).parent / "log").read_text()


@cache
def programs() -> Path:
    """A folder of programs by the names that a shell knows them by: finetune, python, torchrun, accelerate."""
    python = Path(_python())
    if str(python) == _COLD:
        return python.parent
    folder = python.parent / "bin"
    folder.mkdir()
    (folder / "python").symlink_to(python)
    modules = {"finetune": "finetune", "torchrun": "torch.distributed.run"}
    for name, module in {**modules, "accelerate": "accelerate.commands.accelerate_cli"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {python} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def _python() -> str:
    """Start the server of this environment and return the program that stands for its interpreter."""
    return python_of(_COLD)


@cache
def python_of(python: str, *modules: str) -> str:
    """Start a server and return the program that stands for this interpreter, which has imported these modules.

    Without modules it has imported what commands of this package need. Only Linux has what these take, and of a process
    with several threads only one would be there after a fork.
    """
    if sys.platform != "linux" or os.environ["OMP_NUM_THREADS"] != "1":
        return python
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    program = folder / "python"
    text = (_HERE / "client.py").read_text(encoding="utf-8")
    for name, value in {"COLD": python, "SERVER": str(folder / "s")}.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value!r}", text, flags=re.MULTILINE)
    program.write_text(f"#!{python} -IS\n{text}")
    program.chmod(0o755)
    # A thread of pyarrow's allocator would not be there after a fork.
    own = {"JE_ARROW_MALLOC_CONF": "background_thread:false"} if modules else {"PYTHONPATH": str(_HERE.parent.parent)}
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [python, "-P", _HERE / "server.py", folder / "s", program, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**at_start, "PYTHONWARNINGS": "ignore", **own},
        )
    assert server.stdout is not None
    is_ready = b"ready\n" in iter(server.stdout.readline, b"")  # imports may say something before
    if modules and not is_ready:  # there, the imports of some version may leave a thread
        sys.stderr.write(f"{python} is started as usual: {(folder / 'log').read_text()[-500:]}\n")
        return python
    assert is_ready, (folder / "log").read_text()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.communicate)  # first of the two: its input ends, and so does it
    return str(program)


@contextmanager
def warm_environment(variable: str) -> Iterator[None]:
    """What is started in another environment, whose interpreter this variable names if there is one, is forked off."""
    with pytest.MonkeyPatch.context() as patch:
        if variable in os.environ:
            patch.setenv(variable, python_of(os.environ[variable], *_IMPORTED_ELSEWHERE[variable]))
        yield
