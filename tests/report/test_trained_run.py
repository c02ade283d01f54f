"""The page about a trained run: it reads the files as training writes them."""

import html
import json
import sys

import pytest

from tests.launches import REPOSITORY, run_command
from tests.tiny_runs import write_base, write_rows
from tests.tiny_training import events

_REPORT_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from finetune.cli import main
sys.argv[1:] = ["report", "run", "--no-data"]
main()
"""

pytestmark = pytest.mark.warm


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    pytest.importorskip("vl_convert", reason="the extra [report] is not installed")
    folder = tmp_path_factory.mktemp("trained")
    base, rows = write_base(folder / "base"), write_rows(folder / "rows")
    words = [f"model.path={base}", f"data.path={rows}", f"data.cache_dir={folder / 'cache'}", "output_dir=run"]
    words += ["training.batch_size=6", "training.max_steps=4", "training.log_every=2", "data.on_overlap=warn"]
    words += ["testing.num_samples=2", "testing.max_new_tokens=6", "validation.validate_every=2"]
    done = run_command([sys.executable, "-m", "finetune", "train", *words], cwd=folder)
    assert done.returncode == 0, done.stdout
    done = run_command([sys.executable, "-c", _REPORT_WITHOUT_TORCH], cwd=folder)
    assert done.returncode == 0, done.stdout
    return folder / "run"


@pytest.mark.slow
def test_the_answers_of_the_test_phase_stand_on_the_page(run):
    answers = json.loads((run / "run.json").read_text())["result"]["answers"]
    asked = [json.loads(line)["messages"] for line in (run.parent / "rows" / "test.jsonl").read_text().splitlines()]
    assert [(answer["prompt"], answer["expected"]) for answer in answers] == [
        (question["content"], answer["content"]) for question, answer in asked[:2]
    ]
    page = (run / "report.html").read_text(encoding="utf-8")
    for answer in answers:
        assert answer.keys() == {"prompt", "expected", "base", "tuned"}
        assert f'<p class="prompt"><bdi>{html.escape(answer["prompt"], quote=False)}</bdi>' in page
        assert page.count(f"<dd><bdi>{answer['expected']}</bdi></dd>") >= 1
    assert page.count('<div class="base">') == page.count('<div class="tuned">') == len(answers) == 2

    for name in ("loss", "learning-rate", "grad-norm", "throughput", "host-memory", "data-wait"):
        assert f'id="chart-{name}"' in page
    assert "slowest-rank" not in page  # there was one rank


@pytest.mark.slow
def test_every_key_of_metrics_jsonl_is_documented(run):
    written = events(run)
    assert {event["event"] for event in written} == {"step", "validation", "resources", "checkpoint", "test"}
    text = (REPOSITORY / "docs" / "watching.md").read_text(encoding="utf-8")
    rows = text.split("## `metrics.jsonl`")[1].split("\n## ")[0].splitlines()
    for event in written:
        (row,) = [row for row in rows if row.startswith(f"| `{event['event']}` |")]
        for name in event.keys() - {"event", "step"}:
            assert f"`{name}`" in row, f"docs/watching.md does not describe {name} of a {event['event']} event"


@pytest.mark.slow
def test_run_json_says_what_it_was(run):
    record = json.loads((run / "run.json").read_text())
    digests = {"base", "model_config", "data.train", "data.validation", "data.test", "chat_template", "config"}
    assert record["fingerprints"].keys() == digests
    assert all(len(digest) == 64 for digest in record["fingerprints"].values())
    assert (record["launcher"], record["world_size"], record["status"]) == ("none", 1, "completed")
    assert (record["fallbacks"], record["git_commit"]) == ([], None)  # it was started outside of any repository
    assert record["result"].keys() >= {"step", "best_step", "best_loss", "test_base", "test_tuned", "answers"}
    documented = (REPOSITORY / "docs" / "watching.md").read_text(encoding="utf-8").split("## `run.json`")[1]
    for name in (*record, *record["result"]):
        assert f"`{name}`" in documented, f"docs/watching.md does not describe {name} of run.json"
