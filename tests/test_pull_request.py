"""recipes/github/verdict.yml: what the workflow may do, and its steps run by bash. Only `gh` is another program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launches import REPOSITORY
from tests.warm import programs

FILE = REPOSITORY / "recipes/github/verdict.yml"
NOT_RUN = {"Install"}
"""pip would install a wheel that the reader makes. The tests have finetune already."""
TINY = {
    "Train": "data.max_rows=16 training.batch_size=4 optim.warmup_steps=0 testing.num_samples=0 testing.metrics=[]",
    "Compare with the base": "testing.max_new_tokens=4 testing.general_prompts=none testing.metrics=[]",
}
"""What is added to the commands, so that they take seconds."""
GH = """#!{python} -IS
import json, sys
from pathlib import Path

file, words = Path(__file__).with_name("comments.json"), sys.argv[1:]
comments, endpoint = json.loads(file.read_text()), next((word for word in words if word.startswith("repos/")), "")
if words[:2] == ["pr", "comment"]:
    assert words[2:5] == ["7", "--repo", "me/orders"], words
    body = Path(words[words.index("--body-file") + 1]).read_text()
    comments.append({{"id": 100 + len(comments), "user": {{"login": "github-actions[bot]"}}, "body": body}})
elif "PATCH" in words:
    name, _, value = words[words.index("--field") + 1].partition("=@")
    (comment,) = [each for each in comments if endpoint == f"repos/me/orders/issues/comments/{{each['id']}}"]
    comment[name] = Path(value).read_text()
else:
    assert words == ["api", "--paginate", "--slurp", "repos/me/orders/issues/7/comments"], words
    print(json.dumps([comments[:1], comments[1:]]))  # two pages
file.write_text(json.dumps(comments))
"""
MARK = "<!-- finetune verdict -->\n"


def workflow():
    return yaml.safe_load(FILE.read_text())


def steps():
    return workflow()["jobs"]["verdict"]["steps"]


def test_the_workflow_has_known_keys_pinned_actions_and_few_rights():
    found = workflow()
    assert found.keys() == {"name", True, "permissions", "concurrency", "defaults", "jobs"}, (
        "YAML 1.1 reads `on` as true"
    )
    assert found[True] == {"pull_request": None}, "pull_request_target would run foreign code with a token that writes"
    assert found["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert found["jobs"]["verdict"].keys() == {"runs-on", "timeout-minutes", "env", "steps"}
    assert len(steps()) == 7
    for step in steps():
        assert step.keys() <= {"name", "uses", "with", "run", "if", "env"}
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step.get("uses", f"actions/a@{'0' * 40}"))
        assert "${{" not in step.get("run", ""), "a value of the pull request would become a part of the script"
    assert [step["name"] for step in steps() if "GH_TOKEN" in step.get("env", {})] == ["Comment"]
    assert steps()[0]["with"] == {"persist-credentials": False}
    assert all(f"@{step['uses'].partition('@')[2]} # v" in FILE.read_text() for step in steps() if "uses" in step)


@pytest.fixture
def github(tmp_path):
    """A checkout, and the comments of a pull request: somebody has copied the mark into one."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/gh"
    program.write_text(GH.format(python=sys.executable))
    program.chmod(0o755)
    comments = [{"id": 5, "user": {"login": "somebody"}, "body": f"{MARK}mine"}]
    (tmp_path / "bin/comments.json").write_text(json.dumps(comments))
    return tmp_path


def run_steps(github: Path, name: str, more: str = "") -> tuple[list[str], str]:
    """Run the steps as GitHub does, in a new checkout. Return the steps that failed, and what they printed."""
    checkout = github / name
    checkout.mkdir()
    path = os.pathsep.join([str(github / "bin"), str(programs()), str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    # Variables of the shell alone: the warm interpreter would refuse a command with others than it was started with.
    of_github = {"NUMBER": "7", "GITHUB_REPOSITORY": "me/orders", "GITHUB_STEP_SUMMARY": "summary.md"}
    of_github |= workflow()["jobs"]["verdict"]["env"]
    assigned = "".join(f"{variable}={value}\n" for variable, value in of_github.items())
    failed, output = [], ""
    for step in steps():
        if "run" not in step or step["name"] in NOT_RUN or (failed and "!cancelled()" not in step.get("if", "")):
            continue
        added = f" {TINY[step['name']]}" if step["name"] in TINY else ""
        command = assigned + step["run"].rstrip("\n") + added + (more if step["name"] == "Train" else "")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command],
            cwd=checkout,
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=240,
        )
        output += done.stdout
        failed += [step["name"]] if done.returncode else []
    return failed, output


def comments(github: Path) -> list[str]:
    return [each["body"] for each in json.loads((github / "bin/comments.json").read_text())]


@pytest.mark.slow
@pytest.mark.warm
def test_each_push_edits_one_comment_and_fails_if_the_run_got_worse(github):
    failed, output = run_steps(github, "first", " training.max_steps=4 optim.learning_rate=1e-3")
    assert failed == [], output
    foreign, own = comments(github)
    assert foreign == f"{MARK}mine"
    assert own.startswith(f"{MARK}### Not worse than allowed\n\n`runs/verdict`, 16 rows of the test split")
    assert "| `loss` | " in own
    assert "60 rows" in own
    assert (github / "first/summary.md").read_text() == own.removeprefix(MARK)

    failed, output = run_steps(github, "second", " training.max_steps=2 optim.learning_rate=9")
    assert failed == ["Compare with the base"], output
    foreign, edited = comments(github)
    assert foreign == f"{MARK}mine"
    assert edited.startswith(f"{MARK}### Does not pass")
    assert "- loss does not pass --fail-if-worse (0): worse: +" in edited

    failed, output = run_steps(github, "third", " training.max_steps=none")
    assert failed == ["Train"], output
    assert comments(github)[1:] == [f"{MARK}There is no verdict. The log of this check says why.\n"]
