"""Fail if CI has run a test by none of its commands.

    python -m tests.never_run FILE

FILE holds the tests that ran, which each `pytest` of `.ci/run` appended to it (FINETUNE_TESTS_RUN).
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest

NOT_IN_CI = {
    "tests/gpu/": "need a GPU",
    "tests/export/test_llama_cpp.py": "build llama.cpp: pytest --llama-cpp",
    "tests/export/test_certificates.py": "build llama.cpp: pytest --llama-cpp",
    "tests/distributed/test_launcher_process.py::test_an_mpirun_that_is_installed_starts_two_ranks[mpiexec.hydra": (
        "needs MPICH, which Debian does not install beside Open MPI"
    ),
    "tests/export/test_ollama.py::test_go_itself_": "needs Go",
    "tests/crash/test_two_runs.py::test_a_restart_names_who_does_not_die": "waits for 30 s: FINETUNE_FULL_SWEEP=1",
}
"""Beginnings of the names of tests that no command of `.ci/run` runs, and why."""


def never_run(collected: list[str], beyond_ci: set[str], lines: list[str]) -> list[str]:
    """Return the tests that no command ran, without those of `NOT_IN_CI` and those beyond the samples.

    A test that this machine cannot run (no AVX-512, no rights to mount a disk) counts as run: its skip says why. A test
    that was skipped because a package or program is not installed does not count.

    Args:
        collected: all tests of the suite.
        beyond_ci: cases of sampled sweeps that were not drawn.
        lines: the tests that ran; with a tab and the reason, those that were skipped.
    """
    seen = {test for test, _, reason in (line.partition("\t") for line in lines) if "not installed" not in reason}
    excused = tuple(NOT_IN_CI)
    return [test for test in collected if test not in seen | beyond_ci and not test.startswith(excused)]


class Collected:
    """A plugin of pytest that keeps the names of the tests.

    Attributes:
        tests: all tests of the suite.
        beyond_ci: cases of sampled sweeps that are not drawn for CI.
    """

    tests: list[str]
    beyond_ci: list[str]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep them. The plugin of the tiers is imported by pytest first, which rewrites its assertions."""
        from tests.tiers import cases_beyond_ci

        self.tests = [item.nodeid for item in session.items]
        self.beyond_ci = [item.nodeid for item in cases_beyond_ci(session.items)]


def main() -> None:
    """Collect every test of the suite and compare it with the tests that ran."""
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    collected = Collected()
    with redirect_stdout(io.StringIO()) as said:
        code = pytest.main(["--everything", "--collect-only", "-q", "-n", "0"], plugins=[collected])
    if code:
        sys.exit(said.getvalue())
    tests, beyond_ci = collected.tests, set(collected.beyond_ci)
    left = never_run(tests, beyond_ci, lines)
    print(f"{len(tests)} tests are in the suite, {len(set(lines) & set(tests))} ran")
    sizes = Counter(test.partition("[")[0] for test in tests)
    for name, number in sorted(Counter(test.partition("[")[0] for test in beyond_ci).items()):
        print(f"  {number} of {sizes[name]} cases are not drawn for CI: {name}: pytest --beyond-ci")
    for beginning, why in NOT_IN_CI.items():
        number = sum(test.startswith(beginning) for test in tests)
        print(f"  {number} may be skipped in CI: {beginning}: {why}")
        if not number:
            sys.exit(f"NOT_IN_CI names tests that are not there: {beginning}")
    if left:
        sys.exit("No command of .ci/run ran these tests:\n  " + "\n  ".join(left))


if __name__ == "__main__":
    main()
