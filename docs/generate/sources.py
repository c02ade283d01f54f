"""Link a page to the files of the repository that it names, so that readers can open each cited proof.

A path in backticks (`tests/test_one_curve.py`) becomes a link to a page that shows the file, or lists the folder. A
missing path ends the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_FOLDERS = "tests|finetune|recipes|tools|configs|benchmarks|notebooks|docs"
_NAMED = re.compile(rf"(?<![`\[])`((?:{_FOLDERS})/[\w./-]*\w/?)`(?!\]|`)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".json": "json", ".jsonl": "json", ".ipynb": "json"}
_CODE = re.compile("`[^`]*`")
_MOST_CHARACTERS = 60_000


def named_paths(markdown: str) -> set[str]:
    """Return the files and folders of the repository that a page names in backticks, outside of code blocks."""
    return {match[1].rstrip("/") for match in _NAMED.finditer(_without_code(markdown))}


def missing_paths(markdown: str) -> list[str]:
    """Return the paths that a page names and that do not exist."""
    return sorted(path for path in named_paths(markdown) if not (REPOSITORY / path).exists())


def with_links(markdown: str, page: str) -> str:
    """Link each path that a page names. Code blocks do not change."""

    def link(match: re.Match[str]) -> str:
        path = match[1].rstrip("/")
        target = path.removeprefix("docs/") if _is_page(path) else f"source/{path}.md"
        return f"[{match[0]}]({posixpath.relpath(target, posixpath.dirname(page) or '.')})"

    pieces = _pieces(markdown)
    return "".join(piece if is_code else _NAMED.sub(link, piece) for is_code, piece in pieces)


def paths_to_show(texts: list[str]) -> list[str]:
    """Return the existing paths that these pages name, except pages."""
    named = set().union(*(named_paths(text) for text in texts))
    return sorted(path for path in named if not _is_page(path) and (REPOSITORY / path).exists())


def without_escapes_in_code(markdown: str) -> str:
    """Replace ``\\|`` in a table's code by ``|``: GitHub needs the escape, Python-Markdown shows it."""
    lines = markdown.split("\n")
    plain = [_CODE.sub(lambda it: it[0].replace("\\|", "|"), line) if line.startswith("|") else line for line in lines]
    return "\n".join(plain)


def _is_page(path: str) -> bool:
    return path.startswith("docs/") and path.endswith(".md")


def source_page(path: str) -> str:
    """Return a page that shows a file or lists a folder."""
    place = REPOSITORY / path
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n"
    if place.is_dir():
        rows = [f"| `{path}/{it.name}` | {_first_line(it)} |" for it in sorted(place.glob("*.*")) if it.is_file()]
        return head + "\n".join(["| file | |", "| --- | --- |", *rows, ""])
    text = place.read_text(encoding="utf-8")
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + "\n…"
    return f"{head}``````{_LANGUAGES.get(place.suffix, 'text')}\n{text}\n``````\n"


def _first_line(path: Path) -> str:
    if path.suffix != ".py":
        return ""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0].replace("|", "\\|")


def _pieces(markdown: str) -> list[tuple[bool, str]]:
    """Cut a text at fenced code blocks, into (is code, text)."""
    cut = re.split(r"(^```.*?^```[ \t]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return [(number % 2 == 1, piece) for number, piece in enumerate(cut)]


def _without_code(markdown: str) -> str:
    return "".join(piece for is_code, piece in _pieces(markdown) if not is_code)
