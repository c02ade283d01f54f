"""`finetune push`: an adapter or a merged model to the hub."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from finetune.cli.alone import refuse_company
from finetune.cli.run_options import refuse_password


def push(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run's folder, or one that merge wrote.", show_default=False)
    ],
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Where to.", show_default=False, callback=refuse_password)
    ],
    private: Annotated[bool, typer.Option("--private/--public", help="What a new repository is to be.")] = True,
    base: Annotated[
        str | None,
        typer.Option(
            help="The hub id of the adapter's base, where the run's is a local folder.",
            show_default=False,
            callback=refuse_password,
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put it in place of a model of another base or kind.")
    ] = False,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload with finetune",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
) -> None:
    """Send a run's adapter, or a merged model, to the hub as one commit; says first what is sent and where to."""
    from finetune.export.push import pack, plan_push
    from finetune.export.push import push as send

    refuse_company("push")
    plan = plan_push(pack(source, base=base), repository, private=private, replace=replace)
    sys.stdout.write(f"{plan}\n")
    sys.stdout.flush()
    if dry_run:
        sys.stdout.write("Nothing was sent.\n")
        return
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    sys.stdout.write(f"Sent: {send(plan, message)}\n")
