import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from finetune.distributed import local_spawn
from finetune.distributed.environment import SPAWN_RUN_ID_PREFIX, WORLD_VARIABLES, read_environment
from finetune.distributed.local_spawn import run_as_processes
from finetune.errors import LaunchError, RunFailedError
from tests.distributed.launcher_variables import (
    ACCELERATE,
    HYDRA,
    MVAPICH,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
    without,
)
from tests.launches import REPOSITORY


def test_a_local_spawn_of_ours_is_not_torchrun():
    assert read_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": f"{SPAWN_RUN_ID_PREFIX}17"}).launcher == "spawn"
    assert read_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).launcher == "torchrun"


@pytest.mark.parametrize("file", [None, "<stdin>", "/dev/stdin"])
def test_what_no_worker_could_run_again_is_refused(monkeypatch, file):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    with pytest.raises(LaunchError, match=r"this session has none \(a notebook, python -c, or a script on standard in"):
        run_as_processes(2)


@pytest.mark.process
@pytest.mark.parametrize(("first", "codes"), [(75, [75, 0]), (3, [3, -9])])
def test_only_a_failed_worker_ends_the_others(monkeypatch, first, codes):
    """Rank 0 ignores SIGTERM while it writes, for longer than the other processes of a failed run may take."""
    monkeypatch.setattr(local_spawn, "_TERMINATE_SECONDS", 0.2)
    writes = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(1.5)"
    rank_0 = subprocess.Popen([sys.executable, "-S", "-c", writes], stdout=subprocess.PIPE)
    with rank_0:
        rank_0.stdout.readline()
        rank_1 = subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({first})"])
        assert local_spawn._wait_for([rank_1, rank_0]) == (None if first == 75 else 0, codes)


@pytest.mark.parametrize(
    ("first_failed", "codes", "is_named"),
    [
        (1, [75, -9], True),  # rank 0 tests alone, and SIGTERM reached it because rank 1 was killed
        (1, [0, -9], True),
        (0, [-9, -15], True),
        (1, [3, -9], False),  # the other rank has named it
        (0, [1, -15], False),
    ],
)
def test_a_killed_worker_that_no_other_has_noticed_is_named(first_failed, codes, is_named):
    if not is_named:
        local_spawn._raise_if_nobody_reported(first_failed, codes)
        return
    with pytest.raises(RunFailedError, match=f"^rank {first_failed} was killed by SIGKILL, and the launcher ended"):
        local_spawn._raise_if_nobody_reported(first_failed, codes)


def test_a_launch_is_told_from_others_where_the_launcher_can():
    launch_ids = {"lab": TORCHRUN, "77.2": SRUN, "420937729": OPEN_MPI, "": HYDRA}
    assert [read_environment(environ).launch_id for environ in launch_ids.values()] == list(launch_ids)
    assert read_environment(without(OPEN_MPI, "PMIX_NAMESPACE")).launch_id == "420937729"


def test_everything_that_means_several_processes_to_torch_or_accelerate_can_be_hidden():
    accelerate, torch = (Path(find_spec(name).origin).parent for name in ("accelerate", "torch"))
    files = [accelerate / "state.py", accelerate / "utils" / "environment.py", torch / "distributed" / "rendezvous.py"]
    quoted = re.compile(r"""["']([A-Z0-9_]*(?:RANK|SIZE|LOCALRANKID|LOCALNRANKS))["']""")
    read = {name for file in files for name in quoted.findall(file.read_text())}
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"} <= read
    assert read <= set(WORLD_VARIABLES)
    for environ in (TORCHRUN, ACCELERATE, OPEN_MPI, HYDRA, MVAPICH):
        assert read_environment(without(environ, *WORLD_VARIABLES)).world_size == 1


PARENT = """
import json, os, sys
from finetune.distributed.environment import launcher_pid, read_environment
def report():
    environment = read_environment(os.environ)
    pid = launcher_pid(os.environ, environment)
    print(json.dumps([environment.launcher, environment.rank, pid == os.getppid() if pid else None]), flush=True)
if __name__ == "__main__":
    if sys.argv[1:] == ["spawn"]:
        import multiprocessing
        worker = multiprocessing.get_context("spawn").Process(target=report)
        worker.start()
        worker.join()
    else:
        report()
"""
SPAWNED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


def reported(command, tmp_path, **variables):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    words = [str(script) if word == "SCRIPT" else word for word in command]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    # Two ranks may write onto one line: Hydra forwards their output as it comes, and each print is two writes.
    return sorted(json.loads(found) for found in re.findall(r"\[[^\[\]]*\]", done.stdout))


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ([], SPAWNED, ["spawn", 1, None]),  # exported by hand: the parent is a shell, which nohup must outlive
        (["spawn"], SPAWNED, ["spawn", 1, True]),
        ([], {**SPAWNED, "TORCHELASTIC_RUN_ID": "none"}, ["torchrun", 1, True]),
        ([], {**SPAWNED, "TORCHELASTIC_RUN_ID": f"{SPAWN_RUN_ID_PREFIX}1"}, ["spawn", 1, True]),
        ([], OPEN_MPI, ["mpi", 3, None]),
    ],
)
def test_the_parent_is_watched_where_it_is_a_launcher(words, variables, expected, tmp_path):
    assert reported([sys.executable, "SCRIPT", *words], tmp_path, **variables) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "options"),
    [("mpirun", ["--allow-run-as-root", "--oversubscribe", "-n", "2"]), ("mpiexec.hydra", ["-n", "2"])],
)
def test_an_mpirun_that_is_installed_starts_two_ranks(program, options, tmp_path):
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    if program == "mpirun" and b"Open MPI" not in subprocess.run([path, "--version"], capture_output=True).stdout:
        pytest.skip("mpirun here is not Open MPI's")
    assert reported([path, *options, sys.executable, "SCRIPT"], tmp_path) == [["mpi", 0, None], ["mpi", 1, None]]
