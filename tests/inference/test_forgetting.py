"""What a run forgot: a small model is trained first, and then tuned gently and much too hard."""

import json
import math
import shutil
import time

import pytest

from finetune import launch
from finetune.cli.evaluate import evaluate_command as evaluate
from finetune.errors import DataError
from finetune.inference import forgetting
from finetune.inference.finished_run import find_run, read_finished_run
from finetune.inference.prompts import read_general_prompts
from finetune.report.page import _verdict
from finetune.runs.recorded_run import RecordedRun
from tests.inference.conftest import train

pytestmark = pytest.mark.slow
FEW = "testing.metrics=[]"
SHIPPED = "shipped:general_prompts.jsonl"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Seven general prompts of one's own, in two of the formats that the project reads."""
    file = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    rows = [{"prompt": f"Order {n} pens for Lisbon."} for n in range(6)]
    rows.append({"messages": [{"role": "user", "content": "Good morning."}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prompts):
    """A run of all weights, which gives the base; an adapter that changes it little, and one that ruins it."""
    folder = tmp_path_factory.mktemp("forgetting")
    own = f"testing.general_prompts={prompts}"
    full = train(folder / "full", "training.method=full", "training.max_steps=12", "optim.learning_rate=3e-3", FEW, own)
    shutil.copytree(full / "adapter", base := folder / "base")
    found = {"full": full}
    with pytest.MonkeyPatch.context() as patch:
        for name, rate, limit in (("gentle", "1e-4", 0.0), ("hard", "0.3", math.inf)):
            measure = forgetting.measure_forgetting
            limited = lambda *words, _measure=measure, _limit=limit, **options: _measure(  # noqa: E731
                *words, **{**options, "max_seconds": _limit}
            )
            patch.setattr(forgetting, "measure_forgetting", limited)
            words = [f"model.path={base}", "model.init=pretrained", own, FEW]
            found[name] = train(folder / name, *words, f"optim.learning_rate={rate}")
            patch.undo()
    return found


@pytest.fixture
def forgotten(capsys):
    def measure(run, *words, **options):
        evaluate(run, [*words, FEW, "testing.num_samples=0"], as_json=True, **options)
        return json.loads(capsys.readouterr().out)["forgetting"]

    return measure


def test_a_run_that_forgot_on_purpose_diverges_far_more(runs, forgotten):
    gentle, hard = (forgotten(runs[name]) for name in ("gentle", "hard"))
    assert gentle["num_prompts"] == hard["num_prompts"] == 7
    assert 0 < gentle["divergence"] < 0.1
    assert hard["divergence"] > 1
    assert gentle["base_log_probability"] == pytest.approx(hard["base_log_probability"])
    assert hard["tuned_log_probability"] < gentle["tuned_log_probability"] < 0
    listed = [divergence for _, divergence in hard["most_changed"]]
    assert listed == sorted(listed, reverse=True)
    assert listed[0] > hard["divergence"]
    assert "What it forgot: " in hard["sentence"]


def test_it_does_not_begin_if_one_forward_shows_that_it_takes_too_long(adapter_run, prompts, monkeypatch):
    """A forward of 2 s means at least 6 s for each of two batches, and 10 s are allowed."""
    run, calls = find_run(adapter_run, is_alone=True), []
    monkeypatch.setattr(forgetting, "generate_answers", lambda *_, **__: pytest.fail("it began"))
    with launch(run.config, trains=False) as runtime:
        loaded, forward = read_finished_run(runtime, run), runtime.placement.forward

        def slow(*arguments):
            calls.append(time.sleep(2))
            return forward(*arguments)

        monkeypatch.setattr(runtime.placement, "forward", slow)
        found = forgetting.measure_forgetting(runtime, loaded, str(prompts), max_seconds=10.0)
    assert "a tenth of the run's time is 10 s; `finetune evaluate RUN` measures it" in found.why_not
    assert len(calls) == 1


def test_the_end_of_a_run_reports_it_or_says_what_does(runs):
    gentle, hard = (json.loads((runs[name] / "run.json").read_text())["result"] for name in ("gentle", "hard"))
    assert "a tenth of the run's time is 0 s" in gentle["forgetting"]["why_not"]
    assert "`finetune evaluate " in gentle["forgetting"]["why_not"]
    assert hard["forgetting"]["divergence"] > 1
    assert hard["verdict"]["loss"]["result"] == "worse"
    full = json.loads((runs["full"] / "run.json").read_text())["result"]["forgetting"]
    assert full["why_not"].startswith("every weight was trained")
    sentences = _verdict(RecordedRun(runs["hard"]))
    assert [sentence.partition(":")[0] for sentence in sentences] == [
        *("loss", "Did not end within testing.max_new_tokens", "What it forgot")
    ]


def test_another_run_takes_the_place_of_the_base(runs, forgotten):
    same = forgotten(runs["hard"], against=runs["hard"])
    assert same["divergence"] == 0
    assert same["base_log_probability"] == same["tuned_log_probability"]


def test_prompts_are_left_out_or_refused(runs, forgotten):
    assert forgotten(runs["gentle"], "testing.general_prompts=none") is None
    with pytest.raises(DataError, match=r"testing.general_prompts is gone.jsonl, but that file does not exist"):
        forgotten(runs["gentle"], "testing.general_prompts=gone.jsonl")


def test_sixty_prompts_are_shipped():
    shipped = read_general_prompts(SHIPPED)
    assert len({prompt.shown for prompt in shipped}) == 60
