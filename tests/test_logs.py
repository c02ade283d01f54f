"""No slow task leaves the log silent for long."""

import io
import logging
import re
import subprocess
import sys
import time

import pytest

from finetune.logs import configure_logs, report_progress, waiting


@pytest.fixture
def log(monkeypatch):
    """What a process that is no interactive terminal prints, and how soon it breaks a silence."""
    monkeypatch.setattr(logging.getLogger("finetune"), "handlers", [])
    monkeypatch.setattr("finetune.logs.SILENCE_SECONDS", 0.05)
    return io.StringIO()


def configure(rank: int, log: io.StringIO, **level: int) -> None:
    configure_logs(rank, **level)
    logging.getLogger("finetune").handlers[0].setStream(log)


def wait_for_a_line(log: io.StringIO) -> str:
    before, end = log.getvalue(), time.monotonic() + 30
    while log.getvalue() == before or not log.getvalue().endswith("\n"):
        assert time.monotonic() < end, "the log is silent"
        time.sleep(0.01)
    return log.getvalue()[len(before) :].splitlines()[-1]


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR], ids=["INFO", "ERROR"])
def test_a_slow_task_breaks_the_silence_of_a_log_whatever_its_level(log, level):
    configure(0, log, level=level)
    with waiting("merging"):
        assert re.search(r" INFO finetune.logs: merging \(0.\d+ s so far\)$", wait_for_a_line(log))
        with waiting("loading the model"):
            report_progress("3 of 9 files")
            wait_for_a_line(log)  # may have been on its way
            assert ": loading the model, 3 of 9 files (0." in wait_for_a_line(log)
        wait_for_a_line(log)
        assert ": merging (0." in wait_for_a_line(log)


def test_another_rank_or_a_log_that_has_lines_is_left_alone(log, monkeypatch):
    configure(1, log)
    with waiting("merging"):
        time.sleep(0.2)
    assert log.getvalue() == ""
    configure(0, log)
    monkeypatch.setattr("finetune.logs.SILENCE_SECONDS", 30.0)
    with waiting("merging"):
        logging.getLogger("finetune.export").info("written")
    assert len(log.getvalue().splitlines()) == 1


def test_no_line_of_an_untrusted_message_looks_like_a_line_of_the_log(log):
    configure(0, log)
    logging.getLogger("finetune.data").error("the server said: no\n[RANK 0] 2026-01-01 00:00:00 INFO finetune: saved")
    assert [line[:9] for line in log.getvalue().splitlines()] == ["[RANK 0] ", "  [RANK 0"]


@pytest.mark.slow
@pytest.mark.parametrize("is_configured", [True, False])
def test_warnings_and_other_libraries_steer_no_terminal(is_configured):
    program = f"""
import logging, warnings
from transformers.utils import logging as transformers_log
from finetune.logs import configure_logs, hear_libraries, log_python_warnings
log_python_warnings()
hear_libraries()
{"configure_logs(0)" if is_configured else ""}
warnings.warn("of rows \x1b[2J\\nfinetune: all is well")
transformers_log.get_logger("transformers.models").warning("of a model \x1b[2J\\nfinetune: all is well")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr
    assert done.stderr.count("<U+001B>[2J") == 2, done.stderr
    assert not any(line.startswith("finetune: all") for line in done.stderr.splitlines())


@pytest.mark.slow
def test_a_pipe_is_told_of_slow_imports(tmp_path):
    program = "import finetune.logs, finetune.cli; finetune.logs.SILENCE_SECONDS = 0.1; finetune.cli.main()"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["train", "model=no/such/folder", "data=rows.jsonl", "output_dir=run"]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert re.search(r"INFO finetune\.logs: loading PyTorch and Transformers \(\d[\d.]* m?s so far\)", done.stderr)
