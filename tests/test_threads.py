"""How OpenMP's threads wait: chosen before torch loads, unless the user has chosen."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from finetune.threads import Waiting, choose_waiting, is_for_one_thread, num_cores, share_cores

DEFAULT = choose_waiting({}, is_torch_loaded=False)


def test_the_default_is_between_sleeping_at_once_and_spinning_for_milliseconds():
    assert DEFAULT.chosen_by == "finetune"
    assert 0 < int(DEFAULT.variables["GOMP_SPINCOUNT"]) < 300_000


@pytest.mark.parametrize("is_torch_loaded", [False, True])
@pytest.mark.parametrize(
    "given",
    [{"OMP_WAIT_POLICY": "passive"}, {"GOMP_SPINCOUNT": "0"}, {"KMP_BLOCKTIME": "1", "OMP_WAIT_POLICY": "active"}],
)
def test_the_users_own_settings_win(given, is_torch_loaded):
    environ = {"PATH": "/bin", "OMP_NUM_THREADS": "2", **given}
    assert choose_waiting(environ, is_torch_loaded=is_torch_loaded) == Waiting(given, "user")


def test_a_number_of_threads_or_an_empty_variable_says_nothing_about_waiting():
    assert choose_waiting({"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": ""}, is_torch_loaded=False) == DEFAULT


def test_a_process_that_finetune_started_knows_whose_choice_it_inherits():
    assert choose_waiting({"PATH": "/bin", **DEFAULT.variables}, is_torch_loaded=False) == DEFAULT


@pytest.mark.parametrize(
    ("width", "given", "is_one"),
    [(128, {}, True), (3072, {}, False), (None, {}, False), (128, {"OMP_NUM_THREADS": "2"}, False)],
)
def test_one_thread_is_for_narrow_models_where_the_user_has_not_said_how_many(width, given, is_one):
    assert is_for_one_thread(width, given) is is_one


def test_after_torch_it_is_too_late_and_the_log_says_so():
    late = choose_waiting({}, is_torch_loaded=True)
    assert late == Waiting({}, "OpenMP")
    assert "torch was loaded before finetune" in str(late)


def test_cores_are_those_of_the_affinity_and_of_the_containers_limit(tmp_path):
    here = len(os.sched_getaffinity(0))
    assert num_cores(tmp_path) == here
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert num_cores(tmp_path) == here
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert num_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert num_cores(tmp_path) == here
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("25000\n")
    assert num_cores(tmp_path) == 0.25


@pytest.mark.parametrize(
    ("given", "threads"), [({}, "2"), ({"OMP_NUM_THREADS": ""}, "2"), ({"OMP_NUM_THREADS": "7"}, "7")]
)
def test_processes_share_the_cores_unless_the_user_has_said_how_many(given, threads, monkeypatch):
    monkeypatch.setattr("finetune.threads.num_cores", lambda: 6.5)
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    share_cores(3)
    assert os.environ["OMP_NUM_THREADS"] == threads


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch's wheels for other systems bring another OpenMP")
@pytest.mark.parametrize(
    ("imports", "count", "said"),
    [
        ("finetune, torch", DEFAULT.variables["GOMP_SPINCOUNT"], str(DEFAULT)),
        ("torch, finetune", "300000", "OpenMP's own way of waiting, because torch was loaded before finetune"),
    ],
)
def test_openmp_itself_reports_the_setting_when_torch_loads_it(imports, count, said):
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_", "KMP_"))}
    code = f"import {imports}; from finetune.threads import set_waiting; print(set_waiting())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ours | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{count}'" in done.stderr
    assert done.stdout.strip() == said
