"""`finetune doctor`: real processes and real faults; pure judgements where a fault cannot be made here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from finetune.config.compose import compose
from finetune.diagnose import machine_checks
from finetune.diagnose.launch_checks import check_address, check_launch, check_sharding
from finetune.diagnose.machine_checks import (
    check_devices,
    check_folders,
    check_versions,
    judge_cores,
    judge_packages,
    judge_shared_memory,
    judge_space,
    sees_file,
    write_marker,
)
from finetune.distributed.environment import LaunchEnvironment, read_environment
from finetune.errors import SUMMARY
from finetune.findings import Finding, exit_code, findings_of_others, ok, problem, warning
from finetune.runs.folder import existing_folder
from tests.distributed.launcher_variables import SRUN_ONE_TASK
from tests.in_process import run_finetune
from tests.launches import free_port, place_variables, run_launched
from tests.readable_hub import point_to, running_hub
from tests.two_nodes import reason_against, torchrun, two_nodes
from tests.warm import with_interpreter

DOCTOR = [sys.executable, "-m", "finetune", "doctor"]
START_UP_SECONDS = 30  # importing torch while other processes hold the cores
JOINS_AND_HANGS = """
import sys, time
from datetime import timedelta
from finetune.distributed.ddp_init import initialize_ddp
print("imported", flush=True)
initialize_ddp(timedelta(seconds=60))
time.sleep(60)
"""


def rank_variables(rank: int, port: int) -> dict[str, str]:
    return place_variables(rank, 2, port)


def start(*words: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **variables}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(with_interpreter(words), cwd=cwd, env=environment, **streams)


def doctor(cwd: Path, *words: str | Path, **variables: str) -> tuple[int, str]:
    """Exit code and output of one process."""
    process = start(*DOCTOR, *words, cwd=cwd, **variables)
    try:
        output, errors = process.communicate(timeout=240)
    finally:
        process.kill()
    assert "Traceback" not in errors, errors
    return process.returncode, output + errors


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def only_bad(findings: list[Finding]) -> Finding:
    (found,) = (finding for finding in findings if finding.level != "ok")
    return found


def config_of(*words: str):
    return compose(words, complete=False)


# Findings


def test_warnings_count_only_when_strict():
    findings = [ok("a", "b"), warning("a", "c", "d")]
    assert [exit_code(findings, strict=strict) for strict in (False, True)] == [0, 2]
    assert [exit_code([*findings, problem("a", "e", "f")], strict=strict) for strict in (False, True)] == [2, 2]
    assert exit_code(findings[:1], strict=True) == 0


def test_findings_of_other_ranks_say_whose_they_are():
    everywhere, here, shared = (problem("a", what, "x") for what in ("everywhere", "here", "shared"))
    by_rank = [[ok("a", "0"), everywhere, shared], [ok("a", "1"), everywhere, here, here], [everywhere, shared]]
    merged = findings_of_others(by_rank, ["n0", "n1", "n2"])
    assert [finding.what for finding in merged] == ["rank 2 on n2: shared", "rank 1 on n1: here"]
    many = findings_of_others([[], *([here] for _ in range(6))], [f"n{rank}" for rank in range(7)])
    assert many[0].what == "rank 1 on n1, rank 2 on n2, rank 3 on n3, rank 4 on n4 and 2 more: here"


# One process


@pytest.mark.process
def test_alone_it_reports_on_every_area_and_leaves_nothing_behind(tmp_path):
    code, output = doctor(tmp_path, "quickstart", f"data.cache_dir={tmp_path / 'cache'}")
    assert code == 0, output
    started = ("started by no launcher: rank 0 of 1", "torch 2.", "processor cores: ", "precision fp32")
    for part in (*started, "no address is needed", "shared memory", "can be written", "locked", "0 problems"):
        assert part in output
    assert list(tmp_path.iterdir()) == []


def test_a_broken_launch_is_a_problem_with_a_fix_as_json_too(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    ended = run_finetune("doctor", "--json")
    report = json.loads(ended.answer)
    assert ended.returncode == report["exit_code"] == 2
    found = only_bad([Finding(**finding) for finding in report["findings"]])
    assert found.area == "This process"
    assert "missing LOCAL_RANK" in found.what
    assert "torchrun" in found.fix
    assert {"Versions", "Devices", "Folders"} <= {finding["area"] for finding in report["findings"]}


# Launch and address


def launch_findings(*words: str, **environ: str) -> list[Finding]:
    return list(check_launch(read_environment(environ), config_of(*words), environ))


def address_findings(*words: str, **environ: str) -> list[Finding]:
    return list(check_address(read_environment(environ), config_of(*words), environ))


@pytest.mark.parametrize(
    ("words", "environ", "level", "part"),
    [
        (["parallel.world_size=3"], {}, "problem", "parallel.world_size is 3 (command line) but this process was"),
        (["ddp=False"], rank_variables(0, 1), "problem", "ddp is false (command line), but 2 processes"),
        (["parallel.num_processes=2"], {}, "warning", "train would start 2 processes here"),
        (["parallel.num_processes=2"], SRUN_ONE_TASK, "warning", "train would start 2 processes here"),
        ([], {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "no"}, "problem", "FSDP"),
        ([], {"ACCELERATE_MIXED_PRECISION": "fp8"}, "problem", "fp8"),
        ([], {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "warning", "body of a Slurm batch script"),
    ],
    ids=lambda value: "",
)
def test_what_contradicts_the_launch_is_found(words, environ, level, part):
    found = only_bad(launch_findings(*words, **environ))
    assert found.level == level
    assert part in found.what
    assert set(levels(launch_findings())) == {"ok"}


SHARDED = "parallel.sharding=fsdp2"
FOUR = {**rank_variables(0, 1), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("words", "environ", "level", "part"),
    [
        ([SHARDED], FOUR, "ok", "fsdp2 (command line): 4 processes would shard the weights"),
        ([SHARDED, "parallel.shard_size=2"], FOUR, "ok", "2 processes would shard the weights, in 2 copies"),
        ([], {**FOUR, **FSDP2}, "ok", "fsdp2 (accelerate's FSDP_VERSION=2): 4 processes"),
        ([SHARDED], {}, "warning", "it would be a plain run that keeps all weights"),
        ([SHARDED, "parallel.shard_size=3"], FOUR, "problem", "shard_size is 3 (command line), which does not"),
        (["parallel.sharding=none"], {**FOUR, **FSDP2}, "problem", "but parallel.sharding is none (command line)"),
    ],
    ids=lambda value: "",
)
def test_shards_are_described_or_refused_as_training_refuses_them(words, environ, level, part):
    (found,) = check_sharding(read_environment(environ), config_of(*words), environ)
    assert (found.level, part in found.what) == (level, True)
    assert list(check_sharding(read_environment(FOUR), config_of(), FOUR)) == []


def test_a_held_port_is_a_problem_for_several_processes_and_a_warning_for_one():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        found = address_findings(**rank_variables(0, port))[-1]
        assert found.level == "problem"
        assert f"port {port} of {socket.gethostname()} is not free to listen on" in found.what
        assert f"sport = :{port}" in found.fix
        assert levels(address_findings(f"parallel.master_port={port}")) == ["warning"]
        assert levels(address_findings(MASTER_PORT=str(port))) == ["warning"]
        assert levels(address_findings(**rank_variables(1, port))) == ["ok"]  # rank 0's to look at
    assert levels(address_findings(**rank_variables(0, free_port()))) == ["ok"]


def test_an_address_that_leads_nowhere_or_elsewhere_is_found():
    variables = {**rank_variables(0, free_port()), "MASTER_ADDR": "no-such-host.invalid"}
    unknown = only_bad(address_findings(**variables))
    assert unknown.level == "problem"
    assert "no-such-host.invalid cannot be resolved" in unknown.what
    # 192.0.2.0/24 is kept for documentation (RFC 5737): no machine has it.
    elsewhere = only_bad(address_findings(**{**variables, "MASTER_ADDR": "192.0.2.1"}))
    assert (elsewhere.level, "no address of this machine" in elsewhere.what) == ("warning", True)


def test_a_loopback_address_cannot_join_several_machines():
    world = {"rank": 1, "local_rank": 0, "world_size": 2, "local_world_size": 1}
    several = LaunchEnvironment(launcher="mpi", master_addr="127.0.0.1", master_port=29500, **world)
    found = next(check_address(several, config_of(), {}))
    assert found.level == "warning"
    assert "on every machine 127.0.0.1 means that machine itself, but the world spans several machines" in found.what


def test_an_agent_of_torchrun_that_is_gone_is_a_problem():
    found = only_bad(address_findings(**rank_variables(0, free_port()), TORCHELASTIC_USE_AGENT_STORE="True"))
    assert (found.level, "torchrun's agent does not answer" in found.what) == ("problem", True)


# The machine


def test_versions_are_compared_with_the_packages_own_metadata():
    assert levels(check_versions()) == ["ok", "ok"]
    old, absent, right = judge_packages(["torch>=99", "no-such-package>=1.2", "rich>=1", "pytest>=99; extra == 'test'"])
    assert old.what == f"torch {version('torch')}, but finetune needs torch>=99"
    assert absent.what == "no-such-package is not installed, but finetune needs no-such-package>=1.2"
    assert absent.fix == "pip install 'no-such-package>=1.2'"
    assert (right.level, right.what.split()[0]) == ("ok", "rich")


def test_a_checkout_that_was_installed_under_its_old_name_is_compared_too(tmp_path, monkeypatch):
    about = tmp_path / "finetune-0.1.0.dist-info" / "METADATA"
    about.parent.mkdir()
    head = "Metadata-Version: 2.1\nName: finetune\nVersion: 0.1.0\n"
    monkeypatch.setattr(machine_checks, "DISTRIBUTION", "not-installed-here")
    monkeypatch.syspath_prepend(tmp_path)
    about.write_text(f"{head}Summary: {SUMMARY}: one loss curve\nRequires-Dist: torch>=99\n")
    assert levels(check_versions()) == ["ok", "problem", "ok"]
    about.write_text(f"{head}Summary: UNKNOWN\nRequires-Dist: torch>=99\n")  # the other product of this name
    assert [finding.what for finding in check_versions()][1].startswith("not-installed-here is not installed")


def device_findings(*words: str, **environ: str) -> list[Finding]:
    return list(check_devices(config_of(*words), read_environment(environ), environ))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_training_would_not_use_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert set(levels(device_findings())) == {"ok"}
    asked = only_bad(device_findings("training.device=cuda:2"))
    assert (asked.level, "training uses cpu, but cuda:2 was asked for" in asked.what) == ("problem", True)
    with monkeypatch.context() as patch:
        patch.setattr("torch.backends.mps.is_available", lambda: True)
        refused = only_bad(device_findings("training.device=mps", **rank_variables(0, 1)))
    assert (refused.level, "mps computes in one process alone" in refused.what) == ("problem", True)
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    unused = only_bad(device_findings())
    assert (unused.level, "training uses cpu, but cuda is here" in unused.what) == ("warning", True)
    assert "install torch's build for CUDA" in unused.fix
    assert set(levels(device_findings("training.device=cpu"))) == {"ok"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(("accelerator", "part"), [("mps", "start one process"), ("xpu", "set training.device=cpu")])
def test_an_accelerator_that_the_launch_cannot_use_is_a_warning(monkeypatch, accelerator, part):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr("finetune.diagnose.machine_checks.accelerator_type", lambda: accelerator)
    unused = only_bad(device_findings(**rank_variables(0, 1)))
    assert (unused.level, part in unused.fix) == ("warning", True)
    assert f"training uses cpu, but {accelerator} is here" in unused.what


def test_the_precision_is_reported_or_refused_as_training_refuses_it(monkeypatch):
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    words = ["training.device=cpu", "training.precision=fp32"]
    assert "precision fp32 (training.precision=fp32)" in [found.what for found in device_findings(*words)]
    refused = only_bad(device_findings(*words, ACCELERATE_MIXED_PRECISION="bf16"))
    assert (refused.level, "mixed precision bf16" in refused.what) == ("problem", True)


def test_processors_shared_memory_and_space_are_judged_by_what_a_run_needs():
    for cores, threads, processes, level in ((2, 1, 2, "ok"), (8, 8, 2, "warning"), (0.5, 1, 1, "warning")):
        assert judge_cores(cores, threads, processes).level == level
    docker = 64 * 2**20
    assert [judge_shared_memory(docker, workers).level for workers in (0, 4)] == ["ok", "warning"]
    assert judge_shared_memory(2**30, 4).level == "ok"
    assert [judge_space(free, Path("/runs")).level for free in (10**10, 10**9, 10**7)] == ["ok", "warning", "problem"]


# Folders


def folder_findings(tmp_path: Path, *words: str) -> list[Finding]:
    return list(check_folders(config_of(f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path}", *words)))


def test_folders_that_can_be_used_are_ok_and_stay_as_they_are(tmp_path):
    assert levels(folder_findings(tmp_path)) == ["ok", "ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_an_output_dir_that_holds_a_run_is_a_warning(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    found = only_bad(folder_findings(tmp_path))
    assert (found.level, "holds a run already" in found.what) == ("warning", True)
    assert set(levels(folder_findings(tmp_path, "resume=auto"))) == {"ok"}


@pytest.mark.parametrize(
    ("word", "part"),
    [
        ("output_dir=/proc/run", "output_dir=/proc/run cannot be written"),
        ("data.path=gone.jsonl", "data.path is gone.jsonl, but there is no such file or folder"),
        ("data.path=s3://bucket/rows.jsonl", "a package that is not installed (Install s3fs to access S3)"),
        ("model.path=/gone", "no such folder"),
        ("model.path=microsoft/phi-4", "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_read_or_written_is_a_problem(tmp_path, word, part):
    found = [each.what for each in folder_findings(tmp_path, word) if each.level == "problem"]
    assert part in found[0]


def test_a_cache_that_cannot_be_written_is_a_problem_for_a_strict_run_alone(tmp_path):
    """Other runs take a fallback: they encode the rows at every start."""
    for strict, level in (("false", "warning"), ("true", "problem")):
        found = only_bad(folder_findings(tmp_path, "data.cache_dir=/proc/cache", f"strict={strict}"))
        assert (found.level, "data.cache_dir=/proc/cache cannot be used" in found.what) == (level, True)


def test_a_model_that_must_be_loaded_from_the_hub_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    point_to(monkeypatch, f"http://127.0.0.1:{free_port()}")
    cut_off = only_bad(folder_findings(tmp_path, "model.path=microsoft/phi-4"))
    assert (cut_off.level, "cannot be reached" in cut_off.what) == ("problem", True)
    assert "`hf download microsoft/phi-4 --local-dir phi-4`" in cut_off.fix
    with running_hub() as hub:
        hub.folders["microsoft/phi-4"] = tmp_path
        point_to(monkeypatch, hub.address)
        to_load = only_bad(folder_findings(tmp_path, "model.path=microsoft/phi-4"))
    assert (to_load.level, to_load.fix) == ("warning", "run `hf download microsoft/phi-4` beforehand")


def test_a_marker_is_seen_where_the_folder_is_shared_and_not_elsewhere(tmp_path):
    marker = write_marker(tmp_path / "not" / "there" / "yet")
    assert marker is not None
    assert marker.parent == existing_folder(tmp_path / "not") == tmp_path
    assert sees_file(marker)
    marker.unlink()
    assert not sees_file(tmp_path / "other" / marker.name)
    assert write_marker(Path("/proc/run")) is None


# Several processes


@pytest.mark.slow
@pytest.mark.warm
def test_under_torchrun_it_forms_the_world_and_reports_once(tmp_path):
    words = ["-m", "finetune", "doctor", "quickstart", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_launched("torchrun", words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("This process") == 1
    for part in ("started by torchrun: rank 0 of 2", "torchrun's agent answers", "2 ranks on one machine joined"):
        assert done.stdout.count(part) == 1, done.stdout
    for part in ("gives the right sum on every rank", "all ranks see"):
        assert part in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.warm
def test_what_only_one_rank_finds_is_in_the_report_and_in_the_exit_code_of_all(tmp_path):
    port, words = free_port(), ["--json", f"data.cache_dir={tmp_path}"]
    other = start(*DOCTOR, *words, "parallel.rank=0", cwd=tmp_path, **rank_variables(1, port))
    try:
        code, output = doctor(tmp_path, *words, **rank_variables(0, port))
        assert other.communicate(timeout=240)[0] == ""
    finally:
        other.kill()
    found = [finding["what"] for finding in json.loads(output)["findings"] if finding["level"] == "problem"]
    (what,) = found
    assert what.startswith(f"rank 1 on {socket.gethostname()}: parallel.rank is 0 (command line) but ")
    assert code == other.returncode == 2


@pytest.mark.slow
@pytest.mark.warm
def test_a_rank_that_never_comes_is_named_in_time(tmp_path):
    started = time.monotonic()
    code, output = doctor(tmp_path, "parallel.timeout_minutes=0.05", **rank_variables(0, free_port()))
    assert time.monotonic() - started < 3 + 10 + START_UP_SECONDS
    assert code == 2
    before, _, world = output.partition("World\n")
    assert "port " in before, "this rank's own findings are printed before the world is tried"
    assert "rank 1 of 2 did not join" in world, output


@pytest.mark.slow
@pytest.mark.warm
def test_a_rank_that_came_and_hangs_is_named(tmp_path):
    port = free_port()
    script = tmp_path / "hangs.py"
    script.write_text(JOINS_AND_HANGS)
    other = start(sys.executable, script, cwd=tmp_path, **rank_variables(1, port))
    try:
        assert other.stdout.readline() == "imported\n"  # so the doctor's 6 seconds are not spent on another's imports
        code, output = doctor(tmp_path, "parallel.timeout_minutes=0.1", **rank_variables(0, port))
    finally:
        other.kill()
        other.communicate()
    assert code == 2
    reason = output.partition("then one stopped answering: ")[2].partition("fix:")[0]
    assert "1" in reason, output


NO_NODES = reason_against()
HIDES_ON_NODE_1 = 'test %n = 0 || mount -t tmpfs none "$1"; shift; exec "$@"'
CHECKS_THE_ADDRESS = """
from finetune.config.compose import compose
from finetune.distributed.environment import read_environment
from finetune.diagnose.launch_checks import check_address
environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0"}
for finding in check_address(read_environment(environ), compose([], complete=False), environ):
    print(finding.level, finding.what, finding.fix)
"""


@pytest.mark.slow
@pytest.mark.skipif(NO_NODES is not None, reason=str(NO_NODES))
def test_a_name_that_torchrun_would_give_others_in_vain_is_found_on_two_nodes():
    """As Debian and Ubuntu set it up: a machine's own name means 127.0.1.1 to itself."""
    with two_nodes("loopback") as nodes:
        _, (_, output) = nodes.run([sys.executable, "-c", CHECKS_THE_ADDRESS])
    assert output.startswith("warning"), output
    assert "--local_addr" in output


@pytest.mark.slow
@pytest.mark.warm
@pytest.mark.skipif(NO_NODES is not None, reason=str(NO_NODES))
def test_a_folder_that_is_not_shared_is_found_on_two_nodes(tmp_path):
    words = ["-m", "finetune", "doctor", f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path}", "resume=auto"]
    with two_nodes() as nodes:
        hidden = ["unshare", "--mount", "sh", "-c", HIDES_ON_NODE_1, "sh", tmp_path, *torchrun(1), *words]
        (_, output), (_, other) = nodes.run(hidden)
    assert "started by torchrun: rank 0 of 2, local rank 0 of 1, on node0" in output
    assert "problem  rank 1 on node1 cannot see rank 0's output_dir" in output
    assert "World" not in other
