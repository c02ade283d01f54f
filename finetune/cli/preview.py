"""`finetune preview`: show rows on a terminal, as plain text, or as JSON.

Colours on a terminal, or a margin elsewhere, mark the tokens that carry loss.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from finetune.cli.commands import Overrides
from finetune.cli.overrides import config_from_overrides
from finetune.cli.run_options import JsonOption
from finetune.config.objectives import OBJECTIVES
from finetune.data.rows import ROW_TYPE_NAMES
from finetune.diagnose.preview_splits import MOST_TOKENS_OF_A_CHARACTER, Piece, on_one_line, visible_token
from finetune.distributed.environment import is_first_process
from finetune.findings import count, exit_code, print_findings
from finetune.logs import configure_logs, importing
from finetune.terminal import fold
from finetune.terminal import say as say_to_terminal
from finetune.units import ceil_div, counted

if TYPE_CHECKING:
    from finetune.diagnose.preview import Preview, PreviewedRow

MOST_TOKENS = 1500
"""The middle of a longer row is left out, unless it is shown with `--row`."""
_TOKENS_AT_THE_END = 300
_WIDEST_BAR = 40
_MOST_FILES = 10
_WIDTH_OF_A_PIPE = 100_000

_LOSS, _NO_LOSS = "bold green", ""
_SPECIAL = {True: "black on green", False: "reverse"}
"""Grey, yellow and white would be hard to read on a light background or on a dark one."""
_MARGIN = {True: "loss | ", False: "     | "}


def preview_from_overrides(
    overrides: Overrides = None,
    split: Annotated[Literal["train", "validation", "test"], typer.Option(help="The split to show.")] = "train",
    num_rows: Annotated[int, typer.Option("--rows", help="Number of rows to show, from the first on.", min=0)] = 3,
    rows: Annotated[
        list[int] | None, typer.Option("--row", help="Show this row in full, counted from 1. Repeatable.", min=1)
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Print a line for each token.")] = False,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write all rows of the split to this new file: .parquet or .csv, with ids and loss mask.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show the rows of a run as its model will see them, and return the exit code. A table has a line for each token.

    Under a launcher, only the first process prints.
    """
    if table is not None:
        from finetune.runs.output_files import refuse_unwritable

        refuse_unwritable("--table", table)
    config = config_from_overrides(overrides or [], command="preview")
    if not is_first_process(os.environ):
        return 0
    configure_logs(0, level=logging.WARNING)

    with importing():
        from finetune.diagnose.preview import preview_data

    preview = preview_data(config, split=split, num_rows=num_rows, rows=rows or [], table=table)
    try:
        if as_json:
            text = json.dumps(preview.as_record(strict=config.strict))
            sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")  # the only control character that JSON leaves
        else:
            show_preview(preview, _console(), whole_rows=bool(rows), as_table=tokens)
            if table is not None:
                say_to_terminal(f"Written: {table}")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(preview.findings, strict=config.strict)


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would leave with exit code 1


def _console() -> Console:
    """Make a console with colours for a terminal that has them, unless NO_COLOR is set; elsewhere without any style."""
    console = _Screen(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_A_PIPE
    if console.no_color or not console.is_terminal or console.color_system is None:
        return _Screen(markup=False, highlight=False, emoji=False, color_system=None, width=console.width)
    return console


def show_preview(preview: Preview, console: Console, *, whole_rows: bool, as_table: bool) -> None:
    """Print a preview. On a console without colours, a margin marks the tokens that carry loss."""
    from finetune.data.row_checks import describe_counts

    def say(line: Table | Text | str = "", *, indent: str = "  ", style: str = "") -> None:
        if isinstance(line, str):
            console.print(fold(line, console.file, indent=indent), style=style, soft_wrap=True)
        else:
            console.print(line)

    for line in _head(preview):
        say(line)
    say()
    say(_split_table(preview))
    say()
    for name, split in preview.splits.items():
        for counts in split.files[:_MOST_FILES]:
            say(f"{name}, {on_one_line(describe_counts(counts))}")
        if len(split.files) > _MOST_FILES:
            say(f"{name}: {len(split.files) - _MOST_FILES:,} more files (--json has all of them)")
    say()
    for line in _bars(preview):
        say(line)
    is_coloured = console.color_system is not None
    for row in preview.rows:
        say()
        say(_title(row, preview.splits[row.split].rows), style="bold")
        for note in row.notes:
            say(f"  note: {on_one_line(note)}")
        say()
        pieces = _shown_pieces(row, whole=whole_rows)
        lines = _table(pieces) if as_table else _coloured(pieces) if is_coloured else _with_margin(pieces)
        for text in lines:
            say(text, indent=_MARGIN[False])
    say()
    if preview.rows and not as_table:
        say(_legend(is_coloured))
    print_findings(preview.findings, console)
    say(count(preview.findings))


def _head(preview: Preview) -> Iterator[str]:
    end_id, end_text = preview.end_of_turn
    context = "" if preview.context is None else f"; the model's context is {preview.context:,}"
    facts = {
        "data": preview.data,
        "read as": "\n".join(preview.read_as),
        "tokenizer": preview.tokenizer,
        "chat template": "found" if preview.has_chat_template else "none",
        "end of turn": f"{on_one_line(end_text)} ({end_id})",
        "rows end at": f"{preview.max_length:,} tokens (data.max_length){context}",
    }
    for name, value in facts.items():
        for number, line in enumerate(value.split("\n")):
            yield f"{name + ':' if number == 0 else '':<15}{line}"


def _split_table(preview: Preview) -> Table:
    """Return a table with a line for each split, narrow enough for a terminal of 80 columns."""
    rows = f"{OBJECTIVES[preview.objective].example_name}s"
    table = Table(box=None, header_style="", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("split", overflow="fold")
    for name in (rows, "tokens", "with loss", "", "median", "99 %", "longest", "truncated", "repeated"):
        table.add_column(name, justify="right", overflow="fold")
    for name, split in preview.splits.items():
        counts = [f"{count:,}" for count in (split.rows, split.tokens, split.target_tokens)]
        others = (split.median, split.percentile_99, split.longest, split.truncated.count, split.duplicates.count)
        table.add_row(name, *counts, f"{split.target_share:.1%}", *(f"{count:,}" for count in others))
    return table


def _bars(preview: Preview) -> Iterator[str]:
    split = preview.splits[preview.shown_split]
    row = "the longer side of a pair" if OBJECTIVES[preview.objective].compares_pairs else "a row"
    yield f"tokens of {row} ({preview.shown_split}, {ROW_TYPE_NAMES[split.kind]})"
    most = max(bin_.rows for bin_ in split.histogram)
    width = len(f"{split.histogram[-1].longest:,}")
    digits = len(f"{most:,}")
    for bin_ in split.histogram:
        bar = "#" * (ceil_div(bin_.rows * _WIDEST_BAR, most))  # rounded up: no row is invisible
        yield f"  {bin_.shortest:>{width},} – {bin_.longest:>{width},} {bin_.rows:>{digits},} {bar}".rstrip()


def _title(row: PreviewedRow, num_rows: int) -> str:
    share = row.num_targets / row.num_tokens if row.num_tokens else 0.0
    facts = f"{counted(row.num_tokens, 'token')}, {row.num_targets:,} with loss ({share:.1%})"
    unit, side = ("row", "") if row.side is None else ("pair", f", {row.side}")
    answer = "" if row.answer is None else f", answer {row.answer[0]} of {row.answer[1]}"
    title = f"{row.split} {unit} {row.location.row:,} of {num_rows:,}, {row.location.source}{side}{answer}: {facts}"
    return f"{title}{', truncated' if row.is_truncated else ''}"


def _shown_pieces(row: PreviewedRow, *, whole: bool) -> list[Piece]:
    """Return the pieces of a row. A piece with a remark stands for tokens that are not shown.

    Those are the prompt of a rejected side, which the chosen side has shown, and, unless `whole`, the middle of a long
    row. A made-up conversation follows the pieces of its prompt.
    """
    pieces = [*row.own_pieces(), *row.made_up]
    if not whole and len(pieces) > MOST_TOKENS:
        first, last = MOST_TOKENS - _TOKENS_AT_THE_END, len(pieces) - _TOKENS_AT_THE_END
        middle = pieces[first:last]
        num_tokens = sum(len(piece.token_ids) for piece in middle)
        num_targets = sum(len(piece.token_ids) for piece in middle if piece.carries_loss)
        text = f"… {num_tokens:,} tokens, {num_targets:,} of them with loss, are not shown: --row shows all …"
        pieces = [*pieces[:first], _not_shown(middle, text), *pieces[last:]]
    prompt = row.pieces[: len(row.pieces) - len(row.own_pieces())]
    if not prompt:
        return pieces
    num_tokens = sum(len(piece.token_ids) for piece in prompt)
    return [_not_shown(prompt, f"… {num_tokens:,} tokens as on the chosen side …"), *pieces]


def _not_shown(pieces: Sequence[Piece], text: str) -> Piece:
    token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
    return Piece(token_ids, text, carries_loss=False, is_special=True)


def _coloured(pieces: Sequence[Piece]) -> list[Text]:
    text = Text()
    for piece in pieces:
        style = _SPECIAL[piece.carries_loss] if piece.is_special else _LOSS if piece.carries_loss else _NO_LOSS
        text.append(visible_token(piece.text), style=style)
    return [text]


def _with_margin(pieces: Sequence[Piece]) -> Iterator[str]:
    """Start a new line where loss begins or ends, and at each line break of the row, which is shown by its sign."""
    line, carries_loss = "", None
    for piece in pieces:
        if carries_loss is not None and piece.carries_loss != carries_loss and line:
            yield f"{_MARGIN[carries_loss]}{line}"
            line = ""
        carries_loss = piece.carries_loss
        *ended, begun = visible_token(piece.text).split("\n")
        for part in ended:
            yield f"{_MARGIN[carries_loss]}{line}{part}"
            line = ""
        line += begun
    if line and carries_loss is not None:
        yield f"{_MARGIN[carries_loss]}{line}"


def _table(pieces: Sequence[Piece]) -> Iterator[Text]:
    """Yield position, ids, loss, whether it is special, and text of each piece."""
    position = 0
    for piece in pieces:
        ids = " ".join(map(str, piece.token_ids)) if len(piece.token_ids) <= MOST_TOKENS_OF_A_CHARACTER else "…"
        mark = "loss" if piece.carries_loss else ""
        special = "special" if piece.is_special else ""
        line = f"{position:>7} {ids:>8} {mark:<4} {special:<7} {on_one_line(piece.text)}"
        yield Text(line, style=_LOSS if piece.carries_loss else "")
        position += len(piece.token_ids)


def _legend(is_coloured: bool) -> Text | str:
    signs = "↵ line break, ⇥ tab, <U+001B> a character that cannot be seen"
    if not is_coloured:
        return f"{_MARGIN[True]}marks what the model must predict; {signs}"
    return Text.assemble(
        ("carries loss", _LOSS), "  ", ("does not", _NO_LOSS), "  ",
        ("special", _SPECIAL[True]), " ", ("special", _SPECIAL[False]), f"  {signs}",
    )  # fmt: skip
