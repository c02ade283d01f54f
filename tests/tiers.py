"""A plugin of pytest that decides which tests run when, and says how many do not.

    pytest           what is quick, and each promise once with real processes: a few minutes
    pytest --rest    what `pytest` left out, for CI
    pytest --real    the tests of a real model, which is made from a package on PyPI first

Tests that are named (a file, `-k`, `-m`) run whatever their tier.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
LONG = {"needs", "slow"}
"""Markers of tests that `pytest` alone leaves out, unless they are marked `promise` too."""
SAMPLE_SEED = 25
"""`pytest` runs the same cases of a test each time."""
_MAY_START_PROCESSES = {*LONG, "promise", "process"}
_REAL_TESTS = Path(__file__).with_name("real")
_PROGRAMS = re.compile(r"python.*|finetune|torchrun|accelerate|mpirun|srun|sbatch|(ba)?sh")
_running: list[pytest.Item] = []
_ran: list[str] = []
"""Tests that ran, and after a tab why one was skipped. With FINETUNE_TESTS_RUN a session appends them to that file."""
_LEFT_OUT = pytest.StashKey[int]()
_REAL = pytest.StashKey[int]()
_MOST_WORKERS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--rest", action="store_true", help="run only the tests that `pytest` alone leaves out")
    group.addoption("--real", action="store_true", help="run only the tests of a real model")


def pytest_configure(config: pytest.Config) -> None:
    """Collect nothing else for `--real`: the others would take longer to collect than to leave out."""
    if config.option.real and not _are_paths_named(config):
        config.args = [str(_REAL_TESTS)]


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For the option `-n auto` in pyproject.toml. A few files run faster without the start of workers."""
    if _are_paths_named(config) or config.option.collectonly:
        return 0
    return min(os.cpu_count() or 1, _MOST_WORKERS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        missing = [name for mark in item.iter_markers("needs") for name in mark.args if find_spec(name) is None]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)}: not installed (test-everything, qlora)"))
    for item in _cases_not_drawn(items):
        item.add_marker("slow")
    if config.option.real or _is_named(config):
        return
    real = [item for item in items if item.path.is_relative_to(_REAL_TESTS)]
    rest = config.option.rest
    config.stash[_REAL] = len(real)
    _keep(config, items, [item for item in items if item not in set(real)])
    config.stash[_LEFT_OUT] = sum(is_left_out(item) != rest for item in items)
    _keep(config, items, [item for item in items if is_left_out(item) == rest])


def _keep(config: pytest.Config, items: list[pytest.Item], chosen: list[pytest.Item]) -> None:
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _cases_not_drawn(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that are left when as many are drawn of each test as its marker `few` says."""
    sweeps: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (found := item.get_closest_marker("few")) is not None:
            sweeps.setdefault((item.nodeid.partition("[")[0], found.args[0]), []).append(item)
    return {item for (name, number), cases in sweeps.items() for item in not_drawn(name, cases, number)}


def not_drawn(name: str, cases: Sequence[T], number: int) -> list[T]:
    """Return the cases that are left when `number` of them are drawn. The name of the test decides which."""
    drawn = set(random.Random(f"{SAMPLE_SEED} {name}").sample(range(len(cases)), min(number, len(cases))))
    return [case for place, case in enumerate(cases) if place not in drawn]


def is_left_out(item: pytest.Item) -> bool:
    """Whether a bare `pytest` does not run this test."""
    markers = _markers(item)
    return bool(LONG & markers) and "promise" not in markers


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _ran.append(f"{report.nodeid}\t{report.longrepr[2]}")
    elif report.when == "call":
        _ran.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that shows the summary, which lists the tests that ran."""
    path = os.environ.get("FINETUNE_TESTS_RUN")
    if path and not hasattr(session.config, "workerinput"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{test}\n" for test in _ran)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_LEFT_OUT, 0)
        session.config.workeroutput["real"] = session.config.stash.get(_REAL, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Each worker collects all tests: one number is enough."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_LEFT_OUT] = output.get("left_out", 0)  # type: ignore[attr-defined]
    node.config.stash[_REAL] = output.get("real", 0)  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Nothing is left out in silence."""
    left_out = config.stash.get(_LEFT_OUT, 0)
    if left_out:
        which = "are run by `pytest` alone" if config.option.rest else "are left to `pytest --rest`"
        terminalreporter.write_line(f"{left_out} tests {which}")
    if real := config.stash.get(_REAL, 0):
        terminalreporter.write_line(f"{real} tests of a real model are left to `pytest --real`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Know which test runs, for `_refuse_processes`."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def _refuse_processes(event: str, args: tuple[Any, ...]) -> None:
    """A test starts a process only if it is about processes: then it bears a marker that says so."""
    if event != "subprocess.Popen" or not _running or _MAY_START_PROCESSES & _markers(_running[-1]):
        return
    if any(
        str(word).endswith("guardian/__main__.py") for word in args[1] or ()
    ):  # of reward functions: a tenth of a second
        return
    if "finetune.data.rendering_process" in (args[1] or ()):  # one for all tests; many render chat templates
        return
    program = Path(os.fsdecode(args[0] or args[1][0])).name
    if _PROGRAMS.fullmatch(program):
        raise AssertionError(f"{program} is started, and {_running[-1].name} is not marked as `process`: {args[1]}")


sys.addaudithook(_refuse_processes)


def _markers(item: pytest.Item) -> set[str]:
    return {marker.name for marker in item.iter_markers()}


def _is_named(config: pytest.Config) -> bool:
    return bool(config.option.keyword or config.option.markexpr or _are_paths_named(config))


def _are_paths_named(config: pytest.Config) -> bool:
    whole = {config.rootpath, config.rootpath / "tests"}
    return any((config.invocation_params.dir / path).resolve() not in whole for path in config.option.file_or_dir or ())
