import contextlib
import errno
import json
import logging
import math
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors.numpy import load_file, save

import finetune
from finetune.cli.evaluate import _choose_rows
from finetune.cli.evaluate import evaluate_command as evaluate
from finetune.config.compose import load_config
from finetune.config.config_files import resolve_shipped
from finetune.data.splits import digest_row
from finetune.errors import CheckpointError, ConfigError, DataError, RequirementError, RunFailedError
from finetune.inference.evaluation_record import exceeded_margins
from finetune.inference.finished_run import FinishedRun
from finetune.inference.scores import Evaluation, RowValues, Scores
from finetune.report.data_preview import preview_data_of
from finetune.runs.folder import RunFolder
from finetune.runs.record import digest_of
from finetune.runs.recorded_rows import read_row_record
from finetune.runs.recorded_run import RecordedRun
from tests.data.conftest import write_lines
from tests.inference.conftest import NUM_ROWS, train
from tests.launches import run_launched
from tests.tiny_training import events

METRICS = ["json_valid", "token_f1"]


@pytest.fixture
def measured(capsys):
    """Call the command as the command line does; what it wrote to standard output."""

    def measure(*arguments, **options):
        evaluate(*arguments, **options)
        return capsys.readouterr().out

    return measure


@pytest.fixture
def figures(measured):
    return lambda run, *words, **options: json.loads(measured(run, list(words), as_json=True, **options))


@pytest.fixture
def caplog(caplog):
    """What the command logs, which does not propagate to the root logger."""
    logging.getLogger("finetune").addHandler(caplog.handler)
    return caplog


@pytest.fixture(scope="module")
def whole(adapter_run, tmp_path_factory):
    """The figures of the run as it is, and those of `METRICS`; measured once."""
    output = tmp_path_factory.mktemp("whole") / "figures.json"
    evaluate(adapter_run, [], metric=METRICS, output=output)
    return json.loads(output.read_text())


@pytest.mark.slow
def test_a_script_gets_what_the_command_writes(adapter_run, whole):
    found = finetune.evaluate(adapter_run, metrics=METRICS)
    assert {name: score.loss for name, score in found.scores.items()} == {
        name: whole[name]["loss"] for name in ("base", "tuned")
    }
    assert found.scores["tuned"].metrics == {name: whole["tuned"][name] for name in found.scores["tuned"].metrics}
    assert {name: verdict.as_record() for name, verdict in found.verdicts.items()} == whole["verdict"]
    words = finetune.evaluate(
        adapter_run,
        metrics={"words": lambda answer, _: float(len(answer.split()))},
        overrides={"testing.max_new_tokens": 4, "testing.metrics": [], "testing.general_prompts": "none"},
    )
    assert words.scores["tuned"].metrics.keys() == {"words"}
    num_cut = sum(len(row.answers["tuned"]) > 0 for row in words.answers)
    assert words.num_unended["tuned"] == num_cut == len(words.answers), "four tokens end none of these answers"
    assert f"{num_cut} of {num_cut} answers of tuned" in words.unended


def test_names_and_functions_that_a_script_gives_in_another_form(adapter_run, tmp_path):
    with pytest.raises(ConfigError, match=r"metrics or suites has <built-in function len>.*metrics=\{NAME: function\}"):
        finetune.evaluate(tmp_path, metrics=[len])
    with pytest.raises(ConfigError, match="metrics has loss, a name that finetune uses itself"):
        finetune.evaluate(adapter_run, metrics={"loss": lambda *_: 1.0})
    for given in ({"metrics": "exact_matsch"}, {"suites": "jsonn"}):
        name = next(iter(given.values()))
        with pytest.raises(ConfigError, match=f"is {name}"):
            finetune.evaluate(adapter_run, **given)


def own_test_events(run):
    return {event["model"]: event for event in events(run, "test")}


def test_the_figures_are_those_of_the_runs_own_test_phase(whole, adapter_run):
    found = whole
    events = own_test_events(adapter_run)
    assert (found["weights"], found["split"], found["num_rows"]) == ("adapter", "test", NUM_ROWS)
    for name in ("base", "tuned"):
        assert found[name]["loss"] == pytest.approx(events[name]["loss"], rel=1e-6)
        assert found[name]["exact_match"] == events[name]["exact_match"]
        assert found[name]["perplexity"] == pytest.approx(math.exp(found[name]["loss"]))
    assert found["tuned"]["loss"] < found["base"]["loss"]


@pytest.mark.slow
def test_the_batch_size_changes_nothing(figures, whole, adapter_run):
    words = ["testing.batch_size=5", "testing.drop_last=true"]
    found = figures(adapter_run, *words, metric=METRICS)
    assert whole["num_rows"] == found["num_rows"] == NUM_ROWS
    for name in ("base", "tuned"):
        assert found[name].keys() == whole[name].keys() >= {"exact_match", *METRICS}
        assert [found[name][metric] for metric in METRICS] == [whole[name][metric] for metric in METRICS]
        assert found[name]["loss"] == pytest.approx(whole[name]["loss"], rel=1e-6)
        assert found[name]["standard_error"] == pytest.approx(whole[name]["standard_error"], rel=1e-5)


@pytest.fixture(scope="module")
def held_out_run(tmp_path_factory):
    """A run on 32 rows of one file, of which 6 are held out; the file, and its rows by split.

    It was started with relative paths, in another folder than the tests are in.
    """
    folder = tmp_path_factory.mktemp("held_out")
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"code {n}", "completion": f"word {n * 37 % 101}"} for n in range(32)]
    write_lines(file, rows)
    shutil.copytree(resolve_shipped("shipped:phi_tiny"), folder / "models" / "base")
    paths = ["model.path=models/base", "data.path=rows.jsonl", "data.format=auto", "data.max_rows=null", "data.test=6"]
    with contextlib.chdir(folder):
        run = train(folder, *paths, "testing.num_samples=0", "testing.metrics=[]")
    record = read_row_record(RunFolder(run))
    by_split = {name: [row for row in rows if digest_row(row) in found] for name, found in record.splits.items()}
    assert {name: len(found) for name, found in by_split.items()} == {"train": 26, "test": 6}
    return run, file, by_split


def changes_told(found):
    return [found[name] for name in ("num_rows", "trained_rows_left_out", "recorded_rows_missing", "new_rows")]


def edits_of(rows):
    """Changed data by name, and what evaluate tells of it: rows measured, left out, missing, new."""
    train, test = rows["train"], rows["test"]
    everything = [*test, *train]
    return {
        "none": (everything, [6, 0, 0, 0]),
        "another order": (everything[::-1], [6, 0, 0, 0]),
        "a test row less": (everything[1:], [5, 1, 1, 0]),
        "a row more": ([*everything, {"prompt": "code 99", "completion": "word 1"}], [6, 0, 0, 1]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["none", "another order", "a test row less", "a row more"])
def test_rows_that_the_run_was_trained_on_are_left_out(measured, figures, held_out_run, edit, caplog):
    run, file, by_split = held_out_run
    rows, told = edits_of(by_split)[edit]
    before = file.read_text()
    write_lines(file, rows)
    try:
        assert changes_told(figures(run)) == told
        assert ("recorded rows that are missing" in caplog.text) == any(told[2:])
        (page,) = preview_data_of([RecordedRun(run)])
        assert any("the rows have changed since the run" in finding for finding in page.findings) == any(told[2:])
        if any(told[1:]):
            title = measured(run, []).replace("\n", " ")
            assert ("left out, because the run was trained on them: 1" in title) == bool(told[1])
            with pytest.raises(ConfigError, match=f"missing: {told[2]}, new rows: {told[3]}. The run is strict"):
                evaluate(run, ["strict=true"])
        else:
            figures(run, "strict=true")
    finally:
        file.write_text(before)


@pytest.mark.slow
def test_a_training_row_is_recognised_with_another_column_and_in_another_file(
    figures, measured, held_out_run, tmp_path, caplog
):
    run, _, by_split = held_out_run
    other = tmp_path / "other.jsonl"
    write_lines(other, [{**row, "id": n} for n, row in enumerate([*by_split["train"], *by_split["test"]])])
    words = [f"data.path={other}", "data.test=0.9"]
    num_rows, left_out, *compared = changes_told(figures(run, *words))
    assert num_rows + left_out == 29
    assert 3 <= num_rows <= 6, "the six held-out rows, except those that are training rows now"
    assert compared == [None, None], "the command names other data than the run"
    with pytest.raises(ConfigError, match="the test split: wanted 29 rows"):
        evaluate(run, [*words, "strict=true"])
    write_lines(other, by_split["train"])
    with pytest.raises(DataError, match=r"the run was trained on all 9 rows of the test split.* measure the training"):
        evaluate(run, [f"data.path={other}", "data.test=9"])
    # A test file with training rows needs no data.on_overlap: they are left out, and nothing speaks of training.
    write_lines(other, [*by_split["test"], *by_split["train"][:2]])
    caplog.clear()
    for options in ({}, {"against": run}):
        assert changes_told(figures(run, f"data.test={other}", **options))[:2] == [6, 2]
        assert "training rows too" not in caplog.text
        assert "rows that were trained on among them: 2" in caplog.text
    assert "because one of the runs was trained on them: 2" in " ".join(
        measured(run, [f"data.test={other}"], against=run).split()
    )
    # Training rows are measured where they are asked for.
    assert changes_told(figures(run, split="train")) == [26, 0, 0, 0]


def test_a_run_without_a_record_of_its_rule_and_rows_keeps_its_rows(figures, held_out_run, tmp_path, caplog):
    run = shutil.copytree(held_out_run[0], tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "rows.safetensors").unlink()
    (run / "config.yaml").write_text(config.replace("  split_rule: content\n", ""))
    assert figures(run)["recorded_rows_missing"] is None
    assert "the test rows are not those of the run" in caplog.text, "they were chosen by the other rule"
    with pytest.raises(ConfigError, match="The run is strict"):
        evaluate(run, ["strict=true"])
    caplog.clear()
    (run / "config.yaml").write_text(config)
    figures(run, "strict=true")
    (run / "rows.safetensors").write_bytes(b"damaged")
    figures(run)
    assert "rows.safetensors cannot be read" in caplog.text


@pytest.mark.slow
def test_a_run_of_an_earlier_version_keeps_its_rows_also_when_it_resumes(figures, held_out_run, tmp_path, capsys):
    words = [f"data.path={held_out_run[1]}", "data.format=auto", "data.max_rows=null", "data.test=6"]
    words += ["testing.num_samples=0", "testing.metrics=[]"]
    run = train(tmp_path, *words, "data.split_rule=position")
    capsys.readouterr()
    before = json.loads((run / "run.json").read_text())["fingerprints"]
    losses = figures(run)["tuned"]
    # As that version left it.
    (run / "rows.safetensors").unlink()
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("  split_rule: position\n", ""))
    record = json.loads((run / "run.json").read_text())
    del (
        record["resolved_paths"],
        record["started_with"]["config"]["data"]["split_rule"],
        record["started_with"]["sha256"],
    )
    record["started_with"]["sha256"] = digest_of(record["started_with"])
    (run / "run.json").write_text(json.dumps(record))
    assert figures(run, "strict=true")["tuned"] == losses
    train(tmp_path, *words, "resume=auto")
    capsys.readouterr()
    assert json.loads((run / "run.json").read_text())["fingerprints"]["data.test"] == before["data.test"]
    assert load_config([], run=str(run / "config.yaml")).data.split_rule == "position"
    assert changes_told(figures(run, "strict=true")) == [6, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.warm
def test_two_processes_give_the_very_same_figures(figures, adapter_run, tmp_path):
    options = ["--json", "--output", str(tmp_path / "two.json")]
    names = [word for name in METRICS for word in ("--metric", name)]
    words = ["-m", "finetune", "evaluate", str(adapter_run), "testing.batch_size=5", *names, *options]
    done = run_launched("torchrun", words)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('"num_targets"') == 1, "rank 0 alone prints"
    one = tmp_path / "one.json"
    figures(adapter_run, "testing.batch_size=5", metric=METRICS, output=one)
    assert json.loads((tmp_path / "two.json").read_text()) == json.loads(one.read_text())
    assert "world of 2" in done.stdout


def test_results_are_written_only_if_asked_and_over_nothing(figures, adapter_run, tmp_path):
    before = sorted(adapter_run.rglob("*"))
    output = tmp_path / "results.json"
    shown = figures(adapter_run, output=output)
    written = json.loads(output.read_text())
    rows = written.pop("rows")
    assert written == shown
    assert len(rows) == NUM_ROWS
    assert rows[0]["expected"].startswith("{")
    assert sum(row["tuned"]["exact_match"] for row in rows) / NUM_ROWS == shown["tuned"]["exact_match"]
    with pytest.raises(ConfigError, match=r"which exists already and stays as it is"):
        evaluate(adapter_run, [], output=output)
    with pytest.raises(ConfigError, match="there is no folder"):
        evaluate(adapter_run, [], output=tmp_path / "gone" / "results.json")
    assert sorted(adapter_run.rglob("*")) == before


def test_figures_are_shown_also_where_they_cannot_be_written(capsys, adapter_run, tmp_path, monkeypatch):
    words = ["testing.compare_base=false", "testing.metrics=[]", "testing.num_samples=0"]
    monkeypatch.setattr("finetune.runs.durable.replace_file", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(RunFailedError, match=r"results\.json cannot be written: No space left .*ENOSPC"):
        evaluate(adapter_run, words, output=tmp_path / "results.json", as_json=True)
    assert json.loads(capsys.readouterr().out)["num_rows"] == NUM_ROWS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"harness": "a", "metric": ["token_f1"]}, "cannot be given together: --harness measures its own tasks"),
        ({"harness_tasks": Path("tasks")}, "--harness-tasks needs --harness"),
        ({"metrics_from": ["no_such_module"]}, "--metrics-from needs --metric"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, options, reason):
    with pytest.raises(ConfigError, match=reason):
        evaluate(tmp_path, [], **options)


@pytest.mark.parametrize(
    ("words", "are_named"),
    [([], False), (["data.max_length=64"], False), (["data=orders"], True), (["data.test=rows.jsonl"], True)],
)
def test_pairs_are_refused_unless_the_command_names_other_rows(tmp_path, words, are_named):
    folder = RunFolder(tmp_path)
    folder.config_file.write_text(
        "model: {path: owner/phi}\ndata: {path: pairs.jsonl, max_length: 32}\ntraining: {objective: dpo}\n"
    )
    config = load_config(words, run=str(folder.config_file))
    run = FinishedRun(recorded=RecordedRun(tmp_path), config=config, weights=tmp_path, base_model=config.model)
    # As the test split: with data.path alone, a file of few rows has no split to measure, and others only a part.
    advice = "was trained on pairs of answers.*with data.path=FILE data.test=FILE"
    with nullcontext() if are_named else pytest.raises(ConfigError, match=advice):
        _choose_rows(run, None, [], [])


def test_a_metric_of_ones_own_package_is_measured(figures, measured, adapter_run, tmp_path, monkeypatch):
    (tmp_path / "own_scores.py").write_text("def length(answer, expected):\n    return len(answer) - len(expected)\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    words = ["testing.compare_base=false", "testing.metrics=[]"]
    options = {"metric": ["own_scores.length"], "metrics_from": ["own_scores"], "output": tmp_path / "out.json"}
    found = figures(adapter_run, *words, **options)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    lengths = [len(row["tuned"]["answer"]) - len(row["expected"]) for row in rows]
    assert found["tuned"]["own_scores.length"] == pytest.approx(sum(lengths) / NUM_ROWS)
    assert "base" not in found
    assert f"{sum(lengths) / NUM_ROWS:.4f}" in measured(
        adapter_run, words, metric=["own_scores.length"], metrics_from=["own_scores"]
    )
    of_file = figures(adapter_run, *words, metric=[f"{tmp_path / 'own_scores.py'}:length"])
    assert of_file["tuned"] == found["tuned"]


def test_another_split_and_a_checkpoint_are_measured(figures, adapter_run):
    words = ["testing.metrics=[]", "testing.num_samples=0"]
    trained = figures(adapter_run, *words, split="train")
    early = figures(adapter_run, *words, split="train", checkpoint="2")
    assert (trained["split"], early["weights"]) == ("train", "checkpoints/step-000002")
    assert trained["tuned"]["loss"] < early["tuned"]["loss"] < early["base"]["loss"]
    assert trained["base"] == early["base"]


def test_a_split_that_is_not_there_is_told(adapter_run, tmp_path):
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": role, "content": "a"} for role in ("user", "assistant")]}) + "\n")
    words = [f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}"]
    with pytest.raises(ConfigError, match="no test split"):
        evaluate(adapter_run, words)
    with pytest.raises(CheckpointError, match="NOTHERE is not the folder of a run"):
        evaluate(adapter_run, words, against=tmp_path / "NOTHERE")


def test_plain_text_has_a_loss_and_no_answers(figures, adapter_run, tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": f"Two pens for the {split} in Lisbon."}) + "\n")
    words = [f"data.path={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "data.format=text"]
    with pytest.raises(ConfigError, match=r"no answers to measure by exact_match"):
        evaluate(adapter_run, words)
    found = figures(adapter_run, *words, "testing.metrics=[]")
    assert found["num_rows"] == 1
    assert found["tuned"].keys() == {"loss", "standard_error", "perplexity"}
    assert found["tuned"]["standard_error"] == 0.0


def test_without_the_harness_the_pip_command_is_told(adapter_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"pip install 'phi-finetune\[harness\]'"):
        evaluate(adapter_run, [], harness="hellaswag")


@pytest.mark.needs("lm_eval")
@pytest.mark.process
@pytest.mark.warm
def test_the_harness_measures_a_task_of_ones_own(adapter_run, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "Two pens.", "a": "x"}\n{"q": "Three pens.", "a": "y"}\n')
    (tmp_path / "pens.yaml").write_text(
        f"task: pens\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\n"
        "generation_kwargs: {until: ['<|end|>'], max_gen_toks: 8, do_sample: false}\n"
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    words = ["evaluate", adapter_run, "--json", "--harness-tasks", tmp_path, "--harness", "pens"]
    done = subprocess.run([sys.executable, "-m", "finetune", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["harness"]["pens"]["exact_match,none"] == 0.0


@pytest.fixture(scope="module")
def compared(adapter_run, full_run, tmp_path_factory):
    """What evaluate writes of the adapter's run against the run of all weights."""
    output = tmp_path_factory.mktemp("compared") / "figures.json"
    evaluate(adapter_run, [], metric=METRICS, against=full_run, output=output)
    return json.loads(output.read_text())


@pytest.mark.slow
def test_another_run_stands_in_for_the_base(compared, figures, full_run):
    alone = figures(full_run, "testing.compare_base=false", metric=METRICS)
    assert compared["against"] == str(full_run)
    for name in ("loss", "exact_match", *METRICS):
        assert compared["base"][name] == pytest.approx(alone["tuned"][name], rel=1e-6)
        verdict = compared["verdict"][name]
        assert verdict["difference"] == pytest.approx(compared["tuned"][name] - compared["base"][name], abs=1e-6)
        assert verdict["num_better"] + verdict["num_worse"] + verdict["num_equal"] == NUM_ROWS
    assert alone["verdict"] == {}
    assert all({"answer", "token_f1"} <= row["base"].keys() <= row["tuned"].keys() for row in compared["rows"])


@pytest.mark.slow
def test_the_base_of_a_run_of_all_weights_is_loaded_beside_it(figures, whole, full_run):
    found = figures(full_run, "testing.num_samples=0", "testing.metrics=[]")
    assert found["base"]["loss"] == pytest.approx(whole["base"]["loss"], rel=1e-6)
    assert found["against"] is None
    assert found["verdict"]["loss"]["result"] == "better"


@pytest.mark.slow
def test_a_run_of_all_weights_is_measured_without_its_base_if_that_is_gone(figures, full_run, tmp_path):
    run = Path(shutil.copytree(full_run, tmp_path / "run"))
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("shipped:phi_tiny", str(tmp_path / "gone")))
    words = ["testing.num_samples=0", "testing.metrics=[]"]
    assert "base" not in figures(run, *words)
    with pytest.raises(ConfigError, match="wanted the base of the run as well, using the tuned model alone"):
        evaluate(run, [*words, "strict=true"])


@pytest.mark.slow
def test_the_verdict_is_shown_and_decides_the_exit_code(compared, capsys, adapter_run, full_run):
    assert compared["verdict"]["loss"]["result"] in ("better", "worse")
    both = (adapter_run, full_run)
    worse, better = both if compared["verdict"]["loss"]["result"] == "worse" else reversed(both)
    words = ["testing.metrics=[]", "testing.num_samples=0"]
    with pytest.raises(RequirementError, match="loss does not pass --fail-if-worse") as caught:
        evaluate(worse, words, against=better, fail_if_worse=["loss"])
    assert caught.value.exit_code == 3
    shown = capsys.readouterr().out
    assert "loss: worse: +" in shown
    evaluate(worse, words, against=better, fail_if_worse=["loss:10"])
    evaluate(better, words, against=worse, fail_if_worse=["loss"])


@pytest.mark.parametrize(
    ("words", "options", "reason"),
    [
        ([], {"fail_if_worse": ["token_f2"]}, r"expected one of loss, exact_match, .*Measure others with --metric"),
        ([], {"fail_if_worse": ["loss=0.1"]}, "and a margin after a colon, as in exact_match:0.1"),
        ([], {"fail_if_worse": ["loss:-1"]}, "expected a margin of at least 0"),
        ([], {"fail_if_worse": ["loss:much"]}, "expected a margin of at least 0"),
        (
            ["testing.compare_base=false"],
            {"fail_if_worse": ["loss"]},
            "there is no verdict on it, because there is noth",
        ),
        (["parallel.sharding=fsdp2"], {"against": "itself"}, "only one model can be sharded"),
    ],
)
def test_what_cannot_be_judged_is_refused(adapter_run, words, options, reason):
    if "against" in options:
        options = {"against": adapter_run}
    with pytest.raises(ConfigError, match=reason):
        evaluate(adapter_run, [*words, "testing.num_samples=0"], **options)


@pytest.mark.slow
def test_rows_that_either_run_was_trained_on_are_left_out(figures, own_copy, adapter_run):
    path = RunFolder(own_copy).row_file
    arrays = load_file(path)
    figures_of = lambda: figures(  # noqa: E731
        adapter_run, "testing.metrics=[]", "testing.num_samples=0", against=own_copy
    )
    for num_trained in (NUM_ROWS - 2, NUM_ROWS - 1):
        path.write_bytes(save({**arrays, "train": arrays["test"][:num_trained]}))
        if num_trained < NUM_ROWS - 1:
            found = figures_of()
            assert (found["num_rows"], found["trained_rows_left_out"]) == (2, num_trained)
            assert found["verdict"]["loss"]["result"] == "no difference"
        else:
            with pytest.raises(ConfigError, match="at least two different ones are needed"):
                figures_of()


@pytest.mark.slow
def test_copies_of_rows_count_once_in_every_verdict(figures, measured, adapter_run, full_run, tmp_path, capsys):
    turns = [(f"What is {n} plus {n}?", str(2 * n)) for n in range(3)]
    roles = "user", "assistant"
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)]}
        for pair in turns
    ]
    words = [f"data.test={tmp_path / 'test.jsonl'}", "data.on_overlap=warn", "testing.general_prompts=none"]
    words += ["testing.max_new_tokens=4", "testing.num_samples=0"]
    suite = [{"prompt": f"Name {n} colours.", "refused": False} for n in range(3)]

    def verdicts_of(num_copies, num_rows=3, **options):
        for name, of_file in {"test": rows, "asked": suite}.items():
            lines = [json.dumps(row) + "\n" for row in of_file[:num_rows]]
            (tmp_path / f"{name}.jsonl").write_text("".join(lines * (1 + num_copies)))
        found = figures(adapter_run, *words, metric=["token_f1"], suite=[str(tmp_path / "asked.jsonl")], **options)
        return found["verdict"]

    for options in ({}, {"against": full_run}):
        once, often = verdicts_of(0, **options), verdicts_of(3, **options)
        assert list(once) == list(often)
        for name, verdict in often.items():
            assert verdict["sentence"] == f"{once[name]['sentence']}; copies of these rows, which do not count again: 9"
            expected = {**once[name], "num_copies": 9, "sentence": verdict["sentence"]}
            assert verdict == pytest.approx(expected, abs=1e-6)
    assert verdicts_of(11, num_rows=1) == {}
    with pytest.raises(ConfigError, match="It needs at least two different rows"):
        evaluate(adapter_run, [*words, "testing.metrics=[]"], fail_if_worse=["loss"])
    assert "loss: no verdict, because 12 rows are copies of one row" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Without training rows and copies, 1 and 1 are left"):
        evaluate(adapter_run, [*words, "testing.metrics=[]"], against=full_run)


def test_the_rows_that_were_answered_are_kept_for_a_comparison(adapter_run, tmp_path, monkeypatch):
    talks = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}] for text in ("a", "a " * 99, "c")
    ]
    write_lines(tmp_path / "test.jsonl", [{"messages": talk} for talk in talks])
    words = [f"data.test={tmp_path / 'test.jsonl'}", f"data.cache_dir={tmp_path / 'cache'}", "data.max_length=100"]
    words += ["data.on_no_target=warn", "testing.max_new_tokens=1"]
    shown = []
    monkeypatch.setattr("finetune.inference.scores.show_evaluation", lambda found, **__: shown.append(found))
    evaluate(adapter_run, words, metric=["token_f1"])
    assert (shown[0].num_rows, shown[0].answered_rows) == (3, [0, 2])


def test_losses_over_other_tokens_are_not_compared():
    rows = {"tuned": RowValues([1.0, 2.0], [3.0, 3.0], {"token_f1": [0.5, 1.0]})}
    one = Evaluation(num_rows=2, scores={"tuned": Scores(loss=0.5)}, rows=rows, row_digests=["a", "b"], tokens="x")
    other = replace(one, tokens="y")
    assert list(one.against(one, "RUN2").verdicts) == ["token_f1", "loss"]
    against = one.against(other, "RUN2")
    assert list(against.verdicts) == ["token_f1"]
    assert math.isnan(against.base.loss)
    with pytest.raises(ConfigError, match="there is no verdict on it"):
        exceeded_margins(against, {"loss": 0.0})
    with pytest.raises(ConfigError, match="RUN2 cannot be compared on these rows"):
        one.against(replace(one, row_digests=["a", "c"]), "RUN2")
    answered = replace(one, answered_rows=[0])
    with pytest.raises(ConfigError, match=r"no expected answer in 1 of 2 rows.*data\.max_length=N"):
        answered.against(one, "RUN2")
    with pytest.raises(ConfigError, match="no expected answer in 2 of 2 rows"):
        answered.against(replace(one, answered_rows=[1]), "RUN2")
