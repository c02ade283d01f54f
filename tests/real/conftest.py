"""The real models, once for a machine, and rows of orders for them."""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from finetune.runs.file_lock import file_lock
from tests.launches import REPOSITORY, run_command
from tests.rounding import relative_difference
from tests.tiny_training import losses
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


def assert_same_curve(run: Path, other: Path) -> None:
    """The losses, and what Adam has averaged of the gradients, are those of the other run.

    Adam divides each gradient by its own size. So a weight whose gradient is near zero moves by its rounding, and a few
    of millions of weights differ by more than their gradients. docs/guarantees.md says how much that was.
    """
    assert losses(run) == pytest.approx(losses(other), rel=1e-6, abs=1e-6)
    checkpoint = f"checkpoints/step-{len(losses(run)):06d}"
    ours, theirs = (load_file(each / checkpoint / "optimizer.safetensors") for each in (run, other))
    averages = [name for name in ours if name.startswith("exp_avg/")]
    difference = relative_difference(*([each[name] for name in averages] for each in (ours, theirs)))
    adapters = (load_file(each / "adapter/adapter_model.safetensors").values() for each in (run, other))
    print(f"averages of the gradients differ by {difference:.1e}, adapters by {relative_difference(*adapters):.1e}")
    assert averages
    assert difference <= 1e-5
