"""The glossary is short, and the documentation uses each of its terms."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, PAGES

GLOSSARY = DOCS / "glossary.md"
TERMS = re.findall(r"^\| (?!term |---)(.+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
MOST_TERMS = 25


def test_the_glossary_is_short_and_sorted():
    assert 0 < len(TERMS) <= MOST_TERMS
    assert sorted(set(TERMS)) == TERMS


def test_another_page_uses_each_term():
    pages = [page.read_text(encoding="utf-8") for page in PAGES if page != GLOSSARY]
    text = re.sub(r"\s+", " ", " ".join(pages)).lower()
    assert [term for term in TERMS if not re.search(rf"\b{re.escape(term)}(s|es|ed)?\b", text)] == []
