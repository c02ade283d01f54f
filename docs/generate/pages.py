"""Hooks of MkDocs: add pages that are made from the code, and pages from elsewhere in the repository."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY), str(Path(__file__).resolve().parent)]

from commands import commands_page  # noqa: E402
from configuration import configuration_page  # noqa: E402
from migrating import with_tables  # noqa: E402
from python import python_page  # noqa: E402
from sources import missing_paths, paths_to_show, source_page, with_links, without_escapes_in_code  # noqa: E402

ELSEWHERE = {
    "benchmarks.md": "benchmarks/README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Pages whose files are outside of docs/."""
_LINK_FROM_THE_TOP = re.compile(r"\]\((?:docs/([\w./-]+\.md)|(ARCHITECTURE|CONTRIBUTING|CHANGELOG)\.md)")


_ROW = re.compile(r"^\| (?!you want to|Start|---)(.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^]]+)\]\(([\w/-]+)\.md(#[\w-]+)?\)")


def llms_txt(index: str) -> str:
    """Return the text of llms.txt, a list of the pages for language models (https://llmstxt.org), from index.md."""
    title, about = index.removeprefix("# ").split("\n\n")[:2]
    about = " ".join(_LINK.sub(r"\1", about).split())
    rows = [row.split(" | ") for row in _ROW.findall(index)]
    # A cell of the first table has a link and what it leads to. The others have an aim and the pages for it.
    cells = [[(cell, cell) for cell in row] if _LINK.search(row[0]) else [(row[0], row[1])] for row in rows]
    links = [(_LINK.sub(r"\1", aim), *link) for row in cells for aim, cell in row for link in _LINK.findall(cell)]
    lines = [f"- [{name}]({page}.html{part}): {aim}" for aim, name, page, part in links]
    return "\n".join([f"# {title}", "", f"> {about}", "", "## Pages", "", *lines, ""])


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and a page for each file of the repository that a page names."""
    made = {
        "reference/configuration.md": configuration_page(),
        "reference/commands.md": commands_page(),
        "reference/python.md": python_page(),
    }
    for page, home in ELSEWHERE.items():
        text = (REPOSITORY / home).read_text(encoding="utf-8")
        made[page] = _LINK_FROM_THE_TOP.sub(lambda it: f"]({it[1] or it[2].lower() + '.md'}", text)
    written = [file.content_string for file in files.documentation_pages()]
    for path in paths_to_show([*written, *made.values()]):
        made[f"source/{path}.md"] = source_page(path)
    made["llms.txt"] = llms_txt((REPOSITORY / "docs/index.md").read_text(encoding="utf-8"))
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add the tables of names, and link the paths that a page names. A missing path ends the build."""
    source = page.file.src_uri
    missing = [] if source.startswith("source/") or source == "changelog.md" else missing_paths(markdown)
    if missing:
        raise PluginError(f"{source} names {', '.join(missing)}: no such file. Correct the path.")
    if source == "migrating.md":
        markdown = with_tables(markdown)
    return markdown if source.startswith("source/") else without_escapes_in_code(with_links(markdown, source))
