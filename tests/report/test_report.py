"""The text of the page for all kinds of runs; no text of a run becomes markup or script."""

from __future__ import annotations

import gzip
import json
import math
import re
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from finetune.cli.report import report
from finetune.config.compose import load_config
from finetune.diagnose.preview import preview_data
from finetune.errors import CheckpointError, ConfigError
from finetune.report.curves import MOST_POINTS, Curve, smoothed
from finetune.report.page import setting_rows
from finetune.report.sentences import best_run, headline, second_line
from finetune.runs.comparison import compare_runs
from finetune.runs.file_lock import file_lock
from finetune.runs.folder import RunFolder
from finetune.runs.metrics import MetricsWriter
from finetune.runs.recorded_run import open_runs
from finetune.runs.rollouts import write_rollout
from tests.replay.scene import edit_json, edit_lines
from tests.report.runs import HOSTILE, Parsed, loss_at, write_run
from tests.tiny import tiny_tokenizer
from tests.tiny_runs import random_model_words, write_rows
from tests.tiny_training import events

ELEMENTS = {
    "html", "head", "meta", "title", "link", "style", "body", "main", "header", "p", "h1", "h2", "h3", "bdi", "span",
    "b", "i", "dl", "dt", "dd", "div", "section", "noscript", "figure", "figcaption", "button", "table", "thead",
    "small", "tbody", "tr", "th", "td", "code", "details", "summary", "ul", "li", "article", "pre", "mark",
    "script", "label", "input",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _needs_the_extra() -> None:
    pytest.importorskip("vl_convert", reason="the extra [report] is not installed")


def page_of(*folders: Path, data: bool = False) -> Parsed:
    output = folders[0].parent / "page.html"
    report(folders, output=output, data=data)
    return Parsed(output.read_text(encoding="utf-8"))


def charts_of(page: Parsed, folder: Path) -> dict:
    text = (folder.parent / "page.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert found
    return {chart["name"]: chart for chart in json.loads(found[1])}


def headline_of(*folders: Path) -> str:
    return headline(open_runs(folders))


def test_the_headline_says_the_result(tmp_path):
    assert headline_of(write_run(tmp_path / "a")) == (
        "87.5 % of its answers on the test split are exactly right. The base model: 12.5 %."
    )
    failed = write_run(
        tmp_path / "b", num_steps=7, status="failed", result={"error": "RunFailedError: the loss is NaN"}
    )
    assert headline_of(failed) == "It failed at step 7: training loss fell from 4.25 to 0.8214."
    assert second_line(open_runs([failed])) == "RunFailedError: the loss is NaN"
    killed = write_run(tmp_path / "c", num_steps=3, status=None)
    assert headline_of(killed).startswith("It ended without recording how: training loss fell from 4.25 to 1.583 in 3")
    assert [run.state for run in open_runs([killed])] == ["stopped"]
    with file_lock(RunFolder(killed).lock_file, waiting_for="the test"):
        assert headline_of(killed).startswith("It has not ended: training loss fell from 4.25 to 1.583 in 3")
    assert headline_of(write_run(tmp_path / "d", num_steps=0, status="stopped")).endswith("before its first step.")


def test_a_test_loss_that_leaves_rows_out_says_so(tmp_path):
    run = write_run(tmp_path / "a", result={"test_rows": 5, "test_rows_left_out": 1})
    (run / "metrics.jsonl").unlink()
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        for model, loss in (("base", 3.5), ("tuned", 0.5)):
            metrics.write("test", model=model, exact_match=None, json_valid=None, loss=loss)
    expected = "Loss on the test split fell from 3.5 to 0.5, from base to tuned model, over 4 of 5 rows."
    assert headline_of(run) == expected


@pytest.mark.slow
@pytest.mark.process
def test_the_table_of_scores_says_over_how_many_rows_a_loss_is(tmp_path):
    run = write_run(tmp_path / "a", result={"test_rows": 5, "test_rows_left_out": 1})
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        for model, loss in (("base", 3.5), ("tuned", 0.5)):
            metrics.write("test", model=model, exact_match=0.5, json_valid=None, loss=loss)
    assert "loss, nats per target token, over 4 of 5 rows" in page_of(run).text


@pytest.mark.slow
@pytest.mark.process
def test_what_was_asked_for_and_not_given_stands_above_the_curves(tmp_path):
    fallback = {"what": "training.device", "wanted": "cuda", "used": "cpu", "why": "this process sees 0 CUDA devices"}
    text = page_of(write_run(tmp_path / "run", fallbacks=[fallback])).text
    assert text.count("cuda was wanted, cpu was used: this process sees 0 CUDA devices") == 1
    assert text.index("cuda was wanted") < text.index("keys differ from their defaults") < text.index("How it ran")
    assert "Nothing fell back" not in text


@pytest.mark.process
def test_metrics_that_cannot_be_read_are_told(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be read: it is a folder, and only regular files"):
        open_runs([run])


@pytest.mark.slow
def test_of_several_runs_it_names_the_best_and_what_differs(tmp_path):
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", ["optim.learning_rate=1e-3"], factor=0.5)
    runs = open_runs([first, second])
    assert best_run(runs) is runs[1]
    page = page_of(first, second)
    assert [attributes.get("class") for tag, attributes in page.elements if tag == "tr"][:3] == [None, None, "best"]
    assert re.search(r"second\s*completed\s*60\s*0\.2083", page.text)
    assert headline(runs) == "second has the lowest validation loss: 0.2083. The next best has 0.4167."
    assert second_line(runs) == "Their settings differ in optim.learning_rate."
    settings = [(row.name, row.texts()) for row in compare_runs(runs) if row.part != "result"]
    assert settings == [("optim.learning_rate", ["0.0002", "0.001"])]
    other = write_run(tmp_path / "other", digest="other rows", factor=0.1)
    assert "different rows" in second_line(open_runs([first, other]))
    assert headline_of(first, other) == "2 runs side by side."


@pytest.mark.slow
def test_three_runs_with_other_settings_are_shown_as_parallel_coordinates(tmp_path):
    made = [
        write_run(tmp_path / name, [f"optim.learning_rate={rate}", f"lora.r={r}", f"optim.schedule={schedule}"],
                  factor=factor)
        for name, rate, r, schedule, factor in (
            ("a", "1e-5", 8, "cosine", 1.0), ("b", "1e-3", 32, "linear", 0.5), ("c", "1e-4", 16, "cosine", 2.0)
        )
    ]  # fmt: skip
    page = page_of(*made)
    chart = charts_of(page, made[0])["parallel"]
    heights = {}
    for point in chart["points"]:
        if "label" not in point:
            heights.setdefault(point["axis"], []).append(round(point["height"], 3))
    assert heights == {
        "lora.r": [0, 1, round(1 / 3, 3)],
        "optim.learning_rate": [0, 1, 0.5],
        "optim.schedule": [0, 1, 0],
        "validation loss": [round(1 / 3, 3), 0, 1],
    }, "the learning rates span more than a factor of 50, so their axis is logarithmic"
    widths = {point["run"]: point["width"] for point in chart["points"] if "label" not in point}
    assert max(widths, key=widths.get) == 1, "the best one is bold"
    assert "parallel" not in charts_of(page_of(*made[:2]), made[0])
    other = write_run(tmp_path / "other", ["lora.r=4"], digest="other rows")
    assert "parallel" not in charts_of(page_of(*made, other), made[0]), "their losses cannot be compared"


def test_runs_are_compared_by_the_metric_that_chooses_their_weights(tmp_path):
    words = ["validation.metrics=exact_match", "checkpoint.best_metric=exact_match"]
    made = [write_run(tmp_path / name, words, factor=factor) for name, factor in (("a", 0.5), ("b", 1.0))]
    for run, value in zip(made, (0.25, 0.75), strict=True):
        with MetricsWriter(run / "metrics.jsonl") as metrics:
            metrics.write("validation", step=60, epoch=0, loss=0.3, exact_match=value, num_targets=9)
    assert headline_of(*made) == "b has the highest exact_match in validations: 0.75. The next best has 0.25."
    words = ["validation.by=language", "checkpoint.best_metric=loss/fr"]
    made = [write_run(tmp_path / name, words, factor=factor) for name, factor in (("c", 0.5), ("d", 1.0))]
    for run, value in zip(made, (0.75, 0.25), strict=True):
        with MetricsWriter(run / "metrics.jsonl") as metrics:
            metrics.write("validation", step=60, epoch=0, loss=0.3, **{"loss/fr": value}, num_targets=9)
    assert headline_of(*made) == "d has the lowest loss/fr in validations: 0.25. The next best has 0.75."


def test_of_runs_that_minimise_different_losses_none_is_the_best(tmp_path):
    dpo = ["training.objective=dpo"]
    runs = {"sft": [], "dpo": dpo, "softer": [*dpo, "preference.beta=0.5"]}
    made = {name: write_run(tmp_path / name, more, factor=0.5) for name, more in runs.items()}
    for others, named in (("sft", "dpo and sft"), ("softer", "dpo with other settings")):
        compared = open_runs([made["dpo"], made[others]])
        assert headline(compared) == "2 runs side by side."
        assert second_line(compared) == f"They minimise different losses ({named}), which cannot be compared."
        assert best_run(compared) is None


def test_settings_are_compared_with_the_schema(tmp_path):
    (run,) = open_runs([write_run(tmp_path / "a", ["model.path=x", "data.path=y", "optim.args={betas: [0.9, 0.95]}"])])
    changed = {row.key: (row.value, row.default) for row in setting_rows(run)}
    assert changed.pop("output_dir")[0] == str(tmp_path / "a")
    assert changed == {
        "model.path": ("x", "null"),
        "data.path": ("y", "null"),
        "optim.args": ('{"betas": [0.9, 0.95]}', "{}"),
    }
    assert all(row.meaning for row in setting_rows(run))
    config = run.folder.path / "config.yaml"
    config.write_text(config.read_text().replace("  save_total_limit: 2", "  keep: 7"))
    (run,) = open_runs([run.folder.path])
    assert ("checkpoint.save_total_limit", "7", "2") in [row[:3] for row in setting_rows(run)], "its older name"


@pytest.mark.slow
def test_the_points_are_those_of_metrics_jsonl(tmp_path):
    folder = write_run(tmp_path / "a")
    edit_json(folder / "run.json", profile={"summary": "profile of step 3: 100 % attention"})
    charts = charts_of(page_of(folder), folder)
    loss = charts["loss"]
    raw = [(p["step"], p["value"]) for p in loss["points"] if p.get("raw")]
    assert raw == [(step, float(f"{loss_at(step):.6g}")) for step in range(1, 61)]
    measured = [(p["step"], p["value"], p["low"], p["high"]) for p in loss["points"] if p.get("measured")]
    assert measured == [(s, *(float(f"{loss_at(s) + d:.6g}") for d in (0.1, 0.08, 0.12))) for s in (20, 40, 60)]
    assert {"learning-rate", "grad-norm", "throughput"} <= charts.keys()
    assert "host-memory" not in charts  # the run has no such events
    assert "profile of step 3: 100 % attention" in (folder.parent / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_memory_is_drawn_where_it_was_recorded(tmp_path):
    folder = write_run(tmp_path / "a", num_steps=5)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (2, 4):
            event = {"event": "resources", "step": step, "host_memory": step * 2**30, "data_wait_share": 0.25}
            file.write(json.dumps(event) + "\n")
    charts = charts_of(page_of(folder), folder)
    assert [(p["step"], p["value"]) for p in charts["host-memory"]["points"]] == [(2, 2.0), (4, 4.0)]
    assert [p["value"] for p in charts["data-wait"]["points"]] == [25.0, 25.0]
    assert "device-memory" not in charts
    assert [steps_on_axis(charts[name]) for name in ("loss", "host-memory", "data-wait")] == [[1, 5], [2, 4], [2, 4]]


def steps_on_axis(chart: dict) -> list[int]:
    """The first and the last, in the compiled specification; what differs in points alone is compiled once."""
    (scale,) = [scale for scale in chart["specifications"]["linear"]["scales"] if scale["name"] == "x"]
    return scale["domain"]


@pytest.mark.process
def test_a_run_on_pairs_says_so_and_shows_its_rewards(tmp_path):
    folder = write_run(tmp_path / "a", num_steps=5)
    assert charts_of(page_of(folder), folder)["loss"]["unit"] == "nats per target token"

    def rewarded(events):
        steps = [event for event in events if event["event"] == "step"]
        return [{**event, "reward_margin": event["step"] / 4, "reward_accuracy": 0.5} for event in steps]

    edit_lines(folder / "metrics.jsonl", rewarded)
    charts = charts_of(page_of(folder), folder)
    assert charts["loss"]["unit"] == "nats per pair"
    assert [(p["step"], p["value"]) for p in charts["reward-margin"]["points"]] == [(n, n / 4) for n in range(1, 6)]
    assert {point["value"] for point in charts["reward-accuracy"]["points"]} == {0.5}


def test_long_curves_keep_their_extremes_and_smoothing_does_not_lag():
    points = [(step, 1.0) for step in range(50_000)]
    points[31_415] = (31_415, 99.0)
    points[27_182] = (27_182, -99.0)
    drawn = Curve(name="", run=0, hue=0, points=points).drawn()
    assert len(drawn) <= MOST_POINTS
    assert {(31_415, 99.0), (27_182, -99.0)} <= set(drawn)
    assert drawn == sorted(drawn)
    line = [(step, 3.0 * step) for step in range(200)]
    assert all(math.isclose(a[1], b[1], abs_tol=1e-9) for a, b in zip(smoothed(line), line, strict=True))


@pytest.mark.process
def test_torn_missing_and_strange_files_are_no_error(tmp_path):
    folder = write_run(tmp_path / "a", num_steps=4, status=None)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        metrics.write(
            "step", step=5, epoch=0, loss=float("nan"), learning_rate=0.1, grad_norm=float("inf"), num_targets=1,
            num_tokens=1, num_computed=1, tokens_per_second=1.0,
        )  # fmt: skip
    strange = ['{"event": "step", "step": "6", "loss": []}', '{"event": "test", "model": {}}', "[1]", "\x00"]
    strange.append('{"event": 3}')
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join([*strange, '{"event": "st']))
    page = page_of(folder)
    assert "4 of 11 lines are half-written and left out" in page.text
    assert "Not drawn, because the value is not finite: step 5." in page.text
    odd = '{"status": ["odd"], "versions": 3, "starts": [1], "fallbacks": [1], "result": 1}'
    (folder / "run.json").write_text(odd[:-1])
    (folder / "config.yaml").write_text("a: [\n")
    assert "run.json is half-written" in page_of(folder).text
    (folder / "run.json").write_text(odd)
    assert "a unknown" in page_of(folder).text
    for name in ("run.json", "metrics.jsonl"):
        (folder / name).unlink()
    page = page_of(folder)
    assert "run.json is missing; metrics.jsonl is missing" in page.text
    assert "figure" not in {tag for tag, _ in page.elements}


@pytest.mark.process
def test_nothing_in_a_run_becomes_a_part_of_the_page(tmp_path):
    name = HOSTILE.replace("/", "⁄")[:120]
    folder = write_run(
        tmp_path / name,
        [f"model.path={json.dumps(HOSTILE)}", f"data.path={json.dumps(HOSTILE)}"],
        status="failed",
        result={"error": HOSTILE, "answers": [dict.fromkeys(("prompt", "expected", "base", "tuned"), HOSTILE)]},
        fallbacks=[dict.fromkeys(("what", "wanted", "used", "why"), HOSTILE)],
    )
    record = {"versions": {HOSTILE: HOSTILE}, "status": HOSTILE, "resume_changes": [{HOSTILE: HOSTILE}]}
    record |= {"launcher": HOSTILE, "global_batch": {HOSTILE: HOSTILE}, "fingerprints": {HOSTILE: HOSTILE}}
    edit_json(folder / "run.json", **record, profile={"summary": HOSTILE})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "warning", "step": 3, "text": HOSTILE + "\u202e\x1b[31m\ud800"}) + "\n")
        file.write(json.dumps({"event": "test", "model": HOSTILE, "loss": HOSTILE}) + "\n")
    for page in (page_of(folder, data=True), page_of(folder, write_run(tmp_path / "b"))):
        assert {tag for tag, _ in page.elements} <= ELEMENTS
        assert sum(tag == "script" for tag, _ in page.elements) == 3
        assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
        assert not [1 for _, attributes in page.elements if "src" in attributes]
        assert "window.hacked=1" in page.text
        assert "<U+202E><U+001B>[31m<U+D800>" in page.text
        assert "{{ 7777*7777 }}" in page.text
        assert str(7777 * 7777) not in page.text
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy


@pytest.mark.process
def test_a_row_is_shown_as_preview_shows_it(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    rows = write_rows(tmp_path / "rows")
    first = json.loads((rows / "train.jsonl").read_text().splitlines()[0])["messages"]
    words = [*random_model_words(tokenizer), f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}"]
    folder = write_run(tmp_path / "a", words)
    page = page_of(folder, data=True)
    assert "".join(turn["content"] for turn in first[:1]) in page.text
    preview = preview_data(load_config(words), num_rows=1)
    assert f"{preview.rows[0].num_tokens:,} tokens, {preview.rows[0].num_targets:,} carry loss" in page.text
    assert sum(tag == "mark" for tag, _ in page.elements) >= 2  # the sample, and the answer
    (rows / "train.jsonl").unlink()
    assert "The data could not be read again" in page_of(folder, data=True).text


@pytest.mark.process
def test_answers_of_both_models_stand_side_by_side(tmp_path):
    answers = [{"prompt": "Three crates?", "expected": "3", "base": "crates crates", "tuned": "3"}]
    unended = {"sentence": "Did not end within testing.max_new_tokens: 1 of 1 answer of base."}
    ended = {"reason": "stopped", "sentence": "training ended after step 4 of 6: a callback did."}
    text = page_of(
        write_run(tmp_path / "a", result={"answers": answers, "unended": unended, "ended_early": ended})
    ).text
    found = ("Three crates?", "crates crates", "1 of 1 answer of base", "after step 4 of 6")
    assert [text.count(words) for words in found] == [1, 1, 1, 1]
    assert re.search(r"valid JSON\s*50 %\s*100 %", text)


@pytest.mark.process
def test_no_number_stands_twice_on_the_page(tmp_path):
    """A page says the score once, and in the headline of a run without test rows the validation loss."""
    tested, untested = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    kept = [json.dumps(event) for event in events(untested) if event["event"] != "test"]
    (untested / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    text = page_of(tested).text
    assert {value: text.count(value) for value in ("87.5 %", "12.5 %", "0.4167", "0.3167")} == {
        **{"87.5 %": 1, "12.5 %": 1},
        **{"0.4167": 1, "0.3167": 1},
    }
    text = page_of(untested).text
    assert "Validation loss fell from 0.55 to 0.4167 in 60 steps" in text
    assert [text.count(value) for value in ("0.4167", "0.55")] == [1, 1]


def test_the_headline_of_a_run_on_rewards_says_how_they_changed(tmp_path):
    run = write_run(tmp_path / "a", ["training.objective=grpo"], num_steps=2, status="failed")
    steps = [event | {"reward": event["step"] / 4} for event in events(run)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in steps))
    assert headline(open_runs([run])) == "It failed at step 2: training reward rose from 0.25 to 0.5."


@pytest.mark.process
def test_rollouts_show_their_best_and_worst_answers(tmp_path):
    run = write_run(tmp_path / "a", ["training.objective=grpo"], num_steps=9)
    for step in range(1, 10):
        answers = [
            {
                "ids": [5],
                "text": f"answer {n} of {step} {HOSTILE}",
                "rewards": {"solves": n, "other": None},
                "advantage": n,
            }
            for n in range(3)
        ]
        answers[2] |= {"texts": [answers[2]["text"], f"result {HOSTILE}"]}
        write_rollout(RunFolder(run), {"step": step, "groups": [{"text": f"prompt of {step}", "answers": answers}]})
    RunFolder(run).rollout(9).write_bytes(b"torn")
    page = page_of(run)
    assert re.findall(r"(?:prompt|answer \d) of \d", page.text) == [
        *("prompt of 1", "answer 2 of 1", "answer 0 of 1"),
        *("prompt of 5", "answer 2 of 5", "answer 0 of 5"),
    ]
    assert "best: solves 2, other none" in page.text
    assert [attributes.get("class") for tag, attributes in page.elements if tag == "bdi"].count("read") == 2
    RunFolder(run).rollout(9).write_bytes(gzip.compress(b"[1]"))
    assert page_of(run).text == page.text
    assert "img" not in {tag for tag, _ in page.elements}, "what the model wrote stays text"


@pytest.mark.process
def test_what_is_no_run_is_refused_and_nothing_of_others_is_replaced(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        report([tmp_path / "empty"])
    folder = write_run(tmp_path / "a", num_steps=2)
    with pytest.raises(CheckpointError, match="named twice"):
        report([folder, tmp_path / "a" / ".." / "a"])
    runs = open_runs([folder, write_run(tmp_path / "other" / "a", num_steps=1)])
    assert [run.name for run in runs] == [f"{tmp_path.name}/a", "other/a"]
    mine = tmp_path / "mine.html"
    mine.write_text("<!doctype html>")
    with pytest.raises(ConfigError, match="was not written by finetune report"):
        report([folder], output=mine)
    assert mine.read_text() == "<!doctype html>"
    with pytest.raises(ConfigError, match=r"--output is .*, but there is no folder .*/no"):
        report([folder], output=tmp_path / "no" / "folder.html", data=False)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    report([folder], data=False)
    report([folder], data=False)  # its own page may be replaced
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.pop("report.html")
    assert after == before
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(ConfigError, match=r"pip install 'phi-finetune\[report\]'"):
        report([folder])


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce the limit of address space")
def test_without_address_space_for_v8_the_page_has_no_curves_and_says_so(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = psutil.Process().memory_info().vms + (4 << 30)  # the child inherits the limit
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        page = page_of(write_run(tmp_path / "a", num_steps=59))  # charts that no page of this process has had yet
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert "The curves are not drawn: the process that draws them" in page.text
    assert "The curves are not drawn" in capsys.readouterr().err
    assert "exactly right" in page.text
    assert charts_of(page, tmp_path / "a") == {}


@pytest.mark.process
def test_the_library_is_imported_by_this_command_alone():
    code = "import sys, finetune.cli.commands, finetune.report.page as page; page.require_libraries()"
    check = "; sys.exit(bool({'vl_convert', 'jinja2', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code + check]).returncode == 0
