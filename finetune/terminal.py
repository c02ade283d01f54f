"""Write text, JSON and tables to a terminal, without control sequences and credentials, wrapped to its width."""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote

from finetune.errors import RunFailedError

if TYPE_CHECKING:
    from rich.text import Text

_STEERS_READING = frozenset("\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder or break the text around them, so that it could look like another text."""
_USER_IN_ADDRESS = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s]+@")
"""The part of an address that may hold a password, which may hold an @ itself; its first group is the scheme."""
_ADDRESS = re.compile(r"://[^\s\"']+")
_PARAMETER = re.compile(r"(?:[?&#;]|%(?:3f|26|23|3b))[^?&#;]*", re.IGNORECASE)
"""A part of an address from a separator on, which may be percent-encoded."""
_HARMLESS = re.compile(
    "alt|config|dataset|dl|download|export|format|generation|lang|length|limit|offset|page|raw|ref|rev|revision|"
    "snapshot|split|subset|version|versionid",
    re.IGNORECASE,
)
"""The parameters of an address that may be shown and stored. Any other one may grant access, as in signed URLs."""
_NOT_ESCAPED_BY_JSON = re.compile("[\u007f-\u009f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_LATER_LINE = re.compile(r"\n(?=\S)")

_USUAL_WIDTH = 80
_UNBOUNDED = 100_000
_LONGEST_VALUE = 60
"""The longest cell that counts as one line of a table. A longer cell is prose."""
_BETWEEN = " · "

_ESCAPE = "finetune.escape"
_IN_ASCII = str.maketrans(
    dict(zip("·–−×━─▁▂▃▄▅▆▇█⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|--x=-_.:-=+*#|/-\\|/-\\|/", strict=True))
    | {"…": "...", "±": "+/-", "→": "->", "↵": r"\n", "⇥": r"\t"}
)
"""ASCII for the decoration of the output: signs, the bars of curves, and the spinner of rich."""


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_IN_ASCII)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_ESCAPE, _escape)


class _StandardStream(FileIO):
    """Standard output or error. Once nothing can be written to it any more, it leads to the null device.

    Then a terminal has hung up, the reader of a pipe has left, or a disk is full.
    """

    raises = True
    """Raise what was lost, so that the command ends. A closed terminal never ends a command."""

    def write(self, data: Any, /) -> int:
        """Write what the stream takes, see `FileIO.write`."""
        try:
            return super().write(data)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if isinstance(error, BrokenPipeError) and self.raises:
                raise
            if self.raises and error.errno != errno.EIO:
                raise RunFailedError(
                    f"Writing to stdout failed: {error.strerror}. The rest of the output is lost: make room or name "
                    "another file, then run the command again."
                ) from error
            return len(data)


def prepare_streams() -> None:
    """Make the standard streams of this process usable. Later calls change nothing.

    Streams that are closed are opened on the null device. Characters that the encoding of stdout or stderr lacks do
    not raise UnicodeEncodeError: decoration is written in ASCII (``...`` for an ellipsis), and every other character as
    an escape (``\\u4ef7``). Bytes of stdin that are no text do not raise UnicodeDecodeError: they are read as halves of
    surrogate pairs, which are refused where text is expected. A stream with an error handler that the user chose keeps
    it (``PYTHONIOENCODING=ascii:replace``). A stderr that nobody reads ends no command. A traceback has no control
    sequences.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        elif type(stream) is TextIOWrapper and not stream.closed:
            if number:
                setattr(sys, name, _prepared(stream, number))
            elif stream.errors == "strict":
                stream.reconfigure(errors="surrogateescape")
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show_exception


def outlive_readers() -> None:
    """From here on, a stdout that nobody can read ends no command either: a run has its files."""
    raw = _raw(sys.stdout)
    if isinstance(raw, _StandardStream):
        raw.raises = False


def _raw(stream: IO[str]) -> object:
    """Return what writes to the descriptor of a stream. Under python -u, it has no buffer around it."""
    buffer = getattr(stream, "buffer", None)
    return getattr(buffer, "raw", buffer)


def _prepared(stream: TextIOWrapper, number: int) -> TextIOWrapper:
    errors = _ESCAPE if stream.errors in ("strict", "surrogateescape", "backslashreplace") else stream.errors
    if type(before := _raw(stream)) is not FileIO or before.fileno() != number:
        stream.reconfigure(errors=errors)
        return stream
    with suppress(OSError):
        stream.flush()
    raw = _StandardStream(number, "w", closefd=False)
    raw.raises = number == 1
    return TextIOWrapper(
        BufferedWriter(raw) if isinstance(stream.buffer, BufferedWriter) else raw,
        stream.encoding,
        errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _show_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def as_written(text: str, stream: IO[str]) -> str:
    """Return the text that a stream will show, see `prepare_streams`: for layouts that depend on its width."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _ESCAPE).decode(encoding)


def visible(text: str, *, also_unseen: bool = False) -> str:
    """Replace every control character but newline and tab by its code point: ``<U+001B>``, ``<U+202E>``.

    With `also_unseen`, also harmless invisible characters: joiners, and all spaces except the plain one.
    """
    return "".join(c if _may_stand(c, also_unseen) else f"<U+{ord(c):04X}>" for c in text)


def as_one_message(text: str) -> str:
    """Return a message without control sequences, its later lines indented: none looks like a message of its own."""
    return _LATER_LINE.sub("\n  ", visible(text))


def without_passwords(text: str) -> str:
    """Hide user names, passwords, and all parameters but harmless ones (``page=2``), in the addresses of a text."""
    text = _USER_IN_ADDRESS.sub(r"\1…@", text)
    return _ADDRESS.sub(lambda address: _PARAMETER.sub(_without_secret, address[0]), text)


def _without_secret(parameter: re.Match[str]) -> str:
    text = unquote(parameter[0])
    name, _, value = text[1:].partition("=")
    if _HARMLESS.fullmatch(name) and not _PARAMETER.search(value):
        return parameter[0]
    if value.strip("="):
        return f"{text[0]}{name}=…"
    # Names of files and anchors may stand behind # or ;, and paths may contain &.
    is_in_query = "?" in unquote(parameter.string[: parameter.start() + 1]) or text[0] == "?"
    return f"{text[0]}…" if name and is_in_query else parameter[0]


def json_text(value: object, *, indent: int | None = None, is_ascii: bool = False) -> str:
    """Return a value as JSON in which all control characters are escaped; it reads back as the same value."""
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii, allow_nan=False, default=str)
    return _NOT_ESCAPED_BY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Write `json_text` of a value and a newline to stdout, in ASCII if its encoding is not Unicode's."""
    is_unicode = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    sys.stdout.write(f"{json_text(value, indent=indent, is_ascii=not is_unicode)}\n")


def screen_width(stream: IO[str]) -> int | None:
    """Return the columns of the terminal that a stream writes to (the variable COLUMNS wins); None for no terminal."""
    if not getattr(stream, "isatty", bool)():
        return None
    wished = os.environ.get("COLUMNS", "")
    if wished.isdigit() and int(wished):
        return int(wished)
    return os.get_terminal_size(stream.fileno()).columns or _USUAL_WIDTH


def fold(text: str, stream: IO[str], *, indent: str = "") -> str:
    """Return text for a stream, without control sequences. Lines that are wider than its terminal are wrapped.

    Every message passes through here or through the log's formatter. No word is broken, so that a long path can be
    copied. `indent` is put before each line that continues another.
    """
    width, text = screen_width(stream), visible(text)
    if width is None:
        return text
    lines = as_written(text, stream).split("\n")
    return "\n".join(part for line in lines for part in fold_line(line, width, indent))


def fold_line(line: str, width: int, indent: str) -> Iterator[str]:
    """Break a line between words, see `fold`."""
    from rich.cells import cell_len

    shown = ""
    for word in re.findall(r"\s*\S+", line):  # with the spaces before it
        if shown.strip() and cell_len(shown + word) > width:
            yield shown
            shown = indent + word.lstrip()
        else:
            shown += word
    yield shown


def shown_folder(folder: Path) -> Path:
    """Return a folder relative to the current one if it is below it."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def say(text: str, *, indent: str = "") -> None:
    """Write text and a newline to stdout, folded to the width of a terminal."""
    sys.stdout.write(f"{fold(text, sys.stdout, indent=indent)}\n")


def print_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | tuple[str, str]]],
    *,
    right: Collection[str] = (),
    title: str | None = None,
) -> None:
    """Write a table to stdout. If it is too wide for the terminal, each row becomes a paragraph. No value is truncated.

    In a pipe the table is as wide as its values, unless one of them is prose. Cells are text, or text with a style of
    rich; text is never read as markup. Columns named in `right` are aligned to the right.
    """
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console()
    names = [as_written(visible(name), sys.stdout) for name in head]
    styled = [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
    cells = [[Text(as_written(visible(text), sys.stdout), style) for text, style in row] for row in styled]
    table = Table()
    for name, shown in zip(head, names, strict=True):
        table.add_column(Text(shown), justify="right" if name in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    width = Measurement.get(console, console.options.update(width=_UNBOUNDED), table).maximum
    is_prose = any(cell.cell_len > _LONGEST_VALUE or "\n" in cell.plain for row in cells for cell in row)
    if title is not None:
        say(title)
    if width <= console.width:
        console.print(table)
    elif not console.is_terminal and not is_prose:
        Console(width=width).print(table)
    else:
        for row in cells:
            for line in _paragraph(names, row, console.width):
                console.print(line, soft_wrap=True)


EMPTY = "(empty)"
"""What is shown in place of an empty answer."""


def print_texts(texts: Iterable[tuple[str, str]]) -> None:
    """Write texts to stdout, one below the other, each after its label. Text is never read as markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in texts:
        table.add_row(Text(label, style="bold"), Text(visible(text) or EMPTY))
    Console().print(table)


def _paragraph(names: Sequence[str], row: Sequence[Text], width: int) -> Iterator[Text]:
    """Yield the lines of a row: the first cell, then each other one after the name of its column; no empty ones."""
    from rich.cells import cell_len
    from rich.text import Text

    items = [(f"{name}: " if name else "") + cell.plain for name, cell in zip(names, row, strict=True) if cell.plain]
    first, *others = items
    lines = [first]
    for item in others:
        longer = f"{lines[-1]}{_BETWEEN}{item}"
        if len(lines) > 1 and "\n" not in longer and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(f"  {item}")
    for number, line in enumerate("\n".join(lines).split("\n")):
        for part in fold_line(line, width, "    "):
            text = Text(part, style="" if number else "bold")
            for cell in row:
                if cell.style and cell.plain:
                    text.highlight_words([cell.plain], cell.style)
            yield text


def _may_stand(character: str, also_unseen: bool) -> bool:
    if character in "\n\t":
        return True
    if also_unseen:
        return character.isprintable()
    return character not in _STEERS_READING and unicodedata.category(character) not in ("Cc", "Cs")
