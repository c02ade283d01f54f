"""The real models, once for a machine, and rows of orders for them."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest

from finetune.runs.file_lock import file_lock
from tests.launches import REPOSITORY, run_command
from tools.real_model import UnavailableError

HOME = Path(pwd.getpwuid(os.getuid()).pw_dir)
"""The user's. The variable is a test's own."""
_CACHE = HOME / ".cache/finetune-tests"
ORDERS = REPOSITORY / "finetune" / "assets" / "orders"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """FINETUNE_REAL_MODEL, or a folder in the user's cache: SmolLM2-135M-Instruct, made there if it is missing."""
    return _made("smollm2", Path(os.environ.get("FINETUNE_REAL_MODEL") or _CACHE / "smollm2-135m"))


@pytest.fixture(scope="session")
def gemma() -> Path:
    """FINETUNE_REAL_GEMMA, or a folder in the user's cache: Gemma 3 270M, made there if it is missing."""
    return _made("gemma3", Path(os.environ.get("FINETUNE_REAL_GEMMA") or _CACHE / "gemma3-270m"))


def _made(model: str, folder: Path) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, REPOSITORY / "tools" / "real_model.py", folder, "--model", model]
    with file_lock(folder.with_name(f"{folder.name}.tests.lock"), waiting_for="another worker of pytest"):
        made = run_command(command, variables={"HOME": str(HOME)}, limit_seconds=600)
    if made.returncode == UnavailableError.exit_code:
        pytest.skip(made.stdout.splitlines()[-1])
    assert made.returncode == 0, made.stdout
    return folder


def write_orders(folder: Path, **numbers: int) -> Path:
    """A folder with the first rows of each split of the orders."""
    folder.mkdir()
    for split, number in numbers.items():
        lines = (ORDERS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{split}.jsonl").write_text("".join(lines[:number]), encoding="utf-8")
    return folder
