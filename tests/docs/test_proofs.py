"""The guarantees name tests that exist, and every page can be reached."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tests.docs.pages import DOCS, README, REPOSITORY

GUARANTEES = (DOCS / "guarantees.md").read_text(encoding="utf-8")
PROMISES = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", GUARANTEES, re.MULTILINE | re.DOTALL)
LINKS = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize(("title", "text"), PROMISES, ids=[title for title, _ in PROMISES])
def test_a_promise_names_tests_that_are_there(title, text):
    proofs = re.findall(r"`(tests/[\w/.]+)`", text.partition("Proof:")[2])
    assert proofs, f"{title} names no test as its proof"
    for proof in proofs:
        path = REPOSITORY / proof
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        assert files, f"{proof} has no test"
        assert all("def test_" in file.read_text(encoding="utf-8") for file in files), proof


def test_the_promises_are_those_of_the_architecture():
    stated = re.findall(r"^(\d\. \*\*.+?)\*\*", (REPOSITORY / "ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE)
    numbered = [title for title, _ in PROMISES if title[0].isdigit()]
    assert numbered == [it.replace("*", "").rstrip(".") for it in stated]


def test_every_page_is_in_the_navigation():
    named = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = set(re.findall(r"'([\w/-]+\.md)'", repr(named)))
    assert {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} <= pages


def test_every_dependency_is_justified():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["report"]]
    text = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Dependencies")[2]
    named = {
        name.strip()
        for cell in re.findall(r"^\| (.+?) \|", text, re.MULTILINE)
        for name in cell.split(" (")[0].split(",")
    }
    assert {re.split(r"[\[><=]", it)[0] for it in wanted} - named == set()


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_links_of_the_repositorys_own_pages_lead_somewhere(name):
    text = (REPOSITORY / name).read_text(encoding="utf-8")
    targets = [*LINKS.findall(text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    assert [target for target in targets if not (REPOSITORY / target).exists()] == []


def test_the_readme_is_short_and_its_pictures_are_small_and_ask_nobody():
    text = re.sub(r"<!--.*?-->", "", README.read_text(encoding="utf-8"))  # the marks of a runnable block are not read
    assert len(text.split()) < 900
    shown = {"docs/assets/report-dark.png", "docs/assets/report-light.png"}
    assert set(re.findall(r"docs/assets/[\w.-]+\.(?:svg|png)", text)) == shown
    for drawn in DOCS.glob("assets/*.svg"):
        shown.add(str(drawn.relative_to(REPOSITORY)))
        assert not re.search(r"url\([\"']?http|href=", drawn.read_text(encoding="utf-8")), drawn
    for path in shown:
        assert (REPOSITORY / path).stat().st_size < 300_000, path
