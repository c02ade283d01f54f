"""Record the pictures of the pages: commands on a terminal of 80 columns, and the quickstart's report in a browser.

    python docs/generate/pictures.py FOLDER

The run goes to FOLDER; commands whose output is already there are not run again. Writes docs/assets, each picture for
a light and for a dark background. Needs the extra `report`, and Chromium for the report's picture.
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
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

REPOSITORY = Path(__file__).resolve().parents[2]
ASSETS = REPOSITORY / "docs/assets"
PICTURES = {
    "quickstart": ["finetune train quickstart", "finetune report runs/quickstart"],
    "commands": ["finetune plan quickstart", "finetune runs"],
}
"""The commands of each picture, in the order in which they run."""
BACKGROUNDS = {"light": DEFAULT_TERMINAL_THEME, "dark": SVG_EXPORT_THEME}
COLUMNS = 80
REPORT_WIDTH, REPORT_HEIGHT = 1120, 745
_CONTROL = re.compile(r"(\x1b\[[0-9;?]*[A-Za-z]|\r?\n|\r)")
_FONT_FROM_A_SERVER = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def record(command: str, folder: Path) -> str:
    """Return what a command shows on a terminal, with colours."""
    parent, child = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    environment = {**inherited, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    words = [sys.executable, "-m", *command.split()]
    process = subprocess.Popen(words, cwd=folder, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    written = b""
    try:
        while part := os.read(parent, 65536):
            written += part
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(parent)
    if process.wait() != 0:
        raise SystemExit(f"{command} ended with exit code {process.returncode}:\n{written.decode()}")
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


def recorded(name: str, folder: Path) -> str:
    """Return the commands of a picture and what they show, as text with colours."""
    parts = []
    for number, command in enumerate(PICTURES[name]):
        output = folder / f"output-{name}-{number}.txt"
        if not output.exists():
            output.write_text(record(command, folder), encoding="utf-8")
        written = output.read_text(encoding="utf-8").rstrip()
        parts.append(f"\x1b[1;32m$\x1b[0m \x1b[1m{command}\x1b[0m\n{written}\n")
    return "\n".join(parts)


def draw_terminal(name: str, session: str) -> None:
    """Draw a session as SVG that loads no font from a server, for each background."""
    form = _FONT_FROM_A_SERVER.sub("", CONSOLE_SVG_FORMAT)
    for background, theme in BACKGROUNDS.items():
        console = Console(record=True, width=COLUMNS, file=io.StringIO())
        console.print(Text.from_ansi(session))
        drawn = console.export_svg(title="finetune", code_format=form, unique_id=f"{name}-{background}", theme=theme)
        (ASSETS / f"{name}-{background}.svg").write_text(drawn, encoding="utf-8")


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
    for name in PICTURES:
        draw_terminal(name, recorded(name, folder))
    photograph_report(folder / "runs/quickstart/report.html")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
