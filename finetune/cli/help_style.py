"""Make typer's help readable on every terminal. Only a command on a terminal imports this module."""

from __future__ import annotations

import sys
from inspect import cleandoc
from typing import Any

from typer import rich_utils

from finetune.terminal import say, screen_width

_NARROW = 60
"""In a terminal of fewer columns, tables would cut words."""


def make_help_readable() -> None:
    """Change the styles that cannot be read on a light or on a dark background. A narrow terminal gets no tables."""
    for name, style in vars(rich_utils).items():
        if name.startswith("STYLE_") and isinstance(style, str):
            setattr(rich_utils, name, style.replace("dim", "").replace("yellow", "magenta").strip())
    rich_utils.RICH_HELP = rich_utils.RICH_HELP.replace("[blue]", "[bold]")
    if (screen_width(sys.stdout) or _NARROW) < _NARROW:
        rich_utils.rich_format_help = _show_narrow


def _show_narrow(*, obj: Any, ctx: Any, markup_mode: object) -> None:
    """Print the help of a command as a list: usage, description, arguments, options and commands."""
    pieces = " ".join(obj.collect_usage_pieces(ctx))
    say(f"Usage: {ctx.command_path} {pieces}\n\n{cleandoc(obj.help or '')}\n", indent="  ")
    records = [parameter.get_help_record(ctx) for parameter in obj.get_params(ctx)]
    for names, text in filter(None, records):
        say(f"{names}  {text}", indent="    ")
    commands = {name: obj.get_command(ctx, name) for name in getattr(obj, "commands", ())}
    for name, command in commands.items():
        if not command.hidden:
            say(f"\n{name}  {' '.join(cleandoc(command.help or '').partition(chr(10) * 2)[0].split())}", indent="    ")
    say("")
