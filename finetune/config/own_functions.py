"""Look up functions of the user's own by name: metrics, reward functions, tools and environments.

Security: a function is code. A name is looked up among the built-in ones, or in a module that the command line allows
with `--metrics-from`, never in one that only a configuration, a run's folder or a data set names. The module must be
installed: a file in the current folder, which may have been downloaded, is not imported. The command line may also
name a file by its path: `./scores.py:bleu`.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from runpy import run_path
from traceback import extract_tb
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import finetune.forked_children  # noqa: F401  # for the processes that these functions fork
from finetune.config.config_files import absolute
from finetune.config.key_advice import did_you_mean
from finetune.errors import ConfigError
from finetune.signals import Terminated

Function = TypeVar("Function", bound=Callable[..., Any])


def resolve_functions(
    names: Sequence[str],
    known: Mapping[str, Function],
    allowed_modules: Sequence[str] = (),
    *,
    asked_by: str,
    parameters: str = "",
    awaits: bool = False,
) -> dict[str, Function]:
    """Look up functions by name. Imports a module only if it is allowed. The functions of a file share its globals.

    Args:
        names: names in `known`, or dotted names like `my_package.scores.bleu`.
        known: the built-in functions.
        allowed_modules: the modules that dotted names may refer to, or the paths of their files; from the command line
            only.
        asked_by: the option or key that names the functions; `…s-from` or `…_from` allows modules.
        parameters: what a function of the user's is called with, see `refuse_uncallable`; empty if that is not known.
        awaits: whether the caller awaits a coroutine that a function returns.

    Raises:
        ConfigError: an unknown name, a module that is not allowed or not installed, or a name that is not a function;
            an `async def` that nobody awaits; or a function that takes other parameters.
    """
    allowed_by = "--metrics-from " if asked_by == "--metric" else f"{asked_by}_from="
    import_file = cache(_import_file)
    functions = {
        name: _resolve(name, known, allowed_modules, asked_by, allowed_by, import_file) for name in dict.fromkeys(names)
    }
    if not awaits and (name := next(filter(lambda name: inspect.iscoroutinefunction(functions[name]), functions), "")):
        raise ConfigError(
            f"{asked_by} is {name}, which is an async def: its call returns a coroutine, and no result. Name a def "
            f"that ends in return asyncio.run({name.rpartition('.')[2]}(...))."
        )
    for name in functions.keys() - known.keys() if parameters else ():
        refuse_uncallable(functions[name], f"{asked_by} is {name}", parameters)
    return functions


METRIC_PARAMETERS = "answer, expected"


def refuse_uncallable(function: Callable[..., Any], given: str, parameters: str) -> None:
    """Raise ConfigError for a function that cannot be called with its arguments, long before its first call.

    Args:
        function: a function of the user's.
        given: how the user gave it: `--metric is scores.bleu`.
        parameters: `answer, expected` are given by position. With `**columns` at the end, those before it are given by
            name, and so are the columns of the rows, so that the function may require others.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C libraries have no signature
        return
    *names, last = parameters.split(", ")
    try:
        if last == "**columns":
            signature.bind_partial(**dict.fromkeys(names))
        else:
            signature.bind(*names, last)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"{given}, which takes {signature}, but it is called with ({parameters}): {error}. Define it as "
            f"def {name}({parameters})."
        ) from None


def split_functions_in_files(names: Iterable[str], asked_by: str) -> tuple[list[str], list[str]]:
    """Return the names of functions, with `./scores.py:bleu` as `scores.bleu`, and the absolute paths of the files.

    Raises:
        ConfigError: there is no such file, a name has no function, or two files have the same name.
    """
    functions: list[str] = []
    files: dict[str, str] = {}
    for name in names:
        if ":" not in name and not name.endswith(".py"):
            functions.append(name)
            continue
        path, _, function = name.rpartition(":") if ":" in name else (name, "", "")
        file = Path(absolute(path))
        if file.suffix != ".py" or not file.is_file():
            raise ConfigError(f"{asked_by} is {name}, but there is no Python file {file}. Correct the path.")
        if not function:
            raise ConfigError(f"{asked_by} is {name}, which names no function of the file. Write {path}:FUNCTION.")
        if (other := files.setdefault(file.stem, str(file))) != str(file):
            raise ConfigError(f"{asked_by} names functions of {other} and of {file}. Give one file another name.")
        functions.append(f"{file.stem}.{function}")
    return functions, list(files.values())


def fingerprint_functions(names: Iterable[str], allowed_modules: Iterable[str]) -> str:
    """Return the names and digests of the source files of functions; empty if all are built in.

    For the arguments, see `resolve_functions`. Only another process may have imported the modules, so that they are
    looked for without importing them. Code that a file imports is not read.
    """
    modules = {name.rpartition(".")[0] for name in names}
    files = []
    for allowed in allowed_modules:
        is_file = allowed.endswith(".py")
        source = allowed if is_file else _file_of(allowed)
        if source and (Path(allowed).stem if is_file else allowed) in modules and Path(source).is_file():
            files.append(Path(source))
    return ", ".join(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" for file in sorted(files))


def _file_of(module: str) -> str | None:
    """Return the file of an installed module, which is not imported, and neither are the packages that it is in."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None)
    folders: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    with _without_current_folder():
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            found = (finder.find_spec(name, folders) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((each for each in found if each is not None), None)
            folders = None if spec is None else spec.submodule_search_locations
            if folders is None and depth < len(parts):
                return None
    return None if spec is None else spec.origin


def _resolve(
    name: str,
    known: Mapping[str, Function],
    allowed_modules: Sequence[str],
    asked_by: str,
    allowed_by: str,
    import_file: Callable[[str], SimpleNamespace],
) -> Function:
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        asking = asked_by + (" " if asked_by == "--metric" else "=")
        close = did_you_mean(name, known)
        raise ConfigError(
            f"{asked_by} is {name}; expected one of {', '.join(known)}, or a function of your own: {asking}"
            f"./my_file.py:{name}. {close}".rstrip()
        )
    file = next((path for path in allowed_modules if path.endswith(".py") and Path(path).stem == module), None)
    if file is None and module not in allowed_modules:
        raise ConfigError(
            f"{asked_by} is {name}, but {module} is not allowed: a function is code that runs here. If you trust the "
            f"package, allow it with {allowed_by}{module}."
        )
    source = _import_installed(module, allowed_by.rstrip(" =")) if file is None else import_file(file)
    function = getattr(source, attribute, None)
    if not callable(function):
        close = did_you_mean(attribute, [key for key, value in vars(source).items() if callable(value)])
        raise ConfigError(f"{asked_by} is {name}, but {file or module} has no function {attribute}. {close}".rstrip())
    return cast(Function, function)


def _import_file(file: str) -> SimpleNamespace:
    """Run a Python file as the module of its name, and return its globals. Each call runs it again."""
    with _without_current_folder():
        try:
            return SimpleNamespace(**run_path(file, run_name=Path(file).stem))
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # it is the user's own code
            lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
            lines += [error.lineno] if isinstance(error, SyntaxError) and error.filename == file else []
            place = f"{file}:{lines[-1]}" if lines else file
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{place}: the file fails when it is imported: {reason}. Correct it.") from error


def _import_installed(module: str, allowed_by: str) -> object:
    with _without_current_folder():
        try:
            return import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or module
            raise ConfigError(
                f"{allowed_by} is {module}, but {missing} is not installed. Install your package into this "
                "environment (pip install -e FOLDER); a file in the current folder is imported only if "
                "./FILE.py:FUNCTION names it."
            ) from error
        except Terminated:
            raise
        except (Exception, SystemExit) as error:  # it is the user's own code
            raise ConfigError(f"{allowed_by} is {module}, which fails when it is imported: {error!r}.") from error


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Import as `python -P` does, since `python -m` puts the current folder before all installed packages."""
    before = list(sys.path)
    if sys.path and not sys.flags.safe_path and sys.path[0] in ("", os.curdir, str(Path.cwd())):
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = before
