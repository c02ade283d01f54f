"""`finetune rehearse`: rehearse a whole job and print the result of each stage."""

from __future__ import annotations

import logging
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from finetune.cli.overrides import config_from_overrides
from finetune.cli.plan import show_plan
from finetune.cli.run_options import refuse_several_processes
from finetune.findings import count, exit_code
from finetune.logs import configure_logs, importing
from finetune.signals import Terminated, stop_signals_go_to
from finetune.terminal import print_json, say

if TYPE_CHECKING:
    from finetune.config.schema import Config
    from finetune.diagnose.rehearsal import Rehearsal, StageResult


def rehearse_from_overrides(
    overrides: Sequence[str],
    sizes: Mapping[str, Any],
    *,
    device: str | None = None,
    keep: Path | None = None,
    as_json: bool = False,
) -> int:
    """Rehearse a run and print the results.

    See `finetune rehearse` for the arguments; `sizes` has `steps`, `minutes` and `processes`.

    Returns:
        The exit code of the first stage that failed, or else the exit code of the plan.
    """
    refuse_several_processes("rehearse")
    config = config_from_overrides(overrides, command="rehearse")
    configure_logs(0, level=logging.ERROR)  # what matters is in the table, and in the logs of the stages

    with importing():
        from finetune.diagnose.plan_devices import find_device, read_device
        from finetune.diagnose.rehearsal import Rehearsal, rehearsal_folder

    where = find_device(config.training.device) if device is None else read_device(device)
    # A signal leaves neither the folder nor a process of a stage behind.
    with stop_signals_go_to(_stop), rehearsal_folder(config, keep) as folder:
        rehearsal = Rehearsal(config=config, arguments=overrides, folder=folder, device=where, **sizes)
        rehearsal.run()
    if keep is None and not rehearsal.failed:
        shutil.rmtree(rehearsal.folder)  # only the logs are left
    code = _exit_code(rehearsal, config)
    if as_json:
        print_json({**rehearsal.as_record(), "exit_code": code}, indent=None)
    else:
        _show(rehearsal, code)
    sys.stdout.flush()
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)


def _exit_code(rehearsal: Rehearsal, config: Config) -> int:
    if rehearsal.failed:
        return rehearsal.failed[0].exit_code
    return 0 if rehearsal.plan is None else exit_code(rehearsal.plan.findings, strict=config.strict)


def _show(rehearsal: Rehearsal, code: int) -> None:
    changes = rehearsal.changes
    for result in rehearsal.results:
        what = {"ok": result.what, "failed": "failed, see below", "not run": f"not run: {result.what}"}[result.outcome]
        say(f"{result.name:<9} {result.seconds:>6.1f} s  {what}", indent=" " * 20)
    _list("Other than in the real run", [str(change) for change in changes if not change.limit])
    _list("Not rehearsed", [*rehearsal.limits, *(str(change) for change in changes if change.limit)])
    _list("Would have failed", [_describe_failure(result) for result in rehearsal.failed])
    if rehearsal.plan is not None:
        say("\nPlan of the real run")
        show_plan(rehearsal.plan, Console())
    say(f"\n{_verdict(rehearsal, code)}")


def _list(title: str, lines: Sequence[str]) -> None:
    if lines:
        say(f"\n{title}")
        for line in lines:
            say(f"  {line}", indent="    ")


def _describe_failure(result: StageResult) -> str:
    log = f"\n    log: {result.log}" if result.log else ""
    return f"{result.name} (exit code {result.exit_code}): {result.what}{log}"


def _verdict(rehearsal: Rehearsal, code: int) -> str:
    names = ", ".join(stage.name for stage in rehearsal.failed)
    if names:
        return f"The real run would fail: {names}. Nothing of it was written but the cache of encoded rows."
    planned = "" if rehearsal.plan is None else f"; the plan has {count(rehearsal.plan.findings)}"
    return f"All stages of the rehearsal succeeded{planned}{': see Plan' if code else ''}."
