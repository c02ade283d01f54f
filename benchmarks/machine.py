"""What the figures were measured on, as the program itself finds it: never the machine's name or a path on it."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "datasets",
    "trl",
    "liger_kernel",
    "flash_attn",
    "triton",
    "unsloth",
    "unsloth_zoo",
    "phi-finetune",
)
_LOOK_SECONDS = 1.0


def machine_and_versions(root: Path, rounds: int, load: float) -> dict[str, str]:
    """Lines for the head of the results page.

    Args:
        root: of the repository.
        rounds: how often each run was repeated.
        load: what `seconds_others_use` gave before the first run.
    """
    memory = psutil.virtual_memory().total / 2**30
    return {
        "measured": f"{datetime.now(UTC):%Y-%m-%d}, {_commit(root)}, {rounds} round{'s' if rounds != 1 else ''}, one "
        f"thread a process; other programs used {load:.1f} cores at the start",
        "machine": f"{_processor()}, {psutil.cpu_count()} logical cores, {memory:.0f} GiB, {platform.system()}"
        + "".join(f", {name}" for name in _gpus()),
        "versions": versions(),
        "noise": "± is the median absolute deviation over the rounds; ratios are taken within a round",
    }


def versions() -> str:
    """The versions of Python and of the packages that take part."""
    return ", ".join([f"Python {platform.python_version()}", *filter(None, map(_version, _PACKAGES))])


def device_name(device: str) -> str:
    """The name of the GPU (`cuda`; empty if there is none) or of the processor."""
    return next(iter(_gpus()), "") if device == "cuda" else _processor()


def digest_of_code(root: Path, other_versions: str = "") -> str:
    """A digest of the package, of this folder and of the versions: runs with another one are not mixed.

    Args:
        root: of the repository.
        other_versions: what `versions` gives in the other environment that takes part.
    """
    digest = hashlib.sha256()
    for path in sorted([*(root / "finetune").rglob("*.py"), *(root / "benchmarks").rglob("*.py")]):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    digest.update(str([_version(name) for name in _PACKAGES]).encode() + other_versions.encode())
    return digest.hexdigest()[:16]


def seconds_others_use() -> float:
    """CPU seconds a second that other programs use just now."""
    before = psutil.cpu_times()
    time.sleep(_LOOK_SECONDS)
    after = psutil.cpu_times()
    idle = ("idle", "iowait")
    used = sum(getattr(after, name) - getattr(before, name) for name in after._fields if name not in idle)
    return float(max(0.0, used / _LOOK_SECONDS))


def _version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None


def _commit(root: Path) -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = " and changes" if git("status", "--porcelain", "--", "finetune", "benchmarks/*.py") else ""
        return f"commit {git('rev-parse', '--short', 'HEAD')}{changed}"
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []
