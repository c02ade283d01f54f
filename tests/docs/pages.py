"""Read the blocks of code in the documentation's pages, and the markers before them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(
    r"^<!-- (?P<marker>runnable|file|message)(?P<more>[^\n]*?) -->\n(?:\n)?```\w*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"<!-- (runnable|file|message)\b")


@dataclass(frozen=True)
class Block:
    """A block of code with a marker before it."""

    marker: str
    more: str
    """The rest of the marker."""
    text: str
    line: int


def marked_blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page with a marker before them.

    ``<!-- runnable: WORDS -->``: run by the tests, with these words added to each command of the block;
    ``<!-- file: NAME -->``: written beside it;
    ``<!-- message: NAME -->``: printed by the code; `tests/docs/messages.py` has a function of that name.
    """
    text = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    # A marker that precedes no block would be passed over in silence.
    assert len(found) == len(_MARKER.findall(text)), f"{page}: a marker stands before no block of code"
    for match in found:
        line = text.count("\n", 0, match.start()) + 1
        yield Block(match["marker"], match["more"].lstrip(": ").strip(), match["text"], line)


def pages_with(marker: str) -> list[Path]:
    """The pages that have such a block."""
    return [page for page in PAGES if any(block.marker == marker for block in marked_blocks(page))]


def name_of(page: Path) -> str:
    """A page's path below docs/ or the repository, for the names of tests."""
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else REPOSITORY).as_posix()
