"""The options by which commands on a finished run say which weights they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from finetune.errors import ConfigError


def refuse_password(value: str | None) -> str | None:
    """Refuse an address with a password or a token in it, which messages and files would repeat.

    Raises:
        ConfigError: shows the address without it.
    """
    from finetune.config.checks import without_passwords

    if value is not None and (shown := without_passwords(value)) != value:
        raise ConfigError(
            f"{shown} contains a user, a password or a token, which would be shown and stored. Leave it out; for the "
            "hub, set HF_TOKEN in the environment."
        )
    return value


RunFolderArgument = Annotated[
    Path, typer.Argument(metavar="RUN_FOLDER", help="A run's folder, for example runs/quickstart.")
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--base",
        help="Load the adapter's base from this folder or hub id.",
        show_default=False,
        callback=refuse_password,
    ),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", help="Ask a checkpoint: a step, or `latest`. Default: adapter/.", show_default=False),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run's config.", show_default=False),
]
SystemOption = Annotated[
    str | None,
    typer.Option(help="The system turn; an empty one for none. Default: the one most training rows have."),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="The longest answer, in tokens.", min=1)]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="Draw tokens, with logits divided by this. Default: take the most likely.", show_default=False),
]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Draw from the most likely tokens with this probability together.", max=1.0, show_default=False),
]
TopKOption = Annotated[
    int | None, typer.Option(help="Draw from this many of the most likely tokens.", min=1, show_default=False)
]
SeedOption = Annotated[int, typer.Option(help="Seed for drawing tokens.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
