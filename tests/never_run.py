"""Fail if CI has run a test by none of its commands.

    python -m tests.never_run FILE

FILE holds the tests that ran, which each `pytest` of `.ci/run` appended to it (FINETUNE_TESTS_RUN).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NOT_IN_CI = {
    "tests/gpu/": "need a GPU",
    "tests/export/test_llama_cpp.py": "build llama.cpp: pytest --llama-cpp",
    "tests/export/test_certificates.py": "build llama.cpp: pytest --llama-cpp",
    "tests/distributed/test_launcher_process.py::test_an_mpirun_that_is_installed_starts_two_ranks[mpiexec.hydra": (
        "needs MPICH, which Debian does not install beside Open MPI"
    ),
    "tests/export/test_exported_folder.py::test_the_real_converter_": "need a checkout of llama.cpp (LLAMA_CPP_DIR)",
    "tests/export/test_exported_folder.py::test_what_the_real_converter_": "need a checkout of llama.cpp",
    "tests/export/test_ollama.py::test_go_itself_": "needs Go",
    "tests/runs/test_run_folder.py::test_a_folder_without_write_permission_": "needs a user who is not root",
    "tests/runs/test_runs.py::test_a_folder_that_may_not_be_read_": "needs a user who is not root",
    "tests/crash/test_two_runs.py::test_a_restart_names_who_does_not_die": "waits for 30 s: FINETUNE_FULL_SWEEP=1",
}
"""Beginnings of the names of tests that no command of `.ci/run` runs, and why."""


def never_run(collected: list[str], lines: list[str]) -> list[str]:
    """Return the tests that no command ran, without those of `NOT_IN_CI`.

    A test that this machine cannot run (no AVX-512, no rights to mount a disk) counts as run: its skip says why. A test
    that was skipped because a package or program is not installed does not count.

    Args:
        collected: all tests of the suite.
        lines: the tests that ran; with a tab and the reason, those that were skipped.
    """
    seen = {test for test, _, reason in (line.partition("\t") for line in lines) if "not installed" not in reason}
    return [test for test in collected if test not in seen and not test.startswith(tuple(NOT_IN_CI))]


def main() -> None:
    """Collect every test of the suite and compare it with the tests that ran."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    command = [sys.executable, "-m", "pytest", "--everything", "--collect-only", "-q", "-n", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "FINETUNE_TESTS_RUN"}
    listed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    collected = [line for line in listed.splitlines() if "::" in line]
    left = never_run(collected, lines)
    print(f"{len(collected)} tests are in the suite, {len(set(lines) & set(collected))} ran")
    for beginning, why in NOT_IN_CI.items():
        number = sum(test.startswith(beginning) for test in collected)
        print(f"  {number} may be skipped in CI: {beginning}: {why}")
        if not number:
            sys.exit(f"NOT_IN_CI names tests that are not there: {beginning}")
    if left:
        sys.exit("No command of .ci/run ran these tests:\n  " + "\n  ".join(left))


if __name__ == "__main__":
    main()
