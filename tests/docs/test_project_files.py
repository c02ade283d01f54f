"""Container, workflows, hooks and citation agree with the code."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
import warnings

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import finetune
from finetune.errors import DISTRIBUTION, SUMMARY
from tests.docs.pages import DOCS, REPOSITORY

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
    jobs = workflow["jobs"].values()
    assert all("timeout-minutes" in job for job in jobs if "steps" in job)
    with_rights = [job for job in jobs if "permissions" in job]
    if path.name != "release.yml":
        assert with_rights == []
        return
    # The one job with a right of its own runs no file of the repository and installs nothing.
    (publish,) = with_rights
    assert (publish["permissions"], publish["environment"]) == ({"id-token": "write"}, "pypi")
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        *("actions/download-artifact", "pypa/gh-action-pypi-publish")
    ]


def test_the_page_for_who_changes_the_code_is_short_and_names_what_is_there():
    text = (REPOSITORY / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    named = [name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name or name.endswith(".md")]
    assert len(named) > 10
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


@pytest.mark.process
def test_a_tag_publishes_what_was_checked_if_it_is_the_version():
    workflow = read_yaml(".github/workflows/release.yml")
    jobs = workflow["jobs"]
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    assert (jobs["publish"]["needs"], jobs["build"]["needs"]) == ("build", "check")
    assert jobs["check"]["uses"] == "./.github/workflows/check.yml"
    assert "workflow_call" in read_yaml(".github/workflows/check.yml")[True]
    tag, wheel = (step["run"] for step in jobs["build"]["steps"] if "run" in step)
    assert wheel.split()[0] == ".ci/wheel"
    assert re.search(r"^ *\.ci/wheel ", CHECK, re.MULTILINE), ".ci/run does not check the wheel in the same way"
    for version, code in ((finetune.__version__, 0), ("0.1.0", 1), (finetune.__version__.replace(".", "x"), 1)):
        tagged = {**os.environ, "GITHUB_REF_NAME": f"v{version}"}
        assert subprocess.run(["bash", "-e", "-c", tag], cwd=REPOSITORY, env=tagged).returncode == code


def test_the_image_runs_as_a_user_without_what_built_it():
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    build, run = re.split("^FROM ", text, flags=re.MULTILINE)[1:]
    assert all(re.match(r"python:3\.\d+-slim-[a-z]+\s", stage) for stage in (build, run)), "an image without a version"
    assert "PIP_NO_CACHE_DIR=1" in build.partition("RUN ")[0]
    assert "pip install" not in run
    assert re.findall("^COPY .*", run, re.MULTILINE) == ["COPY --from=build /opt/venv /opt/venv"]
    commands = re.findall("^(RUN|USER|ENTRYPOINT) (.*)$", run, re.MULTILINE)
    assert [command for command, _ in commands] == ["RUN", "USER", "ENTRYPOINT"]
    user = dict(commands)["USER"]
    assert user.isdigit()
    assert int(user) > 0
    assert re.search(r"^ *hadolint Dockerfile$", CHECK, re.MULTILINE)


def test_what_is_copied_into_the_container_is_there_and_let_through():
    let_through = [
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    ]
    dockerfile = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.findall("^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
    copied = [word for line in lines for word in line.split()[:-1]]
    assert set(copied) == set(let_through)
    assert all((REPOSITORY / name).exists() for name in copied)
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    needed = {*build["targets"]["wheel"]["packages"], *build["targets"]["wheel"]["force-include"], PROJECT["readme"]}
    assert needed <= set(copied)


def test_the_check_installs_what_no_test_of_the_site_and_the_report_is_skipped_for():
    extras = PROJECT["optional-dependencies"]
    assert f"{DISTRIBUTION}[report]" in extras["test"]
    everything = {f"{DISTRIBUTION}[{extra}]" for extra in ("test", "docs", "trackers", "bench", "harness")}
    assert everything <= set(extras["test-everything"])
    assert '".[test-everything]"' in CHECK
    assert "finetune/py.typed" in (REPOSITORY / ".ci/wheel").read_text(encoding="utf-8")


def test_no_page_or_message_installs_the_other_product_of_this_name():
    """On PyPI, `finetune` is another product. `phi-finetune[EXTRA]` adds an extra to a checkout or a wheel.

    Without an extra, nothing can install `phi-finetune` by its name alone until it is on PyPI.
    """
    folders = ("docs", "finetune", "recipes", "configs", "notebooks", "benchmarks", "tools", "tests", ".github", ".ci")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    files += [*REPOSITORY.glob("*.*"), REPOSITORY / "Dockerfile", *(REPOSITORY / ".devcontainer").iterdir()]
    texts = {
        path: path.read_text(encoding="utf-8", errors="replace")
        for path in files
        if path.is_file() and path.suffix not in {".pyc", ".safetensors", ".jsonl"}
    }
    assert len(texts) > 500
    other = re.compile(r"(?<![\w/-])finetune\[(?=[a-z])|(?<!-)\binstall (?:-\S+ )*['\"]?finetune\b(?!-\d)")
    assert {f"{path}: {found[0]}" for path, text in texts.items() for found in other.finditer(text)} == set()
    by_name = re.compile(rf"pip3? install [^\n`]*(?<![\w-]){DISTRIBUTION}(?!\\?\[)")
    assert [str(path) for path, text in texts.items() if by_name.search(text)] == [], "it is not on PyPI"
    named = {found for text in texts.values() for found in re.findall(rf"{DISTRIBUTION}\[([a-z-]+)\]", text)}
    assert named <= PROJECT["optional-dependencies"].keys()
    assert {"report", "harness", "onnx"} <= named


@pytest.mark.parametrize(("summary", "number"), [("UNKNOWN", 1), (PROJECT["description"], 0)])
def test_the_first_import_tells_the_other_product_from_an_older_checkout(tmp_path, monkeypatch, summary, number):
    """Version 0.10.0 of the other product has this metadata: no summary, author or home page."""
    about = tmp_path / "finetune-0.10.0.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(
        f"Metadata-Version: 2.1\nName: finetune\nVersion: 0.10.0\nSummary: {summary}\nHome-page: UNKNOWN\n"
    )
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        finetune._warn_of_other_product()
    assert len(caught) == number
    assert all("is another product called finetune" in str(each.message) for each in caught)


def test_the_hooks_are_the_tools_of_the_check():
    hooks = [hook for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {hook["name"] for hook in hooks} >= {"ruff format", "ruff check", "mypy", "lint-imports"}
    for hook in hooks:
        assert re.search(rf"^ *(nice )?{hook['name']}\b", CHECK, re.MULTILINE), f"{hook['name']} is not in .ci/run"


def test_name_version_and_licence_are_those_of_the_code():
    assert (PROJECT["name"], PROJECT["license"]) == (DISTRIBUTION, "Apache-2.0")
    assert PROJECT["description"].startswith(SUMMARY)
    citation, page = read_yaml("CITATION.cff"), (DOCS / "installing.md").read_text(encoding="utf-8")
    assert {*re.findall(r"(?:is version |phi_finetune-)(\d+\.\d+\.\d+)", page)} == {finetune.__version__}
    assert (citation["version"], citation["license"]) == (finetune.__version__, PROJECT["license"])
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d\S+) - ", changelog, re.MULTILINE)[0] == finetune.__version__
    assert "Apache License" in (REPOSITORY / PROJECT["license-files"][0]).read_text(encoding="utf-8")


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = dict(line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found.items()}


def requirements() -> list[Requirement]:
    """All of pyproject.toml, without the extras' references to each other."""
    asked = [*PROJECT["dependencies"], *(it for extra in PROJECT["optional-dependencies"].values() for it in extra)]
    return [it for it in map(Requirement, asked) if it.name != DISTRIBUTION]


def test_the_ranges_are_of_the_versions_that_were_run():
    page = (DOCS / "installing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| (\d[\w.]*) \| (\d[\w.]*) \|$", page, re.MULTILINE)
    run = {canonicalize_name(name): (Version(oldest), Version(newest)) for name, oldest, newest in rows}
    assert {canonicalize_name(Requirement(it).name) for it in PROJECT["dependencies"]} < run.keys()
    for each in requirements():
        name, pin = canonicalize_name(each.name), pins().get(canonicalize_name(each.name))
        first = [Version(it.version) for it in each.specifier if it.operator == ">="]
        end = [Version(it.version) for it in each.specifier if it.operator == "<"]
        assert len(first) == len(end) == 1, f"{each}: a range has two ends"
        if name in run:
            assert (first[0], end[0]) == (run[name][0], Version(str(run[name][1].major + 1))), each
            assert pin is None or run[name][0] <= Version(pin) <= run[name][1], each
        else:
            assert pin is not None, f"{each}: neither a row of docs/installing.md nor a pin"
            assert first[0].release == Version(pin).release[: len(first[0].release)], each
