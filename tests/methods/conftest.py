"""The input of runs that do not need rows or a base of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.methods.tiny_training import write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))
