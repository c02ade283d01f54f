"""A session on a GPU writes each figure as it comes, goes on where it stopped, and no task stops another."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import gpu_session
from benchmarks.gpu.figures import FACTS, OUTCOMES, Figures
from benchmarks.gpu.goals import GOALS, standings
from benchmarks.gpu.parts import SWITCHES, Task, tasks
from benchmarks.gpu.session import Session
from finetune import load_config
from tests.launches import run_command
from tests.warm import warm_interpreter

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = Session(device="cpu", is_tiny=True)
CUDA = Session(device="cuda", is_tiny=False)
FEW = [
    *("kernels/signatures", "kernels/attention-bf16-64", "kernels/engine", "kernels/syncs", "profile/limit"),
    *("profile/512", "peers/mini/ours", "peers/chat/trl-grouped-16", "peers/attention", "phi4/defaults"),
    *("rewards/update", "rewards/step", "rewards/engine-8", "full/mini", "full/full-bf16-liger"),
    *("gains/prompt/without-share_prefixes", "recovery/deterministic", "recovery/default"),
    "ranks/torchrun-bf16",
]
"""Tasks of each function and kind of job, in the order of the session."""
OF_TWO_RANKS = ("ranks/torchrun-fp32", "ranks/same-bytes", "ranks/fsdp2", "ranks/stopped", "ranks/gather")
"""One task of each function of part `ranks`. Only the first is run here: the others take minutes on a CPU."""
ELSEWHERE = {
    "benchmarks.gpu.recovery:run_gpu_tests": "tests/test_gpu_tests.py",
    "benchmarks.gpu.real:gradient": "tests/real/test_gpu_part.py",
    "benchmarks.gpu.real:train": "tests/real/test_gpu_part.py",
    "benchmarks.gpu.sweeps:side_by_side": "tests/sweep",
}
"""Functions that no test here runs, and what runs them, or what they call."""
README = (REPOSITORY / "benchmarks" / "README.md").read_text()


def own(name: str, function: str, seconds: int = 60, **arguments: str) -> Task:
    return Task(name, f"tests.gpu_session_tasks:{function}", seconds, arguments)


def start(path: Path, wanted: list[Task], budget: float | None = None) -> gpu_session.Start:
    started = gpu_session.Start(TINY, Figures(path), "command", budget)
    started.run(wanted)
    return started


def test_the_parts_come_in_the_order_that_tells_most():
    names = [task.name for task in tasks()]
    assert len(names) == len(set(names))
    assert max(task.seconds for task in tasks()) <= 560, "a call may take ten minutes"
    order = ["kernels", "profile", "peers", "phi4", "rewards", "qlora", "real", "full"]
    order += ["gains", "recovery", "ranks", "sweep"]
    assert list(dict.fromkeys(task.part for task in tasks())) == order
    for part in order:
        assert f"| `{part}` |" in README
    for task in tasks():
        module, _, function = task.function.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), task.name


def test_every_switch_turns_something_off():
    words = ["model.path=x", "data.path=x"]
    for name, switch in SWITCHES.items():
        off, on = load_config([*words, *switch.off]), load_config(words)
        # A batch size that is set limits the rows, be it the default's or another.
        assert (off, off.training.model_fields_set) != (on, on.training.model_fields_set), name
        assert any(task.name.endswith(f"/without-{name}") for task in tasks())


def test_figures_survive_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "figures.jsonl"
    Figures(path).add("a/b", figures={"x": 1})
    with path.open("a") as file:
        file.write('{"task": "a/c", "figu')
    figures = Figures(path)
    assert figures.is_done("a/b")
    assert not figures.is_done("a/c")
    figures.add("a/c", error="broken")
    assert Figures(path).is_done("a/c")
    figures.add("a/c", again=True)
    figures.add("a/d", skipped="it needs CUDA")
    assert not any(map(Figures(path).is_done, ("a/c", "a/d")))


def test_goals_are_compared_with_figures_and_named_in_the_readme(tmp_path):
    figures = Figures(tmp_path / "figures.jsonl")
    assert all(": not measured yet (goal: " in line for line in standings(figures))
    assert len({task.name for task in tasks()} & {goal.task for goal in GOALS}) == len({goal.task for goal in GOALS})
    for engine, rate in {"ours": 30, "trl-grouped-16-liger": 10, "trl-packed-flash-liger": 20}.items():
        figures.add(f"peers/chat/{engine}", figures={"median_tokens_per_second": rate})
    assert [line for line in standings(figures) if ": 1.5 against `trl-packed-flash-liger`, of 2 measured (" in line]
    for goal in GOALS:
        assert goal.what in README


def test_the_readme_has_the_figures_that_are_recorded(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "README.md"
    copy.write_text(README)
    monkeypatch.setattr(gpu_session, "README", copy)
    assert gpu_session.main([str(REPOSITORY / "benchmarks" / "results-gpu.jsonl"), "--page"]) == 0
    assert copy.read_text() == README
    assert "| `phi4/defaults` | 8,862 |" in README


@pytest.mark.slow
def test_no_task_stops_another_and_a_second_start_repeats_none(tmp_path):
    path = tmp_path / "figures.jsonl"
    wanted = [
        *(own("a/1", "count", folder=str(tmp_path)), own("a/2", "count", folder=str(tmp_path))),
        *(own("a/3", "fail"), own("a/4", "crash"), own("b/5", "hang", 1, folder=str(tmp_path)), own("b/6", "be_wrong")),
        own("b/7", "count", folder=str(tmp_path)),
    ]
    start(path, wanted)
    records = {record["task"]: record for record in Figures(path).records}
    assert [records[f"{part}/{n}"]["figures"]["times"] for part, n in (("a", 1), ("a", 2), ("b", 7))] == [1, 2, 3]
    assert records["a/1"]["figures"]["process"] == records["a/2"]["figures"]["process"]
    assert records["a/2"]["figures"]["process"] != records["b/7"]["figures"]["process"]
    assert records["a/3"]["error"] == "ValueError: no such kernel"
    assert records["a/4"]["error"].startswith(f"its process ended with exit code {-signal.SIGSEGV}")
    assert records["b/5"]["error"] == "it took longer than 1 seconds"
    assert not psutil.pid_exists(int((tmp_path / "hangs").read_text()))
    assert gpu_session.is_failed(records["b/6"])
    assert records["a/3"]["command"] == "command --again a/3"

    before = path.read_text()
    start(path, wanted)
    assert path.read_text() == before
    Figures(path).add("a/3", again=True)
    start(path, wanted)
    assert [record["task"] for record in Figures(path).records[len(wanted) :]] == ["a/3", "a/3"]


@pytest.mark.slow
def test_what_does_not_fit_is_left_for_the_next_start(tmp_path):
    path = tmp_path / "figures.jsonl"
    wanted = [own("a/1", "count", 1000, folder=str(tmp_path)), own("a/2", "count", 50, folder=str(tmp_path))]
    assert start(path, wanted, budget=100).left == ["a/1"]
    assert [record["task"] for record in Figures(path).records] == ["a/2"]


@pytest.mark.slow
def test_a_killed_session_goes_on_and_ends_with_all_figures(tmp_path):
    """Every function but those of two ranks, each with some of its arguments, as far as a CPU goes."""
    path = tmp_path / "figures.jsonl"
    command = [sys.executable, "-m", "benchmarks.gpu_session", str(path), "--device", "cpu", "--tiny", "--only", *FEW]
    first = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    next(line for line in first.stdout if line.startswith(f"{FEW[1]}:"))
    workers = psutil.Process(first.pid).children()
    first.kill()
    first.communicate()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert workers
    assert not alive
    done = Figures(path).records
    assert 1 <= len(done) < len(FEW)

    with warm_interpreter():  # the one that is killed has processes of its own, and this one its figures from them
        second = run_command([sys.executable, *command[1:]], cwd=REPOSITORY, limit_seconds=1800)
    assert second.returncode == 0, second.stdout + path.with_suffix(".log").read_text()[-5000:]
    records = Figures(path).records
    assert records[: len(done)] == done
    assert [record["task"] for record in records] == FEW
    run = {task.function for task in tasks() if task.name in (*FEW, *OF_TWO_RANKS)}
    assert run == {task.function for task in tasks()} - set(ELSEWHERE)
    for record in records:
        assert_of_the_schema(record)
    assert "0 failed" in second.stdout


@pytest.mark.slow
def test_two_ranks_are_compared_with_one(tmp_path):
    """What each task of part `ranks` compares is proven elsewhere."""
    path = tmp_path / "figures.jsonl"
    with warm_interpreter():
        assert start(path, [task for task in tasks() if task.name == OF_TWO_RANKS[0]]).left == []
    (record,) = Figures(path).records
    assert_of_the_schema(record)
    assert record["figures"].get("is_right", True), record


def assert_of_the_schema(record: dict[str, object]) -> None:
    (outcome,) = set(record) & set(OUTCOMES)
    facts = set(FACTS) if outcome == "figures" else set()
    assert set(record) == {"part", "task", outcome, *facts}, record
    if outcome == "skipped":
        assert record["skipped"] == "it needs CUDA" or str(record["skipped"]).startswith("not installed")
        return
    figures = record["figures"]
    assert isinstance(figures, dict)
    assert figures
    assert all(isinstance(value, int | float | str | None) for value in figures.values()), record
    assert figures.get("is_right") is not False
    for name in ("median_tokens_per_second", "peak_allocated_bytes", "tokens_per_second"):
        assert figures.get(name, 1) > 0
    assert json.loads(json.dumps(record)) == record
