import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import finetune
from finetune.errors import RunFailedError
from finetune.runs.metrics import MetricsWriter, number_in
from finetune.runs.metrics_reader import EventsRead, read_events
from finetune.runs.record import RunRecord, RunStart, read_run_record
from tests.launches import REPOSITORY
from tests.runs.made_runs import write_run

STEP = {
    "step": 12, "epoch": 0, "loss": 1.23, "learning_rate": 3e-4, "grad_norm": 0.8,
    "num_targets": 812, "num_tokens": 2071, "num_computed": 1804, "tokens_per_second": 900.1,
}  # fmt: skip
START = {
    "world_size": 2, "processes_started": 2, "launcher": "torchrun", "backend": "gloo", "threads": {"count": 1},
    "global_batch": {"batch_size": 8}, "fallbacks": [], "fingerprints": {"data": "abc"},
}  # fmt: skip


def strict(text):
    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def read(path):
    return [strict(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_of_json_and_comes_back_as_it_will_be_read(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        assert metrics.write("step", **STEP, reward_margin=0.25) == {"event": "step", **STEP, "reward_margin": 0.25}
        metrics.write("warning", step=12, kind="flat", text="the loss is flat")
        metrics.write("validation", step=12, loss=float("nan"), a=float("inf"), b=float("-inf"))
    assert read(metrics.path) == [
        {"event": "step", **STEP, "reward_margin": 0.25},
        {"event": "warning", "step": 12, "kind": "flat", "text": "the loss is flat"},
        {"event": "validation", "step": 12, "loss": "NaN", "a": "Infinity", "b": "-Infinity"},
    ]
    assert metrics.path.read_text().startswith('{"event": "step", "step": 12, "epoch": 0, "loss": 1.23,')


def test_events_are_read_back_and_what_is_torn_is_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_events(path) == EventsRead([])
    with MetricsWriter(path) as metrics:
        event = metrics.write("step", **STEP | {"loss": float("inf")})
    with path.open("ab") as file:
        file.write(b'\x00\n[1]\n{"event": 1}\n{"event": "st')
    found = read_events(path)
    assert (found.events, found.num_left_out) == ([event], 4)
    figures = [number_in(event, name) for name in ("loss", "step", "event", "no_such")]
    assert figures == [float("inf"), 12.0, None, None]


def test_cutting_where_there_is_nothing_to_cut_changes_nothing(tmp_path):
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    assert metrics.cut_behind(0) == 0
    assert not metrics.path.exists()
    metrics.write("step", **STEP)
    identity = metrics.path.stat().st_ino
    assert metrics.cut_behind(12) == 0
    assert metrics.path.stat().st_ino == identity
    assert metrics.cut_behind(0) == 1
    assert metrics.path.read_bytes() == b""


def test_a_validation_that_a_resumed_run_repeats_is_cut_with_what_is_after_its_step(tmp_path):
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (11, 12):
        metrics.write("step", **STEP | {"step": step})
        metrics.write("validation", step=step, loss=1.0)
    before = read(metrics.path)
    assert (metrics.cut_behind(12), read(metrics.path)) == (0, before)
    assert (metrics.cut_behind(12, owes_validation=True), read(metrics.path)) == (1, before[:3])


def test_a_disk_that_takes_no_more_ends_the_run_in_one_line(tmp_path):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (650, 650))
        status = 70
        try:
            metrics = MetricsWriter(tmp_path / "metrics.jsonl")
            for step in range(1, 10):
                metrics.write("step", **STEP | {"step": step})
        except RunFailedError as error:
            status = 3 if errno.errorcode[errno.EFBIG] in str(error) and "bytes are free" in str(error) else 71
        finally:
            os._exit(status)  # whatever happened: a fork that goes on would be a second test run
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    # The torn line at the end goes with the next start; the whole ones before it stay.
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    assert metrics.cut_behind(100) == 1
    assert [event["step"] for event in read(metrics.path)] == [1, 2, 3]


def test_the_record_says_what_ran_on_what_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    record = RunRecord(tmp_path / "run.json")
    assert read_run_record(record.path) is None
    record.start(RunStart(**START))
    first = strict(record.path.read_text())
    assert {name: first[name] for name in START} == START
    assert first["status"] == "running"
    assert first["versions"]["finetune"] == finetune.__version__
    assert set(first["versions"]) == {"python", "finetune", "torch", "transformers", "accelerate", "peft"}
    assert all(re.match(r"\d+\.\d+", version) for version in first["versions"].values())
    record.update(fallbacks=[{"what": "x"}])
    record.finish("completed", {"best_loss": float("nan")})
    last = strict(record.path.read_text())
    assert (last["status"], last["fallbacks"], last["result"]) == ("completed", [{"what": "x"}], {"best_loss": "NaN"})
    assert last["finished"] >= last["starts"][0]
    assert record.path.read_text().startswith('{\n  "status"')
    assert "hf_very_secret" not in record.path.read_text()


def test_the_record_names_the_commit_and_whether_it_was_changed(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def recorded():
        record = RunRecord(tmp_path / "run.json")
        record.start(RunStart(**START))
        return strict(record.path.read_text())["git_commit"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GIT_DIR")
    assert recorded() is None
    git("init", "--quiet")
    assert recorded() is None, "there is no commit yet"
    (tmp_path / "recipe.py").write_text("one")
    git("add", "recipe.py")
    git("commit", "--quiet", "-m", "first")
    git("tag", "a-name-that-is-no-commit")
    commit = git("rev-parse", "HEAD").strip()
    assert recorded() == commit  # run.json itself is not tracked
    (tmp_path / "recipe.py").write_text("two")
    assert recorded() == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert recorded() is None


def test_a_run_that_goes_on_keeps_the_times_of_its_starts(tmp_path):
    counts = dict.fromkeys(("num_with_system", "num_with_tools", "num_rows"), 4)
    measured = {"memory": {"peak_bytes": 5}, "profile": {"step": 3}, "base_answers": {"rows": 2}}
    measured["opening"] = {"system": "Be brief.", "tools": "", **counts}
    first = RunRecord(tmp_path / "run.json")
    first.start(RunStart(**START | {"resume_changes": [{"key": "seed"}]}))
    first.update(**measured, num_steps=9)
    again = RunRecord(tmp_path / "run.json")
    again.start(RunStart(**START | {"world_size": 1, "resume_changes": [{"key": "lora.r"}]}))
    record = read_run_record(again.path)
    assert record["world_size"] == 1
    assert record.items() >= (measured | {"num_steps": None}).items(), "what only an earlier start measured"
    assert len(record["starts"]) == 2
    assert [change["key"] for change in record["resume_changes"]] == ["seed", "lora.r"]
    assert record["finished"] is None


def test_a_start_after_a_killed_one_says_so_and_whether_memory_was_short(tmp_path, monkeypatch, caplog):
    for kills in ({"boot": 3}, {"boot": 3}, {"boot": 4}, {"other boot": 9}, {}, {"boot": 1}):
        monkeypatch.setattr("finetune.runs.record.memory_kills", lambda kills=kills: kills)
        monkeypatch.setattr("finetune.runs.killed.memory_kills", lambda kills=kills: kills)
        record = RunRecord(tmp_path / "run.json")
        record.start(RunStart(**START))
    told = [line for line in caplog.messages if "the last start of this run recorded no end: its process was" in line]
    assert ["memory killer" in line for line in told] == [False, True, False, False, False]
    assert read_run_record(record.path)["memory_kills"] == {"boot": 1}
    record.finish("completed")
    RunRecord(tmp_path / "run.json").start(RunStart(**START))
    assert len(caplog.messages) == len(told), "it has ended"


def test_a_record_of_a_process_that_has_ended_says_that_the_run_failed(tmp_path):
    RunRecord(tmp_path / "run.json").start(RunStart(**START))
    RunRecord(tmp_path / "run.json").fail("RunFailedError: late")
    record = read_run_record(tmp_path / "run.json")
    assert (record["status"], record["result"]) == ("failed", {"error": "RunFailedError: late"})
    assert {name: record[name] for name in START} == START


@pytest.mark.parametrize("text", ["", "[]"])
def test_a_torn_record_is_written_anew(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    record = RunRecord(tmp_path / "run.json")
    record.start(RunStart(**START))
    assert len(read_run_record(record.path)["starts"]) == 1


@pytest.mark.slow
def test_a_long_file_is_thinned_to_its_extremes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"event": "step", **STEP, "step": step, "num_tokens": 2}) for step in range(1, 60_001)]
    for step, loss in ((20_000, 99.0), (30_001, -99.0), (40_000, "NaN")):
        lines[step - 1] = json.dumps({"event": "step", **STEP, "step": step, "loss": loss, "num_tokens": 2})
    lines.insert(500, json.dumps({"event": "warning", "step": 500, "text": "x"}))
    path.write_text("".join(f"{line}\n" for line in lines))
    found = read_events(path, "thinned")
    losses = {event["step"]: event["loss"] for event in found.events if event["event"] == "step"}
    assert {1, 20_000, 30_001, 40_000, 60_000} <= set(losses)
    assert list(losses) == sorted(losses)
    assert len(found.events) + found.num_thinned == 60_001
    assert len(found.events) < 40_000
    assert found.num_tokens == 120_000
    assert [event["step"] for event in found.events if event["event"] == "warning"] == [500]

    recent = read_events(path, "recent")
    steps = [event["step"] for event in recent.events if event["event"] == "step"]
    assert steps == list(range(steps[0], 60_001))
    assert 1_000 < len(steps) < 10_000
    assert recent.events[0]["event"] == "warning"


def test_a_line_without_end_takes_no_memory(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(50 << 20)
        file.seek(0, 2)
        file.write(b'\n{"event": "step", "step": 3}\n')
    found = read_events(path)
    assert found.events == [{"event": "step", "step": 3}]
    assert found.num_left_out > 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from /proc")
def test_commands_read_a_long_run_in_bounded_memory(tmp_path):
    """300 MB for a file of any size: 200 MB are far more than all that may be kept of it."""
    folder = write_run(tmp_path / "runs" / "a", status="completed")
    with folder.metrics_file.open("a") as file:
        for start in range(1, 600_000, 1000):
            lines = [json.dumps({"event": "step", **STEP, "step": step}) for step in range(start, start + 1000)]
            measured = {
                "event": "validation",
                "step": start,
                "loss": 1 + 1 / start,
                "num_targets": 9,
                "x": "x" * 150_000,
            }
            file.writelines(f"{line}\n" for line in [*lines, json.dumps(measured)])
    assert folder.metrics_file.stat().st_size > 200_000_000
    code = (
        "import atexit, sys\nfrom pathlib import Path\nfrom finetune.cli import main\n"
        "status = Path('/proc/self/status')\natexit.register(lambda: sys.stderr.write(status.read_text()))\n"
        "main(sys.argv[1:])"
    )
    home = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    said = {}
    for name, *words in (
        *(["runs", "--json", tmp_path / "runs"],) * 2,
        *(["checkpoints", folder.path], ["watch", "--once", folder.path]),
    ):
        command = [sys.executable, "-c", code, name, *words]
        done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        kilobytes = int(re.search(r"VmHWM:\s+(\d+) kB", done.stderr)[1])
        assert kilobytes < 300_000, (name, kilobytes)
        assert said.setdefault(name, done.stdout) == done.stdout, "the index says what the file says"
    (run,) = json.loads(said["runs"])
    assert (run["step"], run["best_step"]) == (600_000, 599_001)
    assert list((tmp_path / ".cache" / "finetune").glob("runs-*.json"))
