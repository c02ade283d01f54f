"""A command that is forked off the warm process ends, speaks and dies like one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.launches import LAUNCHERS, is_alive, run_command, start_command
from tests.two_nodes import reason_against
from tests.warm import at_start, forget_what_imports_have_set, refusals
from tests.warm.server import may_differ

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.warm,
    pytest.mark.skipif(sys.platform != "linux", reason="commands are forked off on Linux alone"),
]
WAITS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def _a_failure_shows_why(monkeypatch):
    """Earlier tests of this process may have changed variables for good: these tests are about the commands alone."""
    changed = {name for name in {*os.environ, *at_start} if os.environ.get(name) != at_start.get(name)}
    changed = {name for name in changed if not may_differ(name)}
    for name in changed:
        monkeypatch.delenv(name, raising=False)
        if name in at_start:
            monkeypatch.setenv(name, at_start[name])
    yield
    print(f"changed by earlier tests: {', '.join(sorted(changed)) or 'nothing'}", refusals()[-2000:], sep="\n")


def test_a_variable_that_an_import_has_set_is_forgotten(script):
    os.environ["SET_BY_AN_IMPORT"] = "1"
    forget_what_imports_have_set()
    asks = script("import os, sys; print('torch' in sys.modules, 'SET_BY_AN_IMPORT' in os.environ)")
    assert run_command([sys.executable, asks]).stdout == "True False\n"


@pytest.fixture
def script(tmp_path):
    def write(code):
        path = tmp_path / "script.py"
        path.write_text(code)
        return path

    return write


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("print('done')", 0, "done\n"),
        ("import sys; sys.exit('a reason')", 1, "a reason\n"),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import os; print(os.getcwd())", 0, "the folder\n"),
    ],
)
def test_its_end_and_its_last_words_are_those_of_any_process(script, tmp_path, code, status, said):
    done = run_command([sys.executable, script(code)], cwd=tmp_path)
    assert done.returncode == status, done.stdout
    assert done.stdout.endswith(said.replace("the folder", str(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(script, number):
    with start_command([sys.executable, script(WAITS)]) as process:
        itself = psutil.Process(int(process.stdout.readline()))
        assert itself.pid != process.pid
        process.send_signal(number)
        assert process.wait(10) == -number
        itself_is_gone = time.monotonic() + 10
        while is_alive(itself):
            assert time.monotonic() < itself_is_gone
            time.sleep(0.01)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_ranks_of_a_launcher_are_forked_off_too(script, launcher):
    """What a library or a launcher adds to the variables of its children must not make them start on their own."""
    asks = script("import sys; print('has torch:', 'torch' in sys.modules)")
    done = run_command([*LAUNCHERS[launcher], asks])
    assert done.stdout.count("has torch: True\n") == 2, done.stdout


def test_what_an_import_may_have_read_needs_a_process_of_its_own(script):
    asks = script("import sys; print('torch' in sys.modules)")
    assert run_command([sys.executable, "-u", asks], variables={"RANK": "1"}).stdout == "True\n"
    assert run_command([sys.executable, asks], variables={"HF_HOME": "elsewhere"}).stdout == "False\n"
    for option in (["-I", asks], ["-c", asks.read_text()]):
        assert run_command([sys.executable, *option]).stdout == "False\n", option


def test_it_has_the_files_that_it_is_handed_under_their_numbers(script):
    asks = script("import os, sys; print('torch' in sys.modules, os.read(int(sys.argv[1]), 9))")
    reading, writing = os.pipe()
    os.write(writing, b"a message")
    command = [sys.executable, asks, str(reading)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, pass_fds=[reading], check=True)
    assert done.stdout == "True b'a message'\n"
    os.close(reading)
    os.close(writing)


def test_processes_of_multiprocessing_are_forked_off_too(script):
    """They are handed pipes, and what they run is in the parent's script."""
    asks = script(
        "import sys\n"
        "import torch.multiprocessing as mp\n"
        "def main(rank, had):\n"
        "    print('has all:', rank, had, flush=True)\n"
        "    sys.exit(3 if rank == 1 else 0)\n"
        "has = 'peft' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(main, args=(True,), nprocs=2)\n"
        "elif not has:\n"
        "    print('has less')\n"
    )
    done = run_command([sys.executable, asks])
    assert done.stdout.count("has all:") >= 1, done.stdout
    assert "has less" not in done.stdout
    assert "terminated with exit code 3" in done.stdout
    assert done.returncode == 1


@pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
def test_it_is_on_the_node_of_who_asked_for_it(script):
    asks = script("import socket, sys; print(socket.gethostname(), 'torch' in sys.modules)")
    inside = 'echo node7 > /proc/sys/kernel/hostname && exec "$@"'
    done = run_command(["unshare", "--uts", "sh", "-c", inside, "sh", sys.executable, asks])
    assert done.stdout == "node7 True\n"
