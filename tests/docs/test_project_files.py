"""Container, workflows, hooks and citation agree with the code."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch

import pytest
import yaml

import finetune
from tests.docs.pages import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHECK = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def read_yaml(name: str):
    return yaml.safe_load((REPOSITORY / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_check_on_every_python():
    job = read_yaml(".github/workflows/check.yml")["jobs"]["check"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    prefix = "Programming Language :: Python :: "
    supported = [it.removeprefix(prefix) for it in PROJECT["classifiers"] if it.startswith(f"{prefix}3.")]
    assert job["strategy"]["matrix"]["python"] == supported


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read(path):
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())


def test_what_is_copied_into_the_container_is_there_and_let_through():
    let_through = [
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall("^COPY (.*)$", dockerfile, re.MULTILINE) for word in line.split()[:-1]]
    assert set(copied) == set(let_through)
    assert all((REPOSITORY / name).exists() for name in copied)
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    needed = {*build["targets"]["wheel"]["packages"], *build["targets"]["wheel"]["force-include"], PROJECT["readme"]}
    assert needed <= set(copied)


def test_the_container_can_make_a_report_too():
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    assert '"/opt/finetune[report]"' in dockerfile


def test_the_check_installs_what_no_test_of_the_site_and_the_report_is_skipped_for():
    extras = PROJECT["optional-dependencies"]
    assert "finetune[report]" in extras["test"]
    assert {"finetune[test]", "finetune[docs]", "finetune[tensorboard]"} <= set(extras["test-everything"])
    assert '".[test-everything]"' in CHECK
    assert "mkdocs build --strict" in CHECK
    assert "finetune/py.typed" in CHECK


def test_the_licence_is_the_one_that_is_named():
    text = (REPOSITORY / PROJECT["license-files"][0]).read_text(encoding="utf-8")
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text


def test_the_hooks_are_the_tools_of_the_check():
    hooks = [hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {hook["name"] for hook in hooks} >= {"ruff format", "ruff check", "mypy", "lint-imports"}
    for hook in hooks:
        assert re.search(rf"^{hook['name']}\b", CHECK, re.MULTILINE), f"{hook['name']} is not in .ci/run"


def test_the_development_container_installs_what_the_tests_need():
    container = json.loads((REPOSITORY / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    assert "-c constraints.txt -e '.[test]'" in container["postCreateCommand"]


def test_the_citation_is_of_this_version():
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == finetune.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["title"].startswith(PROJECT["name"])


def test_an_issue_asks_for_what_a_report_needs():
    bug = read_yaml(".github/ISSUE_TEMPLATE/bug.yml")
    asked = {part["id"] for part in bug["body"] if part["type"] != "markdown"}
    assert {"command", "happened", "expected", "doctor", "run"} <= asked


def test_what_the_documentation_needs_is_pinned():
    pinned = {re.split("==", line)[0].lower() for line in (REPOSITORY / "constraints.txt").read_text().splitlines()}
    wanted = [re.split(r"[\[><=]", it)[0] for it in PROJECT["optional-dependencies"]["docs"]]
    assert wanted
    assert all(any(fnmatch(name, it) for name in pinned) for it in wanted)
