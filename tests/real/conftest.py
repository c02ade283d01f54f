"""The real model, once for a machine, and rows of orders for it."""

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
ORDERS = REPOSITORY / "finetune" / "assets" / "orders"


@pytest.fixture(scope="session")
def real_model() -> Path:
    """FINETUNE_REAL_MODEL, or a folder in the user's cache: SmolLM2-135M-Instruct, made there if it is missing."""
    folder = Path(os.environ.get("FINETUNE_REAL_MODEL") or HOME / ".cache/finetune-tests/smollm2-135m")
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, REPOSITORY / "tools" / "real_model.py", folder]
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
