"""Part `recovery`: a run that was killed and resumed against one that was not, and the tests of a GPU."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bench import ROOT
from benchmarks.gpu.session import Session

_STEPS, _KILLED_AFTER = 12, 6
FILES = ("adapter/adapter_model.safetensors", f"checkpoints/step-{_STEPS:06d}/optimizer.safetensors")
WORDS = (
    *("task=finetune_lora", "model=phi_tiny", "data=orders", "data.max_rows=200", "data.max_length=256"),
    "lora.dropout=0.1",
    *(f"training.max_steps={_STEPS}", "training.batch_size=8", "training.log_every=1", "testing.num_samples=0"),
    *("checkpoint.save_every=2", f"validation.validate_every={_STEPS}"),
)
"""Of a run with the embedded model, which writes `FILES`."""
_LINES_SHOWN = 3
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def kill_and_resume(session: Session, *, is_deterministic: bool = False) -> dict[str, Any]:
    """Train the embedded model whole, then kill a run and resume it, and compare what the two wrote.

    Without `training.deterministic`, a GPU need not give the same bytes: only the losses must be close there.
    """
    with TemporaryDirectory() as folder:
        words = [*WORDS, f"training.device={session.device}", f"data.cache_dir={folder}/cache"]
        words += ["training.deterministic=true"] if is_deterministic else []
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        started = time.monotonic()
        finish(start(words, whole))
        seconds = time.monotonic() - started
        with start(words, killed) as process:
            wait_for_checkpoint(process, _KILLED_AFTER)
            process.send_signal(signal.SIGKILL)
        resumed = re.search(r"resumed from step=(\d+)", finish(start([*words, "resume=auto"], killed)))
        equal = [name for name in FILES if (whole / name).read_bytes() == (killed / name).read_bytes()]
        losses = [losses_of(run) for run in (whole, killed)]
    difference = largest_difference(*losses)
    must_be_equal = is_deterministic or session.device == "cpu"
    return {
        "whole_run_seconds": seconds,
        "resumed_from_step": int(resumed[1]) if resumed else None,
        "files_compared": len(FILES),
        "files_with_equal_bytes": len(equal),
        "largest_loss_difference": difference,
        "is_right": resumed is not None and (len(equal) == len(FILES) if must_be_equal else difference < 0.01),
    }


def run_gpu_tests(session: Session) -> dict[str, Any]:
    """Run `pytest tests/gpu`."""
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    sys.stdout.write(ended.stdout + ended.stderr)  # for the log
    counts = {what: int(number) for number, what in _COUNT.findall(ended.stdout.strip().rpartition("\n")[2])}
    if not counts:
        raise RuntimeError(f"pytest ended with exit code {ended.returncode}: {end_of(ended.stdout + ended.stderr)}")
    counts = {what: counts.get(what, 0) for what in ("passed", "failed", "error", "skipped")}
    return {**counts, "is_right": ended.returncode == 0 and (counts["passed"] > 0 or session.device == "cpu")}


def start(words: Sequence[str], folder: Path, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `finetune train` from this checkout, and let it run. The launcher is given as arguments of Python."""
    return subprocess.Popen(
        [sys.executable, *launcher, "-m", "finetune", "train", *words, f"output_dir={folder}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_checkpoint(process: subprocess.Popen[str], step: int) -> None:
    """Read the log of a run until it has saved this step.

    Raises:
        RuntimeError: the run ended before.
    """
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if f"checkpoint committed step={step}" in line:
            return
    raise RuntimeError(f"the run ended by itself before step {step}: {end_of(''.join(lines))}")


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a run and return its log.

    Raises:
        RuntimeError: the run failed.
    """
    _, log = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the run ended with exit code {process.returncode}: {reason_in(log)}")
    return log


def reason_in(log: str) -> str:
    """Write a log into the task's own, and return its first error: the last lines may be the launcher's."""
    sys.stdout.write(log)
    return next((line for line in log.splitlines() if "Error" in line), end_of(log))


def end_of(log: str) -> str:
    """Return the last lines of a log as one line."""
    return " / ".join(log.strip().splitlines()[-_LINES_SHOWN:])


def losses_of(run: Path) -> list[float]:
    """Return the loss of each step of a run."""
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest difference of two curves at one step, relative to a loss above 1."""
    return max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(ours, theirs, strict=True))
