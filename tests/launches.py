"""Start a script as two processes, and read what each of them reports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}
"""`--multi_gpu` starts two processes without any GPU too; `--cpu --num_processes 2` would start one."""
_LIMIT_SECONDS = 60


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_launched(
    launcher: str, words: Sequence[str | Path], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with its words under a launcher; the output of all processes comes back together."""
    process = subprocess.Popen(
        [*LAUNCHERS[launcher], *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its workers then; they would outlive a killed one
        output, _ = process.communicate()
        output += f"\nstopped by the test after {_LIMIT_SECONDS} seconds"
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def reports_of(launcher: str, script: Path, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """Run a script that writes `rank-N.json` into the folder it is given; what each rank wrote, in order of rank."""
    done = run_launched(launcher, [script, folder], **variables)
    assert done.returncode == 0, done.stdout
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


def write_report(folder: str | Path, rank: int, report: dict[str, Any]) -> None:
    """What a rank saw, for `reports_of`."""
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))
