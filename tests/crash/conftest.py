"""Sweeps of faults: each says at the end of the test run how many points it tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crash.runs import IS_FULL, Nursery

_tried: list[str] = []


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A process that starts runs quickly."""
    nursery = Nursery(tmp_path_factory.mktemp("crash"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def whole(nursery: Nursery) -> Path:
    """The folder of the uninterrupted run."""
    nursery.put(None)
    ended = nursery.train()
    assert ended.status == 0, ended.screen
    return nursery.keep("whole")


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Tell how many points were tried; it is shown below the tests' own summary."""
    return lambda what: _tried.append(f"{request.node.name}: {what}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the sweeps tried."""
    if _tried:
        share = "every point" if IS_FULL else "a share of the points; FINETUNE_FULL_SWEEP=1 pytest tests/crash: all"
        terminalreporter.section(f"crash sweeps ({share})")
        for line in _tried:
            terminalreporter.write_line(line)
