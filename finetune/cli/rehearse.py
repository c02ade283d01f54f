"""`finetune rehearse`: rehearse a whole job and print the result of each stage."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides
from finetune.cli.run_options import DeviceOption, JsonOption, refuse_several_processes
from finetune.logs import configure_logs, importing
from finetune.runs.default_folder import with_chosen_folder
from finetune.terminal import print_json, say

if TYPE_CHECKING:
    from finetune.diagnose.rehearsal import Rehearsal


def rehearse_from_overrides(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to take.", min=1)] = 6,  # three saves, a kill after one
    minutes: Annotated[
        float, typer.Option(help="End a stage that runs so many minutes after the start.", min=0.01)
    ] = 15,
    processes: Annotated[
        int | None, typer.Option(help="Processes of the real launch. Default: as the OVERRIDES say.", min=1)
    ] = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> int:
    """Rehearse a run, print the results, and return the exit code of the first stage that failed, or 0."""
    overrides = overrides or []
    refuse_several_processes("rehearse")
    config = with_chosen_folder(config_from_overrides(overrides, command="rehearse"))
    configure_logs(0, level=logging.ERROR)  # what matters is in the table, and in the logs of the stages

    with importing():
        from finetune.diagnose.plan_devices import read_device
        from finetune.diagnose.rehearsal import Rehearsal, make_folder

    if device is not None:
        read_device(device)  # refuses a name that is not known before anything is run
    rehearsal = Rehearsal(
        config=config,
        arguments=overrides,
        folder=make_folder(config),
        device=device,
        steps=steps,
        minutes=minutes,
        processes=processes,
    )
    try:
        rehearsal.run()
    finally:
        rehearsal.clean()
    code = rehearsal.failed[0].exit_code if rehearsal.failed else 0
    if as_json:
        print_json({**rehearsal.as_record(), "exit_code": code}, indent=None)
    else:
        _show(rehearsal)
    sys.stdout.flush()
    return code


def _show(rehearsal: Rehearsal) -> None:
    for result in rehearsal.results:
        outcome = {"ok": result.what, "failed": "failed, see below", "not run": f"not run: {result.what}"}[
            result.outcome
        ]
        say(f"{result.name:<9} {result.seconds:>6.1f} s  {outcome}", indent=" " * 20)
    changes = [
        f"{change['key']}: {_format_value(change['rehearsed'])} here, {_format_value(change['real'])} in the real run"
        for change in rehearsal.as_record()["changes"]
    ]
    failures = [
        f"{result.name} (exit code {result.exit_code}): {result.what}"
        + (f"\n    log: {result.log}" if result.log else "")
        for result in rehearsal.failed
    ]
    for title, lines in (
        ("Other than in the real run", changes),
        ("Not rehearsed", rehearsal.limits),
        ("Would have failed", failures),
    ):
        if lines:
            say("\n".join([f"\n{title}", *(f"  {line}" for line in lines)]), indent="    ")
    if rehearsal.failed:
        names = ", ".join(result.name for result in rehearsal.failed)
        say(f"\nThe real run would fail: {names}. Nothing of it was written but the cache of encoded rows.")
    else:
        say("\nAll stages of the rehearsal succeeded. `finetune plan` with the same arguments has the whole plan.")


def _format_value(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value)
