"""Start a script as several processes, and read what each of them reports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.warm import with_interpreter

REPOSITORY = Path(__file__).resolve().parent.parent
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [*_TORCHRUN, "--standalone", "--nproc_per_node", "2"],
    "torchrun_4": [*_TORCHRUN, "--standalone", "--nproc_per_node", "4"],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
    "accelerate_config": [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(REPOSITORY / "recipes" / "launch" / "accelerate_cpu.yaml")),
    ],
    "accelerate_sharded": [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(REPOSITORY / "recipes" / "launch" / "accelerate_sharded.yaml")),
    ],
    "accelerate_cpu": [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"],
    "mpirun": ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", sys.executable],
}
"""`--multi_gpu` starts two processes without any GPU too; `--cpu --num_processes 2` starts one."""
_LIMIT_SECONDS = 240


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launcher_with_port(name: str) -> list[str]:
    """Launchers that are told a port: torchrun's c10d rendezvous, and what came before torchrun."""
    port = free_port()
    if name == "torchrun_c10d":
        return [*_TORCHRUN, "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{port}"]
    module = ["-m", "torch.distributed.launch"]
    return [sys.executable, *module, "--nproc_per_node", "2", "--master_port", str(port)]


def run_launched(
    launcher: str, words: Sequence[str | Path], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script with its words under a launcher; the output of all processes comes back together."""
    return run_command([*LAUNCHERS[launcher], *words], cwd=cwd, variables=variables)


def run_command(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    limit_seconds: float = _LIMIT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run a command line; the output of all its processes comes back together."""
    process = start_command(command, cwd=cwd, variables=variables)
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its workers then; they would outlive a killed one
        output, _ = process.communicate()
        output += f"\nstopped by the test after {limit_seconds} seconds"
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start_command(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    variables: Mapping[str, str] | None = None,
    is_asked: bool = False,
) -> subprocess.Popen[str]:
    """Start a command line and let it run; one that is asked reads what the test writes."""
    return subprocess.Popen(
        with_interpreter(command),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", **(variables or {})},
        stdin=subprocess.PIPE if is_asked else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended; nobody may be there to collect the status of one whose parent is gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def alive_with(name: str, value: str) -> list[psutil.Process]:
    """The processes that have not ended and were started with a variable, which their children inherit."""

    def has_it(process: psutil.Process) -> bool:
        try:
            return process.environ().get(name) == value and is_alive(process)
        except psutil.Error:
            return False

    return [process for process in psutil.process_iter() if has_it(process)]


def place_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher sets on one machine, for processes that are started by hand."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def reports_of(launcher: str, script: Path, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """Run a script that writes `rank-N.json` into the folder it is given; what each of the two ranks wrote."""
    done = run_launched(launcher, [script, folder], **variables)
    assert done.returncode == 0, done.stdout
    reports = reports_in(folder)
    assert len(reports) == 2, done.stdout
    return reports


def reports_in(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote there with `write_report`, in order of rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]


def write_report(folder: str | Path, rank: int, report: dict[str, Any]) -> None:
    """What a rank saw, for `reports_of`."""
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(report))


def wait_until(is_so: Callable[[], object], what: str, seconds: float = 300.0, told: Callable[[], str] = str) -> None:
    """Wait until something is so; else raise TimeoutError with what it was, and with what else can be told."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}\n{told()}")
        time.sleep(0.02)
