"""Record the pictures of the README: the quickstart on a terminal, and its report in a browser.

    python docs/generate/pictures.py FOLDER

The run goes to FOLDER; commands whose output is already there are not run again. Writes docs/assets. Needs the extra
`report`, and Chromium for the report's picture.
"""

from __future__ import annotations

import base64
import io
import os
import pty
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parents[2]
ASSETS = REPOSITORY / "docs/assets"
COMMANDS = ["finetune train quickstart", "finetune watch runs/quickstart --once", "finetune report runs/quickstart"]
COLUMNS = 100
REPORT_WIDTH, REPORT_HEIGHT = 1120, 745
_CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r?\n|\r)")
_FONT_FROM_A_SERVER = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def record(command: str, folder: Path) -> str:
    """Return the output of a command on a terminal, with colours. The log on standard error goes to a file."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "COLORTERM": "truecolor"}
    words = [sys.executable, "-m", *command.split()]
    with (folder / "stderr.txt").open("ab") as log:
        process = subprocess.Popen(words, cwd=folder, stdin=child, stdout=child, stderr=log, env=environment)
    os.close(child)
    written = b""
    try:
        while part := os.read(parent, 65536):
            written += part
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(parent)
    if process.wait() != 0:
        raise SystemExit(f"{command} ended with exit code {process.returncode}: see {folder / 'stderr.txt'}")
    # The path of the folder is private.
    return as_it_stands(written.decode()).replace(f"{folder}/", "")


def as_it_stands(written: str) -> str:
    """Return what a screen shows at the end: lines that were drawn again appear once."""
    lines, row = [""], 0
    for part in _CONTROL.split(written):
        if part.endswith("\n"):
            row += 1
            lines += [""] * (row == len(lines))
        elif part.startswith("\x1b[") and part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.endswith("m") or not _CONTROL.fullmatch(part):
            lines[row] += part
    return "\n".join(lines)


def recorded(folder: Path) -> str:
    """Return the whole session as text with colours."""
    parts = []
    for number, command in enumerate(COMMANDS):
        output = folder / f"output-{number}.txt"
        if not output.exists():
            output.write_text(record(command, folder), encoding="utf-8")
        written = output.read_text(encoding="utf-8").rstrip()
        parts.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\n{written}\n")
    return "\n".join(parts)


def draw_terminal(session: str, path: Path) -> None:
    """Draw the session as SVG that loads no font from a server."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(session))
    form = _FONT_FROM_A_SERVER.sub("", CONSOLE_SVG_FORMAT)
    drawn = console.export_svg(title="finetune", code_format=form, unique_id="quickstart")
    path.write_text(drawn, encoding="utf-8")


def photograph_report(report: Path) -> None:
    """Take pictures of the upper part of the page, light and dark."""
    sys.path.insert(0, str(REPOSITORY))
    from tests.report.browser import Browser, find_chromium

    executable = find_chromium()
    if executable is None:
        raise SystemExit("No Chromium was found (chromium, google-chrome, or the variable CHROMIUM).")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(executable, Path(profile)) as page:
        for scheme in ("light", "dark"):
            page.open(report, width=REPORT_WIDTH, height=REPORT_HEIGHT, dark=scheme == "dark")
            data = page.send("Page.captureScreenshot", format="png")["data"]
            (ASSETS / f"report-{scheme}.png").write_bytes(base64.b64decode(data))


def main(folder: Path) -> None:
    """Run the commands without output yet, and draw the pictures."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ASSETS.mkdir(exist_ok=True)
    draw_terminal(recorded(folder), ASSETS / "quickstart.svg")
    photograph_report(folder / "runs/quickstart/report.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
