"""Fail if CI has run a test by none of its commands.

    python -m tests.never_run FILE

FILE holds the tests that ran, which each `pytest` of `.ci/run` appended to it (FINETUNE_TESTS_RUN).
"""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

NOT_IN_CI = {
    "tests/gpu/": "need a GPU",
    "tests/export/test_llama_cpp.py": "build llama.cpp in FINETUNE_LLAMA_CPP",
    "tests/export/test_certificates.py": "build llama.cpp in FINETUNE_LLAMA_CPP",
    "tests/real/test_gemma.py::test_llama_cpp_": "build llama.cpp in FINETUNE_LLAMA_CPP",
    "tests/distributed/test_launcher_process.py::test_an_mpirun_that_is_installed_starts_two_ranks[mpiexec.hydra": (
        "needs MPICH, which Debian does not install beside Open MPI"
    ),
    "tests/export/test_ollama.py::test_go_itself_": "needs Go",
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
    excused = tuple(NOT_IN_CI)
    return [test for test in collected if test not in seen and not test.startswith(excused)]


class Collected:
    """A plugin of pytest that keeps the names of all tests of the suite in `tests`."""

    tests: list[str]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep them."""
        self.tests = [item.nodeid for item in session.items]


def main() -> None:
    """Collect every test of the suite and compare it with the tests that ran."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    collected = Collected()
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["-m", "slow or not slow", "--collect-only", "-q", "-n", "0"], plugins=[collected])
    if code:
        sys.exit(said.getvalue())
    tests = collected.tests
    left = never_run(tests, lines)
    print(f"{len(tests)} tests are in the suite, {len(set(lines) & set(tests))} ran")
    for beginning, why in NOT_IN_CI.items():
        number = sum(test.startswith(beginning) for test in tests)
        print(f"  {number} may be skipped in CI: {beginning}: {why}")
        if not number:
            sys.exit(f"NOT_IN_CI names tests that are not there: {beginning}")
    if left:
        sys.exit("No command of .ci/run ran these tests:\n  " + "\n  ".join(left))


if __name__ == "__main__":
    main()
