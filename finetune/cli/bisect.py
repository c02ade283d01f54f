"""Compare two runs (`finetune diff`), their steps (`finetune bisect`), or two environments (`finetune upgrade`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.run_options import (
    JsonOption,
    OptionRules,
    RunFolderArgument,
    SetOption,
    StepsOption,
    find_run_folder,
    refuse_several_processes,
)
from finetune.errors import FinetuneError, RunFailedError
from finetune.logs import configure_logs, importing, waiting
from finetune.terminal import print_json, print_table, say, visible
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.export.upgrade import Upgrade
    from finetune.replay.bisect import Bisection
    from finetune.runs.comparison import Difference
    from finetune.runs.recorded_run import RecordedRun


def bisect(
    run: RunFolderArgument,
    other: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|OVERRIDES…]",
            help="Another run's folder, or OVERRIDES of this one (seed=1). Default: this run, computed again here.",
        ),
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare this environment with that of another Python.")
    ] = None,
    steps: StepsOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute steps of two runs again, print the first that differs, and its cause."""
    from finetune.config.config_files import is_run_file

    refuse_several_processes("bisect")
    configure_logs(rank=0)
    is_run = other is not None and len(other) == 1 and ("=" not in other[0] or is_run_file(other[0]))
    rules = OptionRules({"--python": python, "--steps": steps, "another run": is_run, "OVERRIDES": bool(other)})
    rules.exclude("--steps", "another run", because="the steps of two runs are those up to the first difference.")
    rules.exclude("--python", "OVERRIDES", because="an environment is compared under the settings of one run.")

    with importing():
        from finetune.replay.bisect import bisect_environment, bisect_overrides, bisect_runs, read_steps_option

    with waiting("comparing steps"):
        if other and is_run:
            result = bisect_runs(run, find_run_folder(Path(other[0])), settings or [])
        elif other:
            result = bisect_overrides(run, other, read_steps_option(steps, run), settings or [])
        else:
            result = bisect_environment(run, python, read_steps_option(steps, run), settings or [])
    if as_json:
        print_json(result.as_record())
    else:
        _show(result)
    if result.cause is not None:
        raise typer.Exit(RunFailedError.exit_code)


def _show(result: Bisection) -> None:
    """Print the first difference, the recorded facts that differ, the cause, and the commands that show it."""
    from finetune.runs.recorded_run import name_on_one_line

    first, second = map(name_on_one_line, result.titles)
    if result.losses is None:
        steps = counted(result.num_steps, "step")
        apart = f"{steps}, of which the losses differ by at most {result.bound:.3g} x max(1, loss)"
        say(f"{first} and {second} are equal: {apart}.")
    else:
        a, b = result.losses
        say(f"{first} and {second} differ from step {result.step} on: the loss is {a!r} and {b!r}.")
    if result.facts:
        show_differences(result.facts, result.titles)
    for note in result.notes:
        say(f"Note: {note}.")
    if result.cause is not None:
        say(f"Cause: {result.cause.text}.")
    for command in result.commands:
        say(f"  {command}")


def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", callback=find_run_folder)],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another run's folder.", callback=find_run_folder)],
    as_json: JsonOption = False,
) -> None:
    """Print what differs between two runs, and exit with 1 if anything does."""
    from finetune.runs.comparison import compare_runs
    from finetune.runs.recorded_run import name_on_one_line, open_run
    from finetune.runs.row_comparison import compare_renderings

    configure_logs(0, level=logging.ERROR)
    runs = [open_run(path, detail="recent") for path in (first, second)]
    facts = compare_runs(runs)
    is_same = not any((fact.part, fact.name) == ("data", "data.train") for fact in facts)
    rendering = None if is_same else compare_renderings(runs[0].folder, runs[1].folder)
    tokens = "" if rendering is None else _differing_tokens(runs)
    unread = [str(run.folder.config_file) for run in runs if run.config is None]
    if as_json:
        a, b = (str(run.folder.path) for run in runs)
        row = None if rendering is None else {**asdict(rendering), "text": tokens}
        differences = [fact.as_record() for fact in facts]
        print_json({"a": a, "b": b, "differences": differences, "first_row": row, "not_compared": unread})
    elif facts:
        show_differences(facts, (str(first), str(second)))
        if rendering is not None:
            say(f"First row that differs: {visible(str(rendering))}.")
        if tokens:
            say(f"Rendered again: {tokens}.")
    else:
        say(f"{name_on_one_line(first)} and {name_on_one_line(second)}: no differences except their folders and times")
    for file in [] if as_json else unread:
        say(f"{name_on_one_line(file)} is missing or cannot be read: the configurations were not compared")
    raise typer.Exit(1 if facts else 0)


def _differing_tokens(runs: Sequence[RecordedRun]) -> str:
    """Describe the tokens from which the first row differs; nothing if the rows cannot be rendered again."""
    from finetune.config.run_config import load_run_config
    from finetune.replay.causes import first_differing_row, load_rows

    rows = []
    for run in runs:
        try:
            config = load_run_config(run.folder.path, loads_model=False)
        except FinetuneError:
            return ""
        rows.append(load_rows(run.name, config, run.part("fingerprints")["data.train"]))
    first, second = rows
    return "" if first is None or second is None else first_differing_row(first, second)[1]


def show_differences(facts: Sequence[Difference], titles: Sequence[str]) -> None:
    """Print a table of the facts that differ, with a column for each run."""
    print_table(["what", *titles], [[f"{fact.part} {fact.name}", *fact.texts()] for fact in facts])


def upgrade(
    run: RunFolderArgument,
    python: Annotated[str, typer.Option(metavar="FILE", help="The Python of the other environment.")],
    steps: StepsOption = None,
    same_bytes: Annotated[
        bool, typer.Option("--same-bytes", help="End with exit code 3 if they differ by rounding, too.")
    ] = False,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute steps and answers of a run with another Python, and print how they differ."""
    refuse_several_processes("upgrade")
    configure_logs(rank=0)

    with importing():
        from finetune.export.upgrade import compare_environments
        from finetune.replay.bisect import read_steps_option

    with waiting("computing steps and answers in both environments"):
        result = compare_environments(run, python, read_steps_option(steps, run), settings or [])
    if as_json:
        print_json(result.as_record())
    else:
        _show_upgrade(result)
    if result.verdict == "differs" or (same_bytes and result.verdict != "same bytes"):
        raise typer.Exit(RunFailedError.exit_code)


def _show_upgrade(result: Upgrade) -> None:
    """Print what was compared, the packages that differ, the verdict and the cause."""
    apart, certificate = f"{result.largest_difference:.3g} (bound {result.bound:.3g})", result.certificate
    answers = certificate["answers"]
    rows = [
        [f"losses of {counted(result.num_steps, 'step')}", _equality(result.has_equal_steps), apart],
        [
            f"logits and {counted(answers['compared'], 'answer')}",
            _equality(result.has_equal_answers),
            f"{float(certificate['relative']):.3g} (bound {certificate['bound']:.3g})",
        ],
    ]
    print_table(["computed in both environments", "", "apart by at most"], rows)
    if result.versions:
        versions = [[name, *(value or "–" for value in both)] for name, both in result.versions.items()]
        print_table(["package", "here", result.python], versions)
    for mismatch in certificate["mismatches"]:
        say(f"  {mismatch}")
    say(f"Verdict: {result.verdict}.")
    if result.cause is not None:
        where = f"from step {result.step} on. " if result.step is not None else ""
        say(f"Cause: {where}{result.cause.text}.")


def _equality(has_same_bytes: bool) -> str:
    return "same bytes" if has_same_bytes else "other bytes"
