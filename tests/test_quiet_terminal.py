"""What a person sees on a terminal of 80 columns: every command, nothing cut, nothing that hides."""

from __future__ import annotations

import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import typer.main

from finetune.cli.commands import app
from tests.docs.pages import DOCS
from tests.export.finished_runs import write_run as write_finished_run
from tests.runs.made_runs import write_run
from tests.runs.screens import FINETUNE, Screen
from tests.terminals import run_on_terminal
from tests.tiny_runs import write_base, write_rows

sys.path.insert(0, str(DOCS / "generate"))
from commands import all_commands

COMMANDS = dict(all_commands(typer.main.get_command(app), "finetune"))
NAME = "sweeps/november/phi-mini-lora-rank-16-rate-3e-4-seed-1"
"""As long as names of runs become."""
LOG_LINE = re.compile(r"\[RANK \d|\d\d:\d\d:\d\d|\b(INFO|WARNING|ERROR)\b|\bfinetune\.\w+\.\w+:")
MOST_SUMMARY_LINES = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base, rows, and runs: two without weights, one whose adapter can be used."""
    folder = tmp_path_factory.mktemp("place")
    write_base(folder / "base")
    write_rows(folder / "rows")
    for seed in (1, 2):
        run = folder / "runs" / NAME.replace("seed-1", f"seed-{seed}")
        write_run(run, f"seed={seed}", "model.path=microsoft/Phi-4-mini-instruct", "data.path=support/chats.jsonl")
    (folder / "finished").mkdir()
    write_finished_run(folder / "finished/run", words=(f"data.path={folder / 'rows'}", "testing.max_new_tokens=4"))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def training_words(output_dir):
    return [
        *("model.path=base", "data.path=rows", "data.cache_dir=cache", f"output_dir={output_dir}", "resume=auto"),
        *("data.on_overlap=warn", "training.max_steps=4", "training.batch_size=6", "training.precision=fp32"),
        *("training.device=cpu", "testing.max_new_tokens=4", "testing.general_prompts=none", "optim.warmup_steps=9"),
    ]


RUN, OTHER = f"runs/{NAME}", f"runs/{NAME.replace('seed-1', 'seed-2')}"
SHOWN = {
    "help": (["help", "lora.target_modules"], ["lora.target_modules=VALUE", "all-linear: all except the head"]),
    "runs": (["runs"], [NAME, "completed", "3/3", "2.0000", "microsoft/Phi-4-mini-instruct", "support/chats.jsonl"]),
    "diff": (["diff", RUN, OTHER], [RUN, OTHER, "seed"]),
    "bisect": (["bisect", RUN, OTHER], ["are equal", RUN, OTHER]),
    "checkpoints": (["checkpoints", RUN], ["No checkpoint was saved yet"]),
    "watch": (["watch", RUN], ["3/3 · epoch 1", "learning rate 1.00e-04", Path(NAME).name]),
    "config show": (["config", "show", "quickstart", f"output_dir={RUN}"], [RUN, "configs/quickstart.yaml:14"]),
    "config list": (["config", "list"], ["finetune_preferences", "phi4_reasoning", "begins with a system prompt"]),
    "init": (
        ["init", "data=rows", "output_dir=runs/new", "--file", "new.yaml"],
        ["begins with a system prompt", "new.yaml"],
    ),
    "recipes": (["recipes"], ["finetune_preferences", "torch.multiprocessing."]),
    "doctor": (["doctor", *training_words(RUN)], [f"/{RUN}", "read from the environment", "0 problems"]),
    "preview": (
        ["preview", *training_words(RUN)],
        ["tokens of a row", "rows/train.jsonl:3", "the model's context is 128"],
    ),
    "plan": (["plan", *training_words(RUN)], ["global batch: 6 rows", "gradient checkpointing (off)"]),
    "sweep": (["sweep", *training_words(f"runs/{NAME}-ranks"), "lora.r=2,3"], ["trial-001", "trial-002", "complete"]),
    "report": (["report", RUN, "--no-data"], [f"{RUN}/report.html"]),
    "generate": (["generate", "finished/run", "hello", "--compare", "--max-new-tokens", "3"], ["base", "tuned"]),
    "chat": (["chat", "finished/run", "--max-new-tokens", "2"], ["/help lists commands; Ctrl-D leaves."]),
    "evaluate": (["evaluate", "finished/run"], ["loss (nats per target token)", "perplexity", "base", "tuned"]),
    "receipt": (["receipt", "finished/run"], ["finished/run has no receipt: its state is unknown"]),
    "push": (
        ["push", "finished/run", "someone/model", "--base", "someone/base", "--dry-run"],
        ["HF_TOKEN"],
    ),
    "merge": (["merge", "finished/run", "merged"], ["Reloaded by transformers alone", "finetune export gguf merged"]),
    "verify": (["verify", "finished/run", "--out", "certificate.json"], ["7 of 7", "Written: certificate.json"]),
    "upgrade": (
        ["upgrade", "finished/run", "--python", "no/such/python"],
        ["--python is no/such/python, which cannot be started"],
    ),
    "export ollama": (
        ["export", "ollama", "merged"],
        ["Written to merged-ollama: Modelfile", "ollama create my-model -f Modelfile"],
    ),
}
"""Words of each command, and values that must be whole."""
STARTS_PROCESSES = dict.fromkeys(("sweep", "merge", "export ollama"), (pytest.mark.warm, pytest.mark.process))
CODES = {"diff": 1, "push": 2, "upgrade": 2, "receipt": 2}
"""There are differences; there is no token for the hub, no other Python, and no run.json."""
CONVERTED = {f"export {name}" for name in ("gguf", "lora", "onnx", "vllm", "smallest", "text")}
ELSEWHERE = {"train", "rehearse", "recipes copy", "config schema"} | CONVERTED
"""Training has a test of its own, below, a rehearsal in tests/diagnose, and a converted model in tests/export. The
others write a path, and JSON."""


def test_every_command_is_tried():
    groups = {"", "config", "export"}
    assert {path.removeprefix("finetune").strip() for path in COMMANDS} == {*SHOWN, *ELSEWHERE} | groups


@pytest.mark.few(3)
@pytest.mark.parametrize("command", [pytest.param(name, marks=STARTS_PROCESSES.get(name, ())) for name in SHOWN])
def test_a_command_fits_its_terminal_and_cuts_nothing(command, here):
    columns = 80
    words, whole = SHOWN[command]
    if command == "export ollama" and not Path("merged").is_dir():
        run_on_terminal(columns, *SHOWN["merge"][0])
    if command in ("export ollama", "merge"):
        shutil.rmtree("merged-ollama" if command == "export ollama" else words[-1], ignore_errors=True)
    keys = {"chat": b"\x04", "init": b"base\n"}.get(command, b"")
    Path("new.yaml").unlink(missing_ok=True)
    done = run_on_terminal(columns, *words, keys=keys)
    assert done.returncode == CODES.get(command, 0), done.raw
    done.assert_fits()
    done.assert_readable()
    for value in whole:
        assert value in done.words, done.raw
    assert not LOG_LINE.search(done.words.replace("written", "")), done.raw


@pytest.mark.parametrize("path", COMMANDS)
def test_help_shows_every_name_and_text_whole(path):
    done = run_on_terminal(80, *path.split()[1:], "--help")
    done.assert_fits()
    done.assert_readable()
    for parameter in COMMANDS[path].params:
        for name in parameter.opts if parameter.param_type_name == "option" else []:
            assert name in done.words
        help_text = getattr(parameter, "help", None) or ""
        assert set(help_text.split()) <= set(done.words.split()), done.raw


def test_a_narrow_terminal_gets_help_without_tables_and_cuts_no_word():
    done = run_on_terminal(50, "train", "--help")
    done.assert_fits()
    done.assert_readable()
    help_text = next(it for it in COMMANDS["finetune train"].params if it.param_type_name == "argument").help
    assert set(help_text.split()) <= set(done.words.split()), done.raw
    assert "\n  lora.r  Rank of each update." in done.raw.replace("\r", "")


def test_a_mistake_is_folded_and_readable_and_a_path_longer_than_a_line_is_not_broken(here):
    for words in (["train", "no-such-run"], ["train", "--no-such-option"], ["runs", "no/such/folder/" + "x" * 40]):
        done = run_on_terminal(80, *words)
        assert done.returncode == 2
        done.assert_fits()
        done.assert_readable()
    assert "no/such/folder/" + "x" * 40 in done.words
    path = "no/such/" + "x" * 100
    assert path in run_on_terminal(80, "runs", path).raw


def test_training_shows_what_and_on_what_then_the_view_then_the_result(here):
    columns, folder = 80, "trained/a-run-with-a-name"
    words = training_words(folder)
    done = run_on_terminal(columns, "train", *words)
    assert done.returncode == 0, done.raw
    done.assert_fits()
    done.assert_readable()
    assert not LOG_LINE.search(done.words), done.raw
    assert "Loading weights" not in done.raw
    lines = [line for line in done.lines if re.match("(model|data|steps|device|run) {2}", line)]
    assert [line.split()[0] for line in lines] == ["model", "data", "steps", "device", "run"]
    begins = done.lines.index(lines[0])
    assert done.lines[begins : begins + MOST_SUMMARY_LINES] == lines, "five lines in a row"
    rows = ("18 rows (343 tokens, ", " with loss), 5 to validate, 4 to test")
    for part in ("base, ", *rows, "4 of 6 rows, 3 an epoch", "cpu with "):
        assert part in " ".join(lines)
    assert lines[-1].split() == ["run", folder]
    for part in ("4/4 · epoch 2", "tokens/s", "Test split, 4 rows", f"Written to {folder}:", "Next: finetune generate"):
        assert part in done.words
    assert "warning: optim.warmup_steps is 9, more than the steps of the run (4)" in done.words
    log = Path(folder, "log.txt").read_text()
    for line in ("[RANK 0]", "launcher none, device cpu", "WARNING finetune.training.trainer: optim.warmup_steps is 9"):
        assert line in log, "the log has all that the terminal does without"
    again = run_on_terminal(columns, "train", *words, "training.max_steps=6", "resume.allow=training.max_steps")
    assert f"run {folder}, resumed from step 4" in again.words, again.raw
    complete = run_on_terminal(60, "train", *words, "training.max_steps=6", "resume.allow=training.max_steps")
    complete.assert_fits()
    assert f"run {folder}, resumed from step 6: the run is complete, and nothing is trained" in complete.words


def test_the_log_is_complete_from_the_first_warning_on(here):
    done = run_on_terminal(80, "train", *training_words("older"), "training.epochs=1", "training.max_steps=1")
    assert done.returncode == 0, done.raw
    warned = re.search("warning: (.*?training.num_epochs)", done.words)
    assert warned, done.raw
    assert "training.epochs" in Path("older/log.txt").read_text()


@pytest.mark.parametrize(
    ("word", "variables"), [("seed=0", {"CI": "1"}), ("seed=0", {"TERM": "dumb"}), ("training.debug=true", {})]
)
def test_a_ci_a_dumb_terminal_and_debugging_get_the_log(word, variables, here):
    done = run_on_terminal(80, "train", *training_words("log"), "resume=never", word, **variables)
    shutil.rmtree("log")
    assert "INFO finetune.training.trainer: Starting training..." in done.words


def test_warnings_of_python_and_of_libraries_are_short_here_and_whole_in_the_log(monkeypatch, tmp_path):
    import logging

    from finetune.logs import hear_libraries, log_to_file, stop_logging_to

    def warn(_):
        log = log_to_file(tmp_path / "log.txt")
        logging.getLogger("transformers").addHandler(logging.StreamHandler())
        hear_libraries()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this option is old " * 9, FutureWarning, stacklevel=1)
        logging.getLogger("transformers").warning("attention falls back")
        stop_logging_to(log)

    monkeypatch.setattr("finetune.config.listing.list_model_families", lambda: warn(None) or {})
    before = logging.getLogger("transformers").handlers
    done = run_on_terminal(80, "config", "list")
    logging.getLogger("transformers").handlers = before
    done.assert_fits()
    assert "warning: this option is old this option" in done.words
    assert "warning: attention falls back" in done.words
    assert "test_quiet_terminal.py" not in done.raw
    log = (tmp_path / "log.txt").read_text()
    assert re.search(r"FutureWarning: this option is old .*test_quiet_terminal\.py:\d+\)", log)
    assert "WARNING transformers: attention falls back" in log


@pytest.mark.slow
def test_a_line_tells_of_the_imports_and_disappears(tmp_path):
    with Screen([*FINETUNE, "verify", "no-such-run"], tmp_path) as screen:
        screen.wait_for("loading PyTorch and Transformers")
        assert "finetune: " not in screen.text
        assert screen.wait() == 2
    assert b"\x1b[2K" in screen.raw.rpartition(b"Transformers")[2], "the line is erased"
    assert "finetune: CheckpointError: " in screen.text.rpartition("Transformers")[2]
