"""Runs on one file of rows for which no validation split is named."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.cli.overrides import train_from_overrides
from finetune.config import load_config
from finetune.report import sentences
from finetune.runs.recorded_run import RecordedRun
from tests.in_process import run_finetune
from tests.tiny_runs import write_rows
from tests.tiny_training import events, record


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """A file of 48 rows, enough for 8 validation rows."""
    return write_rows(tmp_path_factory.mktemp("own") / "rows", train=48, validation=0, test=0) / "train.jsonl"


def words(rows: Path, folder: Path, *more: str) -> list[str]:
    short = ["training.max_steps=2", "optim.warmup_steps=0", "testing.num_samples=0", "testing.general_prompts=none"]
    return ["model=phi_tiny", f"data={rows}", f"data.cache_dir={rows.parent}", f"output_dir={folder}", *short, *more]


@pytest.mark.slow
@pytest.mark.process
def test_the_run_is_validated_and_compared_with_its_base_and_says_so(rows, tmp_path):
    folder = tmp_path / "run"
    own = tmp_path / "own.jsonl"
    own.write_text(rows.read_text() + '{"messages": [{"role": "assistant", "content": ""}]}\n')
    more = ("validation.validate_every=1", "checkpoint.save_every=1", "data.on_bad_row=drop")
    done = run_finetune("train", *words(own, folder, *more))
    assert done.returncode == 0, done.stdout
    assert "Validation split, 8 rows" in done.stdout
    left_out = f"left out (data.on_bad_row=drop): 1 (expected text to learn; first {own}:49)"
    for read_as in record(folder)["rows_read_as"].values():
        assert read_as[0].endswith(left_out)
    [counts] = record(folder)["row_counts"]["train"]
    assert (counts["file"], counts["rows"], counts["end_of_turn"], counts["repeated"]) == (str(own), 40, 40, 0)
    counted = f"train: {own}: 40 rows, {counts['tokens']:,} tokens, {counts['target_tokens']:,} with loss (answer "
    assert counted in (folder / "log.txt").read_text()
    assert f"validation: {own}: 8 rows, " in (folder / "log.txt").read_text()
    held_out = "8 rows held out to validate, so adapter/ will hold the best step, not the last; data.validation=null"
    assert held_out in (folder / "log.txt").read_text()
    result = record(folder)["result"]
    assert (result["test_split"], result["test_rows"]) == ("validation", 8)
    validated = {event["step"]: event["loss"] for event in events(folder, "validation")}
    assert result["test_tuned"]["loss"] == pytest.approx(validated[result["best_step"]], rel=1e-6)
    assert result["test_base"]["loss"] != result["test_tuned"]["loss"]
    assert sentences.headline([RecordedRun(folder)]).startswith("Loss on the validation split ")
    report = run_finetune("report", str(folder), "--output", str(tmp_path / "report.html"))
    assert report.returncode == 0, report.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<h1>Loss on the validation split " in page
    assert left_out in page
    assert "test split" not in page
    measured = run_finetune("evaluate", folder, "testing.general_prompts=none", "--json", code=0)
    assert "this run has no test split, so its validation split is measured" in measured.errors
    found = json.loads(measured.answer)
    assert (found["split"], found["num_rows"]) == ("validation", 8)
    assert found["tuned"]["loss"] == pytest.approx(result["test_tuned"]["loss"], rel=1e-6)
    asked = ["evaluate", str(folder), "--json", "testing.general_prompts=none"]
    with_test = [f"data.test={rows}", "data.on_overlap=warn"]
    other = json.loads(run_finetune(*asked, "data.max_rows=44", code=0).answer)
    assert (other["split"], other["num_rows"]) == ("validation", 8), "the rows are not those of the run"
    assert json.loads(run_finetune(*asked, *with_test, code=0).answer)["split"] == "test"


@pytest.mark.slow
@pytest.mark.process
def test_evaluate_refuses_before_it_imports_torch(rows, tmp_path):
    folder, data = tmp_path / "run", Path(shutil.copy(rows, tmp_path / "rows.jsonl"))
    train_from_overrides(words(data, folder, "data.validation=null", "training.max_steps=1"))
    data.unlink()
    instead = "Or measure the training rows with --split train."
    script = (
        "import sys\nfrom finetune.cli import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    )
    for options, reason in (
        ([], f"this run has no test split. Give one with data.test=FILE_OR_SPLIT. {instead}"),
        (["--split=validation"], f"no validation split. Give one with data.validation=FILE_OR_SPLIT. {instead}"),
        (["--split=train"], f"data.path is {data}, but there is no such file or folder. Correct the path."),
        (["data=orders", "testing.general_prompts=gone"], "testing.general_prompts is gone, but that file does not"),
    ):
        command = [sys.executable, "-c", script, "evaluate", str(folder), *options]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, "False\n"), ended.stderr
        assert reason in ended.stderr


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_pairs_and_labels_are_compared_with_the_base_too(rows, tmp_path, objective):
    asked = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    label = objective == "kto"
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for number, turns in enumerate(asked):
            question, answer = turns[-2]["content"], turns[-1]["content"]
            pair = {"prompt": question, "chosen": answer, "rejected": "I cannot say."}
            one = {"prompt": question, "completion": answer if number % 2 else "No.", "label": bool(number % 2)}
            file.write(json.dumps(one if label else pair) + "\n")
    folder = tmp_path / "run"
    train_from_overrides(words(path, folder, f"training.objective={objective}", "optim.learning_rate=1e-3"))
    result = record(folder)["result"]
    assert (result["test_split"], result["test_rows"]) == ("validation", 8)
    last = events(folder, "validation")[-1]
    assert result["test_tuned"]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert result["test_tuned"]["reward_accuracy"] == last["reward_accuracy"]
    if objective == "dpo":
        assert result["test_base"]["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert result["test_base"]["loss"] != result["test_tuned"]["loss"]


def test_a_run_that_began_without_validation_resumes_without_it(rows, tmp_path):
    folder = tmp_path / "run"
    train_from_overrides(words(rows, folder, "data.validation=null", "training.max_steps=1", "optim.schedule=constant"))
    again = words(rows, folder, "resume=auto", "optim.schedule=constant")
    config = load_config(again)
    assert (config.data.validation, config.origin("data.validation").partition(":")[0]) == (
        None,
        str(folder / "config.yaml"),
    )
    train_from_overrides(again)
    assert [event["step"] for event in events(folder, "step")] == [1, 2]
    assert not events(folder, "validation")
    refused = run_finetune("train", *again, "data.validation=auto")
    assert refused.returncode == 2
    assert "data.validation: started with null, now auto (command line)" in refused.errors


def test_early_stopping_needs_validation_rows(rows, tmp_path):
    given = words(rows, tmp_path / "run", "early_stopping.patience=2")
    few = run_finetune("train", *given, "data.max_rows=39")
    assert few.returncode == 2, few.stdout
    assert "early_stopping.patience is 2 (command line), but the run has no validation split that could stop it" in (
        few.errors
    )
    assert "data.validation is auto. Set data.validation=5%, or name a file or a split; or remove" in few.errors
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> Path:
    """Conversations that all end with the answer to a tool's result; every fourth one offers no tools."""
    tools = [{"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}]
    path = tmp_path_factory.mktemp("calls") / "calls.jsonl"
    with path.open("w") as file:
        for number in range(40):
            call = {"type": "function", "function": {"name": "track", "arguments": {"parcel": number}}}
            turns = [
                {"role": "user", "content": f"Where is parcel {number}?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": f'{{"place": "Porto {number}"}}'},
                {"role": "assistant", "content": f"In Porto {number}."},
            ]
            row = {"messages": turns} | ({"tools": tools} if number % 4 else {})
            file.write(json.dumps(row) + "\n")
    return path


@pytest.mark.slow
def test_a_run_with_tools_shows_them_in_context_and_offers_them_without_its_data(calls, tmp_path):
    folder = tmp_path / "run"
    few = ["data.chat_template=phi4_mini", "testing.num_samples=1", "testing.max_new_tokens=1"]
    done = run_finetune("train", *words(calls, folder, *few))
    assert done.returncode == 0, done.stdout
    (answer,) = record(folder)["result"]["answers"]
    number = answer["prompt"].removeprefix('{"place": "Porto ').removesuffix('"}')
    assert number.isdecimal(), "the last turn is a tool's result"
    asked, called = answer["context"].splitlines()
    assert asked == f"user: Where is parcel {number}?"
    assert '"name": "track"' in called
    for line in (asked, f"Next: finetune generate {folder} \\\n  'Where is parcel {number}?'"):
        assert line in done.stdout.replace(f"{folder} '", f"{folder} \\\n  '")
    assert run_finetune("report", str(folder), "--output", str(tmp_path / "report.html")).returncode == 0
    assert f'<p class="context"><bdi>{asked}' in (tmp_path / "report.html").read_text()

    calls.rename(tmp_path / "elsewhere.jsonl")
    asking = ["generate", str(folder), "Where is parcel 7?", "--max-new-tokens", "1", "--json"]
    with_tools, without = run_finetune(*asking), run_finetune(*asking, "--tools", "")
    assert with_tools.returncode == 0, with_tools.stdout
    for one in (with_tools, without):
        (said,) = one.errors.splitlines()
        assert said.endswith("1 of 1 answer did not end within 1 token. Ask with a larger --max-new-tokens.")
    lengths = [json.loads(one.answer)["num_prompt_tokens"] for one in (with_tools, without)]
    assert lengths[0] > lengths[1]
