import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from finetune import launch, load_config
from finetune.cli.runs import _summaries
from finetune.errors import CheckpointError
from finetune.runs import folder as run_folder
from finetune.runs.file_lock import is_held, is_held_here
from finetune.runs.folder import RunFolder
from finetune.runs.recorded_run import RecordedRun
from tests.runs.made_runs import write_run

OURS = ("config.yaml", "run.json", "metrics.jsonl", "log.txt", "checkpoints", "adapter", "base")
MARKS = ("run.json", "metrics.jsonl", "checkpoints")


def fill(path, names, text="mine"):
    path.mkdir(parents=True, exist_ok=True)
    for name in names:
        if "." in name:
            (path / name).write_text(text)
        else:
            (path / name).mkdir()


def listing(path):
    return sorted(str(entry.relative_to(path)) for entry in path.rglob("*"))


def test_naming_a_run_touches_nothing_and_opening_it_makes_the_folder(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with folder.open() as opened:
        assert opened is folder
        assert folder.path.is_dir()
        assert folder.lock_file.is_file()
    assert listing(folder.path) == []


def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    folder = RunFolder(tmp_path / os.fsdecode(b"caf\xe9") / "run")
    for refusing in (folder.check_writable, lambda: folder.open(resume="auto")):
        with pytest.raises(CheckpointError, match=r"output_dir='.*caf\\udce9/run' is not valid UTF-8.*output_dir="):
            refusing()
    assert listing(tmp_path) == []
    RunFolder(tmp_path / "café").check_writable()


def test_runs_are_listed_in_a_folder_whose_path_is_not_utf8(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    runs = tmp_path / os.fsdecode(b"caf\xe9")
    write_run(runs / "a", status="completed")
    for _ in range(2):  # the second time from the index
        assert [run["name"] for run in _summaries(runs)] == ["a"]
    assert len(list((tmp_path / ".cache/finetune").iterdir())) == 1


def test_paths_are_those_of_the_design(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder("runs/x")
    assert folder.path == tmp_path / "runs" / "x"
    assert folder.checkpoint(12) == folder.path / "checkpoints" / "step-000012"
    assert folder.checkpoint(1_234_567).name == "step-1234567"
    paths = (
        folder.config_file, folder.record_file, folder.metrics_file, folder.log_file,
        folder.checkpoints, folder.adapter, folder.base,
    )  # fmt: skip
    assert tuple(path.name for path in paths) == OURS
    assert folder.checkpoint_steps() == []


def test_steps_come_in_order_and_other_names_are_no_steps(tmp_path):
    folder = RunFolder(tmp_path)
    for name in ("step-000012", "step-000004", "step-1000000", ".tmp-step-000016", "step-12", "notes"):
        (folder.checkpoints / name).mkdir(parents=True)
    (folder.checkpoints / "step-000008").write_text("a file")
    assert folder.checkpoint_steps() == [4, 12, 1_000_000]


def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(tmp_path):
    """Path.is_dir answers False for every error of the system, from Python 3.14 on."""
    run = write_run(tmp_path / "run")
    assert run.checkpoint_steps() == []
    run.checkpoints.symlink_to(run.checkpoints.name)
    with pytest.raises(OSError, match="levels of symbolic links"):
        run.checkpoint_steps()
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read: .*ELOOP"):
        RecordedRun(run.path).find_weights()


@pytest.mark.parametrize("name", OURS)
def test_another_run_is_refused_in_one_message_and_left_alone(tmp_path, name):
    fill(tmp_path / "run", [name])
    before = listing(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path / "run").open(resume="never")
    message = str(caught.value)
    assert all(part in message for part in (str(tmp_path / "run"), name, "resume=auto", "output_dir="))
    assert listing(tmp_path) == before


@pytest.mark.parametrize("missing", OURS)
def test_resume_starts_whatever_is_missing_or_torn(tmp_path, missing):
    fill(tmp_path, [name for name in OURS if name != missing], text="")
    with RunFolder(tmp_path).open(resume="auto"):
        pass
    assert len(listing(tmp_path)) == len(OURS) - 1


@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize("names", [["thesis.tex"], ["src", "config.yaml"], [".git"], ["adapter", "notes.txt"]])
def test_a_folder_of_something_else_is_refused(tmp_path, resume, names):
    fill(tmp_path / "x", names)
    with pytest.raises(CheckpointError, match="output_dir="):
        RunFolder(tmp_path / "x").open(resume=resume)
    assert listing(tmp_path / "x") == sorted(names)


@pytest.mark.parametrize("name", MARKS)
def test_an_unknown_file_beside_a_run_does_not_stop_a_resume(tmp_path, name):
    fill(tmp_path, [name, "slurm-1.out"])
    with RunFolder(tmp_path).open(resume="auto"):
        pass
    assert listing(tmp_path) == sorted([name, "slurm-1.out"])


@pytest.mark.parametrize("name", [*OURS, ".lock"])
def test_a_link_under_one_of_our_names_is_refused(tmp_path, name):
    target = tmp_path / "outside"
    target.mkdir()
    fill(tmp_path / "run", [other for other in MARKS if other != name])
    (tmp_path / "run" / name).symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        RunFolder(tmp_path / "run").open(resume="auto")
    assert listing(target) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="not a folder"):
            RunFolder(path).open()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_named_with_the_reason():
    with pytest.raises(CheckpointError, match=r"output_dir=/proc/1/x .*\((ENOENT|EACCES|EPERM)\).*output_dir="):
        RunFolder("/proc/1/x").open()


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path)
    kept = ["metrics.jsonl", ".tmp-of-mine.txt"]
    fill(tmp_path, [*kept, ".tmp-run.json", ".tmp-adapter", ".tmp-base", "checkpoints"])
    fill(folder.checkpoints, ["step-000004", ".tmp-step-000008", ".tmp-other", ".old-step-000004", ".old-step-000012"])
    with folder.open(resume="auto"):
        left = {path.name for path in folder.checkpoints.iterdir()}
    assert left == {"step-000004", ".tmp-other", "step-000012"}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "checkpoints"}


HOLD = """
import sys, time
from finetune.runs.folder import RunFolder
from tests.runs.made_runs import write_run
with RunFolder(sys.argv[1]).open(resume="auto") as folder:
    folder.metrics_file.touch()
    print("open", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"open\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.mark.process
def test_a_living_run_keeps_others_out_and_is_named(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(run_folder, "file_lock", lambda *_, **__: pytest.fail("it waited"))
    monkeypatch.setattr(run_folder, "SECONDS_TO_DIE", 0.2)
    folder = RunFolder(tmp_path / "run")
    for refusing in (folder.refuse_living_holder, lambda: folder.open(resume="auto")):
        with pytest.raises(CheckpointError, match=rf"is being written by process {holder.pid} on .*output_dir="):
            refusing()
    config = load_config(["model.path=none", "data.path=none", f"output_dir={folder.path}"])
    with pytest.raises(CheckpointError, match="is being written by"), launch(config):
        pytest.fail("it began")


@pytest.mark.process
def test_a_process_of_another_machine_is_waited_for(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert not is_held_here(RunFolder(tmp_path / "run").lock_file)
    with pytest.raises(CheckpointError, match=rf"process {holder.pid} on .* still holds .* after 0.2 s.*output_dir="):
        RunFolder(tmp_path / "run").open(resume="auto")


@pytest.mark.process
def test_a_process_whose_launcher_was_killed_is_waited_for(tmp_path):
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}, {str(tmp_path / 'run')!r}])"
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE) as started:
        assert started.stdout.readline() == b"open\n"
        (holder,) = psutil.Process(started.pid).children()
        lock = RunFolder(tmp_path / "run").lock_file
        try:
            assert is_held_here(lock)
            started.kill()
            started.wait()
            assert not is_held_here(lock)
            assert is_held(lock)
        finally:
            holder.kill()


@pytest.mark.process
def test_a_killed_run_does_not_block_its_restart(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    begun = time.monotonic()
    with RunFolder(tmp_path / "run").open(resume="auto"):
        pass
    assert time.monotonic() - begun < 5


@pytest.mark.process
def test_a_run_that_dies_slowly_does_not_block_its_restart(tmp_path, holder):
    threading.Timer(0.5, holder.kill).start()
    with RunFolder(tmp_path / "run").open(resume="auto"):
        assert holder.wait() == -signal.SIGKILL


def test_the_lock_is_free_after_a_refusal_and_after_close(tmp_path):
    folder = RunFolder(tmp_path / "run").open()
    folder.close()
    folder.close()
    with RunFolder(tmp_path / "run").open(resume="never"):
        pass


@pytest.mark.process
def test_the_commands_about_runs_and_the_modules_below_them_need_no_torch(tmp_path):
    write_run(tmp_path / "a")
    code = (
        "import sys, finetune.training.reporting.progress\n"
        "from finetune.cli.commands import app\n"
        "run = sys.argv[1]\n"
        "for words in (['runs', run], ['diff', run, run], ['watch', run], ['checkpoints', run]):\n"
        "    app(words, standalone_mode=False)\n"
        "assert not {'torch', 'safetensors', 'transformers', 'peft'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "a"], check=True, stdout=subprocess.PIPE)
