"""Sweeps of faults over tiny runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.runs import Nursery


def pytest_configure(config: pytest.Config) -> None:
    """Say at the end what was tried."""
    config.pluginmanager.import_plugin("tests.crash.tally")


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A process that starts runs quickly."""
    nursery = Nursery(tmp_path_factory.mktemp("crash"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def whole(nursery: Nursery) -> Path:
    """The folder of the uninterrupted run."""
    return nursery.whole()
