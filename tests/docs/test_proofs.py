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


def test_the_pictures_are_small_and_ask_nobody():
    text = README.read_text(encoding="utf-8")
    shown = {"docs/assets/report-dark.png", "docs/assets/report-light.png"}
    assert set(re.findall(r"docs/assets/[\w.-]+\.(?:svg|png)", text)) == shown, (
        "one picture, for a light and a dark screen"
    )
    for page, name, command in (
        ("quickstart", "quickstart", "report runs/quickstart"),
        ("terminal", "commands", "runs"),
    ):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        for background in ("light", "dark"):
            shown.add(f"docs/assets/{name}-{background}.svg")
            drawn = (DOCS / f"assets/{name}-{background}.svg").read_text(encoding="utf-8")
            assert f'"assets/{name}-{background}.svg"' in text
            assert f"finetune {command}" in drawn.replace("&#160;", " ")
            assert not re.search(r"url\([\"']?http|href=", drawn)
    for path in shown:
        assert (REPOSITORY / path).stat().st_size < 300_000, path


def test_the_curve_of_rewards_has_the_points_of_its_table():
    page = (DOCS / "tasks/rewards.md").read_text(encoding="utf-8")
    drawn = (DOCS / "assets/rewards.svg").read_text(encoding="utf-8")
    steps, rewards = (
        [float(cell) for cell in re.findall(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)[0].split(" | ")]
        for name in ("step", "`reward_json_equal`")
    )
    (left, top), (right, bottom) = (56, 20), (616, 196)
    points = [(float(x), float(y)) for x, y in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', drawn)]
    assert [(x - left) / (right - left) * steps[-1] for x, _ in points] == pytest.approx(steps)
    assert [(bottom - y) / (bottom - top) for _, y in points] == pytest.approx(rewards)
