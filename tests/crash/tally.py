"""A plugin of pytest: each sweep of faults tells how many points it tried, and the test run ends with the sums.

What was tried travels with the reports of the tests, so that it arrives from the processes of pytest-xdist too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.crash import IS_FULL, STRIDE

_KINDS = {
    "kill_points": "kill points",
    "random_kills": "random kills",
    "flips": "flips",
    "resumes": "resumes compared byte by byte",
}
_PROPERTY = "crash sweep"


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Tell in words what was tried, and how many points of which kind: `tried("...", flips=20)`."""

    def tell(what: str, **counts: int) -> None:
        assert counts.keys() <= _KINDS.keys(), counts
        request.node.user_properties.append((_PROPERTY, {"what": f"{request.node.name}: {what}", "counts": counts}))

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what the sweeps tried, and the sums."""
    passed = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    told = [value for report in passed for name, value in report.user_properties if name == _PROPERTY]
    if not told:
        return
    share = "a share of the points; FINETUNE_FULL_SWEEP=1 pytest tests/crash: all"
    if IS_FULL:
        share = "every point" if STRIDE == 1 else f"every point, but of operations on files each {STRIDE}th"
    terminalreporter.section(f"crash sweeps ({share})")
    for each in told:
        terminalreporter.write_line(each["what"])
    counts: Counter[str] = Counter()
    for each in told:
        counts.update(each["counts"])
    sums = ", ".join(f"{counts[kind]} {words}" for kind, words in _KINDS.items())
    reports = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    failed = {report.nodeid for report in reports if "tests/crash/" in report.nodeid}
    end = f"{len(failed)} TESTS FAILED, and what they tried is not counted" if failed else "none lost"
    terminalreporter.write_line(f"in all: {sums}; {end}")
