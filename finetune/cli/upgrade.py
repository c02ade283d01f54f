"""`finetune upgrade`: see whether another environment computes what this one does, before you move to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.run_options import JsonOption, RunFolderArgument, SetOption, StepsOption, refuse_several_processes
from finetune.errors import RunFailedError
from finetune.logs import configure_logs, importing, waiting
from finetune.terminal import print_json, print_table, say
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.export.upgrade import Upgrade


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
    """Compare another environment with this one: steps and answers of a finished run. Exit code 3 if they differ."""
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
        _show(result)
    if result.verdict == "differs" or (same_bytes and result.verdict != "same bytes"):
        raise typer.Exit(RunFailedError.exit_code)


def _show(result: Upgrade) -> None:
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
