"""Part `sweep`: trials that share a GPU, two at a time, against one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.bench import ROOT
from benchmarks.gpu.recovery import WORDS, largest_difference, losses_of, reason_in
from benchmarks.gpu.session import Session


def side_by_side(session: Session) -> dict[str, Any]:
    """Run the same sweep by one process and by two at once, and compare its time and the curves of its trials."""
    steps, num_trials = (4, 2) if session.is_tiny else (200, 4)
    seeds = ",".join(map(str, range(1, num_trials + 1)))
    words = [*WORDS, f"seed={seeds}", f"training.device={session.device}", f"training.max_steps={steps}"]
    words += [f"validation.validate_every={steps}", f"checkpoint.save_every={steps}"]
    with TemporaryDirectory() as name:
        folder = Path(name)
        words.append(f"data.cache_dir={folder}/cache")
        _sweep([*words, "training.max_steps=2"], folder / "warm-up", 1)  # rows are encoded, and kernels are compiled
        alone, together = (_sweep(words, folder / str(count), count) for count in (1, 2))
        runs = [sorted((folder / str(count)).glob("trial-*/metrics.jsonl")) for count in (1, 2)]
        curves = [[loss for path in paths for loss in losses_of(path.parent)] for paths in runs]
        states = [json.loads((path.parent / "run.json").read_text())["status"] for path in runs[1]]
    return {
        "trials": num_trials,
        "seconds_one_by_one": alone,
        "seconds_two_at_once": together,
        "times_as_fast": alone / together,
        "largest_loss_difference": largest_difference(*curves),
        "is_right": states == ["completed"] * num_trials,
    }


def _sweep(words: list[str], folder: Path, processes: int) -> float:
    """Start the command of a sweep several times at once, and return the seconds until all have ended."""
    command = [sys.executable, "-m", "finetune", "sweep", *words, "--halving", "0", f"output_dir={folder}"]
    started = time.monotonic()
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    logs = [process.communicate()[1] for process in running]
    seconds = time.monotonic() - started
    for process, log in zip(running, logs, strict=True):
        if process.returncode:
            raise RuntimeError(f"the sweep ended with exit code {process.returncode}: {reason_in(log)}")
    return seconds
