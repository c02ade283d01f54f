"""A preview on a screen: in colours on a terminal, with a margin that says the same where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from finetune.data.rows import kind_in_words
from finetune.diagnose.preview import Preview, PreviewedRow
from finetune.diagnose.preview_splits import SplitSummary
from finetune.diagnose.preview_tokens import Piece, on_one_line, visible
from finetune.findings import count
from finetune.findings import show as show_findings

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MOST_TOKENS = 1500
"""Of a row that is shown beside others; the middle of a longer one is left out."""
_TOKENS_AT_THE_END = 300
_WIDEST_BAR = 40

_LOSS, _NO_LOSS = "bold green", "bright_black"
_SPECIAL = {True: "bold black on green", False: "black on bright_black"}
_MARGIN = {True: "loss | ", False: "     | "}


def show_preview(preview: Preview, console: Console, *, whole_rows: bool, as_table: bool) -> None:
    """Print a preview.

    Args:
        preview: what to print. Nothing in it can steer the terminal.
        console: where to. Without colours the tokens that carry loss are marked by a margin.
        whole_rows: leave nothing out of long rows.
        as_table: a line for each token in place of the running text.
    """

    def say(line: Text | str = "") -> None:
        console.print(line, soft_wrap=True)

    for line in _head(preview):
        say(line)
    say()
    for line in _split_table(preview):
        say(line)
    say()
    for line in _bars(preview.splits[preview.shown_split], preview.shown_split):
        say(line)
    is_coloured = console.color_system is not None
    for row in preview.rows:
        say()
        say(_title(row, preview.splits[row.split].rows))
        for note in row.notes:
            say(f"  note: {on_one_line(note)}")
        say()
        pieces = row.pieces if whole_rows else _shortened(row.pieces)
        lines = _table(pieces) if as_table else _coloured(pieces) if is_coloured else _with_margin(pieces)
        for text in lines:
            say(text)
    say()
    if preview.rows and not as_table:
        say(_legend(is_coloured))
    show_findings(preview.findings, console)
    say(count(preview.findings))


def _head(preview: Preview) -> Iterator[Text]:
    end_id, end_text = preview.end_of_turn
    context = "" if preview.context is None else f"; the model's context is {preview.context:,}"
    facts = {
        "data": preview.data,
        "tokenizer": preview.tokenizer,
        "chat template": "found" if preview.has_chat_template else "none",
        "end of turn": f"{on_one_line(end_text)} ({end_id})",
        "rows end at": f"{preview.max_length:,} tokens (data.max_length){context}",
    }
    for name, value in facts.items():
        yield _plain(f"{name + ':':<15}{value}")


def _split_table(preview: Preview) -> Iterator[Text]:
    """Figures of every split, columns aligned by hand: a table drawn to the screen's width would cut them."""
    columns = ("split", "rows", "tokens", "with loss", "", "median", "99 %", "longest", "truncated", "repeated")
    lines: list[tuple[str, ...]] = [columns]
    for name, split in preview.splits.items():
        figures = (split.rows, split.tokens, split.target_tokens)
        lengths = (split.median, split.percentile_99, split.longest)
        counted = (split.truncated.count, split.duplicates.count)
        cells = [*(f"{n:,}" for n in figures), f"{split.target_share:.1%}", *(f"{n:,}" for n in (*lengths, *counted))]
        lines.append((name, *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        first, *rest = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        yield _plain("  ".join([first.strip().ljust(widths[0]), *rest]))


def _bars(split: SplitSummary, name: str) -> Iterator[Text]:
    yield _plain(f"tokens of a row ({name}, {kind_in_words(split.kind)})")
    most = max(bin_.rows for bin_ in split.histogram)
    width = len(f"{split.histogram[-1].longest:,}")
    digits = len(f"{most:,}")
    for bin_ in split.histogram:
        bar = "#" * (-(-bin_.rows * _WIDEST_BAR // most))  # rounded up: no row is invisible
        yield _plain(f"  {bin_.shortest:>{width},} – {bin_.longest:>{width},} {bin_.rows:>{digits},} {bar}".rstrip())


def _title(row: PreviewedRow, num_rows: int) -> Text:
    from rich.text import Text

    share = row.num_targets / row.num_tokens if row.num_tokens else 0.0
    facts = f"{row.num_tokens:,} tokens, {row.num_targets:,} with loss ({share:.1%})"
    title = f"{row.split} row {row.place.row:,} of {num_rows:,}, {row.place.source}: {facts}"
    return Text(f"{title}{', truncated' if row.is_truncated else ''}", style="bold")


def _shortened(pieces: Sequence[Piece]) -> list[Piece]:
    """A long row without its middle. What stands for it says how much of it carries loss."""
    if len(pieces) <= MOST_TOKENS:
        return list(pieces)
    first, last = MOST_TOKENS - _TOKENS_AT_THE_END, len(pieces) - _TOKENS_AT_THE_END
    hidden = pieces[first:last]
    tokens = sum(len(piece.token_ids) for piece in hidden)
    targets = sum(len(piece.token_ids) for piece in hidden if piece.carries_loss)
    text = f"\n… {tokens:,} tokens, {targets:,} of them with loss, are not shown: --row shows all …\n"
    return [*pieces[:first], Piece([], text, carries_loss=False, is_special=True), *pieces[last:]]


def _coloured(pieces: Sequence[Piece]) -> list[Text]:
    from rich.text import Text

    text = Text()
    for piece in pieces:
        style = _SPECIAL[piece.carries_loss] if piece.is_special else _LOSS if piece.carries_loss else _NO_LOSS
        text.append(piece.text if not piece.token_ids else visible(piece.text), style=style)
    return [text]


def _with_margin(pieces: Sequence[Piece]) -> Iterator[Text]:
    """A new line wherever loss begins or ends, and at each line break of the row, which its sign tells apart."""
    line, carries_loss = "", None
    for piece in pieces:
        if carries_loss is not None and piece.carries_loss != carries_loss and line:
            yield _plain(f"{_MARGIN[carries_loss]}{line}")
            line = ""
        carries_loss = piece.carries_loss
        *ended, begun = (piece.text if not piece.token_ids else visible(piece.text)).split("\n")
        for part in ended:
            yield _plain(f"{_MARGIN[carries_loss]}{line}{part}")
            line = ""
        line += begun
    if line and carries_loss is not None:
        yield _plain(f"{_MARGIN[carries_loss]}{line}")


def _table(pieces: Sequence[Piece]) -> Iterator[Text]:
    """Position, id, loss, kind and text of each token."""
    from rich.text import Text

    position = 0
    for piece in pieces:
        if not piece.token_ids:
            yield _plain(piece.text.strip())
            continue
        ids = " ".join(map(str, piece.token_ids))
        mark = "loss" if piece.carries_loss else ""
        kind = "special" if piece.is_special else ""
        line = f"{position:>7} {ids:>8} {mark:<4} {kind:<7} {on_one_line(piece.text)}"
        yield Text(line, style=_LOSS if piece.carries_loss else "")
        position += len(piece.token_ids)


def _legend(is_coloured: bool) -> Text:
    from rich.text import Text

    signs = "↵ line break, ⇥ tab, <U+001B> a character that cannot be seen"
    if not is_coloured:
        return _plain(f"{_MARGIN[True]}marks what the model must predict; {signs}")
    return Text.assemble(
        ("carries loss", _LOSS), "  ", ("does not", _NO_LOSS), "  ",
        ("special", _SPECIAL[True]), " ", ("special", _SPECIAL[False]), f"  {signs}",
    )  # fmt: skip


def _plain(line: str) -> Text:
    """As it stands: nothing in it is markup."""
    from rich.text import Text

    return Text(line)
