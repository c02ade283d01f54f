"""`finetune doctor`: check the launch and the machine before a run, or prove a family of models."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides
from finetune.cli.run_options import JsonOption, refuse_several_processes
from finetune.errors import ConfigError, RunFailedError
from finetune.logs import configure_logs, importing
from finetune.terminal import print_json, say, visible
from finetune.units import counted

if TYPE_CHECKING:
    from finetune.diagnose.rehearsal import StageResult

_OUTCOMES = {"ok": "holds", "failed": "FAILS", "not run": "-"}


def doctor(
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Prove the promises for the layers of a model, on a tiny random one: a preset, a model type of "
            "transformers (olmo3), a folder, a config.json, or a hub id in the cache. Checks nothing else.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Check the launch and the machine, and return the exit code. Collective under a launcher."""
    if model is not None:
        return _prove(model, overrides or [], as_json=as_json)
    config = config_from_overrides(overrides or [], complete=False)

    from finetune.diagnose.doctor import diagnose

    return diagnose(config, as_json=as_json)


def _prove(name: str, overrides: list[str], *, as_json: bool) -> int:
    """Prove the promises for a family, print each result, and return the exit code."""
    refuse_several_processes("doctor --model")
    if overrides:
        raise ConfigError(
            f"finetune doctor --model proves a family and takes no OVERRIDES, but got {' '.join(overrides)}. Leave "
            f"them out, or check a run with `finetune doctor model={name} {' '.join(overrides)}`."
        )
    configure_logs(0, level=logging.ERROR)  # what matters is in the table
    with importing():
        from finetune.diagnose.family import FamilyProof, errors_of_transformers_only, find_family

    config, source = find_family(name)
    folders = TemporaryDirectory(prefix="finetune-doctor-")
    with errors_of_transformers_only(), folders as folder:
        proof = FamilyProof(config, Path(folder), show=lambda result: None if as_json else _show(result))
        record = proof.as_record()
        if not as_json:
            sizes = f"{counted(record['layers'], 'layer')}, hidden size {record['hidden_size']}"
            say(f"{record['model_type']} ({source}): a tiny random model, {sizes}")
            say(f"computed by {proof.computed_by}\n")
        proof.run()
    code = RunFailedError.exit_code if proof.failed else 0
    if as_json:
        print_json({"source": source, **proof.as_record(), "exit_code": code})
    else:
        names = ", ".join(result.name for result in proof.failed)
        verdict = f"Broken for this family: {names}." if names else "All promises hold for this family."
        say(f"\n{verdict} Weights, tokenizer and chat template were not looked at: `finetune preview` shows rows.")
    sys.stdout.flush()
    return code


def _show(result: StageResult) -> None:
    outcome = _OUTCOMES[result.outcome]
    say(f"{result.name:<18} {result.seconds:>5.1f} s  {outcome:<5}  {visible(result.what)}", indent=" " * 35)
    sys.stdout.flush()
