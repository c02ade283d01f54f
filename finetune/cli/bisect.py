"""`finetune bisect`: find the first step in which two runs differ, and the cause."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.diff import show_differences
from finetune.cli.option_rules import OptionRules
from finetune.cli.run_options import JsonOption, RunFolderArgument, SetOption, refuse_several_processes
from finetune.errors import RunFailedError
from finetune.logs import configure_logs, importing, waiting
from finetune.terminal import print_json, say

if TYPE_CHECKING:
    from finetune.bisect.search import Finding


def bisect(
    run: RunFolderArgument,
    other: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|OVERRIDES…]",
            help="Another run's folder, or OVERRIDES of this one (seed=1). Default: this run, computed again here.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare this environment with that of another Python.", show_default=False),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="N-M",
            help="The steps to compute, from 1 or from the step after a kept checkpoint. Default: a few of them.",
            show_default=False,
        ),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the first step in which two runs differ, and the cause. Exit code 3 if they differ."""
    refuse_several_processes("bisect")
    configure_logs(rank=0)
    is_run = other is not None and len(other) == 1 and "=" not in other[0]
    rules = OptionRules({"--python": python, "--steps": steps, "another run": is_run, "OVERRIDES": bool(other)})
    rules.exclude("--steps", "another run", because="the steps of two runs are those up to the first difference.")
    rules.exclude("--python", "OVERRIDES", because="an environment is compared under the settings of one run.")

    with importing():
        from finetune.bisect.search import bisect_environment, bisect_overrides, bisect_runs, read_steps_option

    with waiting("comparing steps"):
        if other and is_run:
            found = bisect_runs(run, Path(other[0]), settings or [])
        elif other:
            found = bisect_overrides(run, other, read_steps_option(steps, run), settings or [])
        else:
            found = bisect_environment(run, python, read_steps_option(steps, run), settings or [])
    if as_json:
        print_json(found.as_record())
    else:
        _show(found)
    if found.cause is not None:
        raise typer.Exit(RunFailedError.exit_code)


def _show(found: Finding) -> None:
    """Print the first difference, the recorded facts that differ, the cause, and the commands that show it."""
    first, second = found.titles
    apart = f"{found.num_steps} steps, of which the losses differ by at most {found.bound:.3g} x max(1, loss)"
    if found.losses is not None:
        a, b = found.losses
        say(f"{first} and {second} differ from step {found.step} on: the loss is {a!r} and {b!r}.")
    else:
        say(f"{first} and {second} {'are equal' if found.cause is None else 'trained equally'}: {apart}.")
    if found.facts:
        show_differences(found.facts, found.titles)
    for note in found.notes:
        say(f"Note: {note}.")
    if found.cause is not None:
        say(f"Cause: {found.cause.text}.")
        for command in found.cause.commands:
            say(f"  {command}")
