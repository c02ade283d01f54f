"""The results as Markdown, and their place in README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES
from benchmarks.summary import (
    GOALS,
    HELP,
    ONE_TO_TWO,
    Goal,
    Run,
    Spread,
    in_order,
    limit_shares,
    over_rounds,
    paired_ratios,
    reached,
    spread,
)

BEGIN, END = "<!-- results on {}: begin -->", "<!-- results on {}: end -->"
"""Around the place of a device's results in README.md."""
_NOT_MEASURED = "not measured yet"
_ON_A_CPU = (
    ("tokens / CPU s", "tokens_per_cpu_second", "{:,.0f}"),
    ("first step, CPU s", "first_step_cpu_seconds", "{:.1f}"),
)
_ON_CUDA = (("tokens / s", "tokens_per_second", "{:,.0f}"), ("first step, s", "first_step_seconds", "{:.1f}"))
_MEMORY = ("peak memory, MiB", "peak_memory_mib", "{:,.0f}")


def render(runs: Sequence[Run], machine: Mapping[str, Any], device: str = "cpu") -> str:
    """All that stands between a device's markers. The goals that have figures are those of the CPU."""
    measured = [name for name in in_order(runs, lambda run: run["job"]) if name != "help"]
    goals = [] if device == "cuda" else [f"#### Figures to reach\n\n{_goals(runs)}"]
    tables = [f"#### {name}\n\n{_table(runs, name)}" for name in measured]
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.items())
    return "\n\n".join([facts, *goals, *tables]) + "\n"


def legend(runs: Sequence[Run]) -> str:
    """Say in a line what each engine of the runs is. README.md has a table of all of them."""
    names = in_order(runs, lambda run: run["engine"])
    return "; ".join(f"`{name}`: {ENGINES[name].meaning}" for name in names if name in ENGINES)


def put_into(readme: Path, text: str, device: str = "cpu") -> None:
    """Replace what stands between a device's markers.

    Raises:
        ValueError: the page has no such place.
    """
    first, last = BEGIN.format(device), END.format(device)
    page = readme.read_text(encoding="utf-8")
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"{readme.name} has no place for results: expected the lines {first} and {last}")
    readme.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def _goals(runs: Sequence[Run]) -> str:
    lines = ["| figure | ours against | goal | measured |", "|---|---|---|---|"]
    jobs = {run["job"] for run in runs}
    for goal in (goal for goal in (*GOALS, ONE_TO_TWO, HELP) if goal.job in jobs):
        found = reached(runs, goal)
        against = goal.against or "itself"
        bound = "at least" if goal.at_least else "at most"
        shown = _NOT_MEASURED if found is None else f"{_with_noise(found, '{:.2f}')}{_verdict(found, goal)}"
        lines.append(f"| {goal.what} | {against} | {bound} {goal.value:g} | {shown} |")
    return "\n".join(lines)


def _verdict(found: Spread, goal: Goal) -> str:
    is_reached = found.median >= goal.value if goal.at_least else found.median <= goal.value
    return "" if is_reached else " (not reached)"


def _table(runs: Sequence[Run], job: str) -> str:
    here = [run for run in runs if run["job"] == job]
    engines = [engine for engine in in_order(here, lambda run: run["engine"]) if engine != "limit"]
    columns = (*(_ON_CUDA if job.endswith("cuda") else _ON_A_CPU), _MEMORY)
    heads = ["engine", *(head for head, _, _ in columns), "of the limit", "first loss off by", "ours / this", "runs"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for engine in engines:
        cells = [f"`{engine}`"]
        cells += [_cell(over_rounds(here, job, engine, figure), form) for _, figure, form in columns]
        cells.append(_cell(limit_shares(here, job, engine), "{:.2f}"))
        cells.append(_cell(over_rounds(here, job, engine, "first_loss_difference"), "{:.0e}", with_noise=False))
        cells.append(_cell(paired_ratios(here, job, columns[0][1], "ours", engine), "{:.2f}"))
        mine = [run for run in here if run["engine"] == engine]
        failed = sum("error" in run for run in mine)
        cells.append(f"{len(mine) - failed}" + (f", {failed} failed" if failed else ""))
        lines.append(f"| {' | '.join(cells)} |")
    limit = spread(over_rounds(here, job, "limit", "flops_per_second").values())
    if limit is not None:
        giga = Spread(limit.median / 1e9, limit.deviation / 1e9)
        lines.append(f"\nThe matmul limit of one process: {_with_noise(giga, '{:,.1f}')} GFLOP/s.")
    return "\n".join(lines)


def _cell(values: Mapping[int, float], form: str, *, with_noise: bool = True) -> str:
    found = spread(values.values())
    if found is None:
        return "–"
    return _with_noise(found, form) if with_noise else form.format(found.median)


def _with_noise(found: Spread, form: str) -> str:
    """Return the median and its deviation over the rounds. A single round has none."""
    median = form.format(found.median)
    return f"{median} ± {form.format(found.deviation)}" if found.deviation else median
