"""The findings of `doctor`, `plan` and `preview`: show them, collect them from ranks, turn them into an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from finetune.terminal import fold
from finetune.units import counted, name_first

if TYPE_CHECKING:
    from rich.console import Console

Level = Literal["ok", "warning", "problem"]

EXIT_PROBLEM = 2
_MOST_NAMES = 4
_INDENT = " " * 11
_STYLES = {"ok": "green", "warning": "magenta", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        area: the part of the report it belongs to.
        level: `problem` if a run would fail or not do what was asked for, `warning` if it would be slow or fragile.
        what: the result, as a sentence without a full stop.
        fix: what to do about it; None if the level is `ok`.
    """

    area: str
    level: Level
    what: str
    fix: str | None = None


def ok(area: str, what: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(area, "ok", what)


def warning(area: str, what: str, fix: str) -> Finding:
    """Return a finding with which a run would be slow or fragile."""
    return Finding(area, "warning", what, fix)


def problem(area: str, what: str, fix: str) -> Finding:
    """Return a finding with which a run would fail, or not do what was asked for."""
    return Finding(area, "problem", what, fix)


def what_and_fix(message: str, *, page: str) -> tuple[str, str]:
    """Split the message of a refusal before its last sentence, which says what to do.

    If there is only one sentence, `page` says what to do.
    """
    what, _, fix = message.rstrip(".").rpartition(". ")
    return (what, fix) if what else (fix, f"see {page}")


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """Return 2 if there is a problem or, when strict, a warning; else 0."""
    bad = {"problem", "warning"} if strict else {"problem"}
    return EXIT_PROBLEM if any(finding.level in bad for finding in findings) else 0


def findings_of_others(by_rank: Sequence[Sequence[Finding]], hosts: Sequence[str]) -> list[Finding]:
    """Return the warnings and problems that ranks other than 0 have, with the names of those ranks.

    Those that all ranks have are left out: rank 0 reports them.
    """
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in dict.fromkeys(findings):
            if finding.level != "ok":
                ranks.setdefault(finding, []).append(rank)
    return [
        replace(finding, what=f"{_joined([rank for rank in having if rank], hosts)}: {finding.what}")
        for finding, having in ranks.items()
        if having != [0] and len(having) < len(by_rank)
    ]


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print findings by area, in order of the first finding of each, and the fix of a finding below it."""
    from rich.text import Text

    for area in dict.fromkeys(finding.area for finding in findings):
        console.print(Text(area, style="bold"), soft_wrap=True)
        for finding in (finding for finding in findings if finding.area == area):
            lines = [f"  {finding.level:<8} {finding.what}", *([f"{_INDENT}fix: {finding.fix}"] if finding.fix else [])]
            text = Text("\n".join(fold(line, console.file, indent=_INDENT) for line in lines))
            text.stylize(_STYLES[finding.level], 2, 2 + len(finding.level))
            console.print(text, soft_wrap=True)


def count(findings: Sequence[Finding]) -> str:
    """Count problems and warnings in words: ``1 problem, 2 warnings``."""
    numbers = {level: sum(finding.level == level for finding in findings) for level in ("problem", "warning")}
    return ", ".join(counted(number, level) for level, number in numbers.items())


def _joined(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    return name_first([f"rank {rank} on {hosts[rank]}" for rank in ranks], _MOST_NAMES)
