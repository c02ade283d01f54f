import pytest

from finetune.runs.file_lock import file_lock
from finetune.runs.metrics import MetricsWriter
from tests.in_process import run_finetune
from tests.launches import start_command
from tests.runs.made_runs import change_record, step_figures, write_run
from tests.runs.screens import FINETUNE, Screen
from tests.tiny_runs import write_base, write_rows


def watch(path, *options):
    return run_finetune("watch", path, *options)


def test_a_finished_run_is_shown_as_it_stands(tmp_path):
    write_run(tmp_path / "a", losses=tuple(3 - 0.05 * step for step in range(25)))
    done = watch(tmp_path / "a")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step 10/25 · epoch 1 · loss 2.5500 · 1,000 tokens/s")
    assert lines[-1] == "a, completed"
    assert lines[-2].startswith("step 25/25 · epoch 1 · loss 1.8000")


def test_a_run_that_was_killed_is_told_as_such(tmp_path):
    write_run(tmp_path / "a", status="running")
    done = watch(tmp_path / "a")
    assert done.returncode == 0
    assert (
        "a, stopped: its process was killed, or its machine went down. resume=auto continues from the last checkpoint"
        in done.stdout
    )


def test_a_run_that_failed_says_why(tmp_path):
    write_run(tmp_path / "a", status="failed", error="RunFailedError: the loss is nan")
    assert watch(tmp_path / "a").stdout.splitlines()[-1] == "a, failed: RunFailedError: the loss is nan"


def test_a_name_with_a_line_break_makes_no_line_of_its_own(tmp_path):
    names = [tmp_path / name for name in ("a\nfinetune: forged", "b\nfinetune: forged")]
    for name in names:
        write_run(name)
    shown = watch(names[0]).stdout + run_finetune("diff", *names).stdout
    assert "a<U+000A>finetune: forged, completed" in shown
    assert "b<U+000A>finetune: forged: no differences" in shown
    assert "\nfinetune: forged" not in shown


def test_what_is_no_run_is_refused(tmp_path):
    done = watch(tmp_path)
    assert done.returncode == 2
    assert "is not the folder of a run" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_a_terminal_follows_a_run_through_a_restart_and_ctrl_c_leaves_it(tmp_path):
    folder = write_run(tmp_path / "a", losses=(3.0, 2.0), status="running")
    change_record(folder, num_steps=50)
    with (
        file_lock(folder.lock_file, waiting_for="the test"),
        Screen([*FINETUNE, "watch", folder.path], tmp_path) as screen,
        MetricsWriter(folder.metrics_file) as metrics,
    ):
        screen.wait_for("2/50 · epoch 1")
        screen.wait_for("a, running")
        metrics.write("step", **step_figures(3, 1.75))
        screen.wait_for("3/50 · epoch 1")
        metrics.cut_behind(1)
        screen.wait_for("1/50 · epoch 1")
        metrics.write("step", **step_figures(2, 0.625))
        screen.wait_for("0.6250")
        assert screen.process.poll() is None
        screen.press(b"\x03")
        assert screen.wait() == 0
        assert "Traceback" not in screen.text


@pytest.mark.process
def test_without_a_terminal_lines_come_while_the_run_goes_on(tmp_path):
    folder = write_run(tmp_path / "a", losses=(), status="running")
    with file_lock(folder.lock_file, waiting_for="the test"):
        watching = start_command([*FINETUNE, "watch", folder.path], variables={"PYTHONUNBUFFERED": "1"})
        with MetricsWriter(folder.metrics_file) as metrics:
            for step in range(1, 11):
                metrics.write("step", **step_figures(step, 2.0))
            assert watching.stdout.readline().startswith("step 10 · epoch 1 · loss 2.0000")
            metrics.write("warning", step=10, kind="flat", text="the loss is flat")
            assert watching.stdout.readline() == "step 10 · warning: the loss is flat\n"
            metrics.write("validation", step=10, loss=1.23456789, num_targets=5, exact_match=2 / 3)
            assert watching.stdout.readline() == "step 10 · validation loss 1.2346 · exact_match 0.667\n"
        change_record(folder, status="completed")
    rest, _ = watching.communicate(timeout=240)
    assert watching.returncode == 0
    assert rest.splitlines() == ["a, completed"]


@pytest.mark.process
def test_once_leaves_a_run_that_goes_on(tmp_path):
    folder = write_run(tmp_path / "a", status="running")
    with file_lock(folder.lock_file, waiting_for="the test"):
        assert watch(folder.path, "--once").stdout.splitlines()[-1] == "a, running"


@pytest.mark.slow
def test_a_real_training_is_seen_on_its_own_terminal_and_from_two_others(tmp_path):
    base, rows = write_base(tmp_path / "base"), write_rows(tmp_path / "rows")
    words = [
        *(f"model.path={base}", f"data.path={rows}", f"data.cache_dir={tmp_path / 'cache'}", "output_dir=run"),
        *("training.max_steps=200", "training.batch_size=6", "training.log_every=20", "data.on_overlap=warn"),
        *("validation.validate_every=50", "checkpoint.save_every=100", "training.precision=fp32"),
        "testing.max_new_tokens=4",
    ]
    with Screen([*FINETUNE, "train", *words], tmp_path) as training:
        training.wait_for("tokens/s")
        with Screen([*FINETUNE, "watch", "run"], tmp_path) as watching:
            lines = start_command([*FINETUNE, "watch", "run"], cwd=tmp_path)
            watching.wait_for("run, running")
            assert training.wait() == 0
            assert watching.wait() == 0
            said, _ = lines.communicate(timeout=240)
    assert lines.returncode == 0
    for screen in (training, watching):
        for part in ("200/200 · epoch", "gradient norm", "tokens/s", "at step 200", "of the main process, at most"):
            assert part in screen.text, screen.text[-4000:]
    assert "checkpoint committed step=200" in (tmp_path / "run/log.txt").read_text()
    assert "run, completed" in watching.text
    assert "step 200/200 · epoch" in said
    assert "step 200 · validation " in said
    assert said.splitlines()[-1] == "run, completed"
