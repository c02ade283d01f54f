import io
import logging
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from finetune.config.compose import load_config
from finetune.logs import configure_logs, report_progress, waiting
from finetune.training.reporting.live_view import view_and_keys
from finetune.training.reporting.progress import TrainingProgress, show_what_next


@pytest.fixture
def package_log(caplog, monkeypatch):
    logger = logging.getLogger("finetune")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "handlers", [])
    caplog.set_level(logging.INFO, "finetune")
    return caplog


def config_of(*words):
    return load_config(["model=phi_tiny", "data=orders", *words])


def event(step, epoch, loss, tokens_per_second):
    return {"event": "step", "step": step, "epoch": epoch, "loss": loss, "tokens_per_second": tokens_per_second}


def run(progress, steps):
    with progress:
        for step in steps:
            progress.write(event(step, 0, 1.23456, 1900.4))


def test_without_a_terminal_the_log_gets_a_line_now_and_then(package_log, capsys):
    run(TrainingProgress(config_of(), 25), range(1, 26))
    assert [message.split(" · ")[0] for message in package_log.messages] == ["step 10/25", "step 20/25", "step 25/25"]
    assert package_log.messages[0].startswith("step 10/25 · epoch 1 · loss 1.2346 · 1,900 tokens/s · ")
    assert package_log.messages[-1].endswith(" 0 s left")
    assert capsys.readouterr() == ("", "")


def test_time_left_counts_the_steps_of_this_start_only(package_log, monkeypatch):
    clock = iter([0.0, 0.0, 200.0])
    monkeypatch.setattr("finetune.training.reporting.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    run(TrainingProgress(config_of(), 130, first_step=100), [110])
    assert package_log.messages == ["step 110/130 · epoch 1 · loss 1.2346 · 1,900 tokens/s · 6 min 40 s left"]


def test_a_terminal_sees_one_view_with_the_log_above_it(monkeypatch, capsys):
    logger = logging.getLogger("finetune")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)
    configure_logs(0)
    stream = logger.handlers[0].stream
    kept = io.StringIO()
    logger.addHandler(logging.StreamHandler(kept))
    screen = io.StringIO()
    config = config_of("training.log_every=5")
    progress = TrainingProgress(config, 20, console=Console(file=screen, force_terminal=True, width=120))
    with progress:
        for step in range(1, 21):
            progress.write(event(step, 1, 0.5, 1000))
        logger.warning("a row was cut")
        logger.warning("step 20: the loss is flat", extra={"is_on_view": True})
    logger.warning("afterwards")
    shown = screen.getvalue()
    assert "20/20 · epoch 2 · " in shown
    assert "0.5000 · level, +0.0% over 10 steps" in shown
    assert "1,000 tokens/s" in shown
    assert shown.count("a row was cut") == 1
    assert "WARNING finetune: a row was cut\n" in shown
    assert "step 5/20" not in shown
    assert "the loss is flat" not in shown, "the view has a row for it"
    assert "the loss is flat" in kept.getvalue()
    assert "step 5/20" in kept.getvalue()
    assert logger.handlers[0].stream is stream is sys.stderr
    assert capsys.readouterr().err.count("afterwards") == 1


def test_the_view_shows_how_far_a_validation_has_come(monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "handlers", [])
    configure_logs(0)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    with TrainingProgress(config_of(), 20, console=console) as progress:
        progress.write(event(5, 1, 0.5, 1000))
        assert rows_of_view(console, progress).keys() == {"step", "loss", "rate", "speed"}
        with waiting("validation"):
            report_progress("64 of 200 rows")
            assert rows_of_view(console, progress)["now"] == "validation, 64 of 200 rows"
        assert "now" not in rows_of_view(console, progress)


def test_the_view_of_training_knows_which_validations_cannot_be_the_best(monkeypatch):
    monkeypatch.setattr(logging.getLogger("finetune"), "handlers", [])
    configure_logs(0)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with TrainingProgress(config_of("early_stopping.max_forgotten=0.1"), 20, console=console) as progress:
        progress.write({"event": "validation", "step": 5, "loss": 0.5, "forgotten": 0.05})
        progress.write({"event": "validation", "step": 10, "loss": 0.4, "forgotten": 0.2})
        assert "best 0.5000 at step 5" in str(rows_of_view(console, progress))


def rows_of_view(console: Console, progress: TrainingProgress) -> dict[str, str]:
    rendered = console.render_lines(view_and_keys(progress._view))
    lines = (line for segments in rendered for line in ["".join(it.text for it in segments)])
    return {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines if line.strip()}


@pytest.mark.parametrize(
    ("prompt", "question"),
    [("how many?", "'how many?'"), ("how \x1b[2J many?", '"…"'), ("how \u202e many?", '"…"'), (None, '"…"')],
)
def test_the_next_command_holds_nothing_of_a_row_that_could_steer_the_terminal(tmp_path, capsys, prompt, question):
    show_what_next(tmp_path, prompt, step=12)
    out = capsys.readouterr().out
    assert "  adapter/       the weights of step 12, for finetune" in out
    assert out.endswith(f"Next: finetune generate {tmp_path} {question}\n")
