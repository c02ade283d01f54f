"""`finetune doctor`: real processes and real faults; pure judgements where a fault cannot be made here."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from finetune.config.compose import compose
from finetune.diagnose.folder_checks import check_folders, file_system, judge_space, sees_token, write_token
from finetune.diagnose.launch_checks import check_address, check_launch, check_sharding
from finetune.diagnose.machine_checks import (
    check_backend,
    check_limits,
    check_versions,
    judge_cores,
    judge_gpus,
    judge_packages,
    judge_python,
    judge_shared_memory,
)
from finetune.diagnose.world_checks import (
    Bandwidth,
    RankMeasurement,
    _is_shared,
    judge_bandwidth,
    judge_clocks,
    judge_compute,
    judge_links,
    judge_ranks,
    judge_shared_folder,
    judge_sums,
)
from finetune.distributed.ddp_init import ProcessContext
from finetune.distributed.environment import LaunchEnvironment, read_environment
from finetune.findings import Finding, exit_code, findings_of_others, ok, problem, warning, what_and_fix
from finetune.runs.file_lock import try_file_lock
from finetune.runs.folder import existing_folder
from tests.launches import free_port, place_variables, run_launched
from tests.readable_hub import point_to, running_hub
from tests.tiny_runs import write_base
from tests.two_nodes import INTERFACE, reason_against, torchrun, two_nodes
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


def measured(rank: int, **figures: float) -> RankMeasurement:
    usual = {"compute_seconds": 0.01, "compute_cpu_seconds": 0.01, "round_trip_seconds": 2e-4 if rank else 0.0}
    facts = {"device": "cpu", "clock_offset_seconds": 0.0, "has_right_sum": True, "sees_output_dir": True}
    return RankMeasurement(rank=rank, host=f"node{rank}", **{**usual, **facts, **figures})


# Findings


def test_all_but_good_news_needs_a_fix():
    assert ok("Area", "fine").fix is None
    for level in ("warning", "problem"):
        for fix in (None, ""):
            with pytest.raises(ValueError, match="needs a fix: broken"):
                Finding("Area", level, "broken", fix)


def test_a_refusal_becomes_a_finding_with_a_fix():
    assert what_and_fix("It is so. For it is. Do this.", page="docs/data.md") == ("It is so. For it is", "Do this")
    assert what_and_fix("It is so.", page="docs/data.md") == ("It is so", "see docs/data.md")


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
    for part in ("started by no launcher: rank 0 of 1", "WORLD_SIZE=1", "torch 2.", "processor cores: ", "gloo"):
        assert part in output
    for part in ("no address is needed", "open files", "can be written", "locked", "0 problems"):
        assert part in output
    assert "Bandwidth" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.warm
def test_a_broken_launch_is_a_problem_with_a_fix_as_json_too(tmp_path):
    code, output = doctor(tmp_path, "--json", RANK="1", WORLD_SIZE="4")
    report = json.loads(output)
    assert code == report["exit_code"] == 2
    found = only_bad([Finding(**finding) for finding in report["findings"]])
    assert found.area == "This process"
    assert "missing LOCAL_RANK" in found.what
    assert "torchrun" in found.fix
    assert {"Versions", "Devices", "Folders"} <= {finding["area"] for finding in report["findings"]}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.warm
def test_strict_turns_a_warning_into_exit_code_2(tmp_path):
    code, output = doctor(tmp_path, "ddp=True", f"data.cache_dir={tmp_path}", "strict=true")
    assert "warning  ddp is true (command line), but one process was started" in output
    assert "\n           fix: start through torchrun" in output
    assert output.endswith("0 problems, 1 warning\n")
    assert code == 2


# Launch and address


def launch_findings(*words: str, **environ: str) -> list[Finding]:
    return list(check_launch(read_environment(environ), config_of(*words), environ))


def address_findings(*words: str, **environ: str) -> list[Finding]:
    return list(check_address(read_environment(environ), config_of(*words), environ))


def test_it_says_which_variables_were_read_and_which_are_defaults():
    what = launch_findings(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")[1].what
    read, derived = what.split("; by default or derived: ")
    assert read == "read from the environment: RANK=1 WORLD_SIZE=2 LOCAL_RANK=1"
    assert "MASTER_PORT=" in derived


@pytest.mark.parametrize(
    ("words", "environ", "level", "part"),
    [
        (["parallel.world_size=3"], {}, "problem", "parallel.world_size is 3 (command line) but this process was"),
        (["parallel.rank=1"], {}, "problem", "parallel.rank is 1"),
        (["ddp=False"], rank_variables(0, 1), "problem", "ddp is false (command line), but 2 processes"),
        (["parallel.num_processes=2"], {}, "warning", "train would start 2 processes here"),
        ([], {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "no"}, "problem", "FSDP"),
        ([], {"ACCELERATE_MIXED_PRECISION": "fp8"}, "problem", "fp8"),
        (["training.precision=fp32"], {"ACCELERATE_MIXED_PRECISION": "bf16"}, "problem", "mixed precision bf16"),
        ([], {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "many"}, "problem", "ACCUMULATION_STEPS is 'many'"),
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
        ([SHARDED, "parallel.num_processes=2"], {}, "ok", "2 processes would shard the weights"),
        ([], {**FOUR, **FSDP2}, "ok", "fsdp2 (accelerate's FSDP_VERSION=2): 4 processes"),
        ([SHARDED], {}, "warning", "it would be a plain run that keeps all weights"),
        ([SHARDED, "parallel.shard_size=3"], FOUR, "problem", "shard_size is 3 (command line), which does not"),
        ([SHARDED, "parallel.gradient_sync=ddp"], FOUR, "problem", "parallel.gradient_sync is ddp (command line)"),
        (["parallel.sharding=none"], {**FOUR, **FSDP2}, "problem", "but parallel.sharding is none (command line)"),
    ],
    ids=lambda value: "",
)
def test_shards_are_described_or_refused_as_training_refuses_them(words, environ, level, part):
    (found,) = check_sharding(read_environment(environ), config_of(*words), environ)
    assert found.level == level
    assert part in found.what


def test_nothing_is_said_of_shards_that_nobody_asked_for_or_that_are_refused_already():
    for environ in (FOUR, {**FOUR, "ACCELERATE_USE_FSDP": "true"}):
        assert list(check_sharding(read_environment(environ), config_of(), environ)) == []


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
    several = LaunchEnvironment(
        launcher="mpi",
        rank=1,
        local_rank=0,
        world_size=2,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=29500,
    )
    found = next(check_address(several, config_of(), {}))
    assert found.level == "warning"
    assert "on every machine 127.0.0.1 means that machine itself, but the world spans several machines" in found.what


def test_an_agent_of_torchrun_that_is_gone_is_a_problem():
    found = only_bad(address_findings(**rank_variables(0, free_port()), TORCHELASTIC_USE_AGENT_STORE="True"))
    assert (found.level, "torchrun's agent does not answer" in found.what) == ("problem", True)


# The machine


def test_versions_are_compared_with_the_packages_own_metadata():
    assert levels(check_versions()) == ["ok", "ok"]
    assert judge_python("<3").level == "problem"
    old, absent, right = judge_packages(["torch>=99", "no-such-package>=1.2", "rich>=1", "pytest>=99; extra == 'test'"])
    assert old.what == f"torch {version('torch')}, but finetune needs torch>=99"
    assert absent.what == "no-such-package is not installed, but finetune needs no-such-package>=1.2"
    assert absent.fix == "pip install 'no-such-package>=1.2'"
    assert (right.level, right.what.split()[0]) == ("ok", "rich")


def test_gpus_that_torch_does_not_use_are_found():
    def judge(count: int, has_driver: bool, cuda: str | None, wish: str) -> list[Finding]:
        return list(judge_gpus(count, has_driver=has_driver, cuda=cuda, wish=wish))

    assert levels(judge(0, False, None, "auto")) == ["ok"]
    assert levels(judge(0, True, None, "cpu")) == ["ok"]
    assert judge(2, True, "13.0", "cuda:1") == []
    cpu_build = only_bad(judge(0, True, None, "auto"))
    assert (cpu_build.level, "built for the CPU" in cpu_build.what) == ("warning", True)
    assert "install torch's build for CUDA" in cpu_build.fix
    old_driver = only_bad(judge(0, True, "13.0", "auto"))
    assert "driver may be too old" in old_driver.fix
    asked = only_bad(judge(2, True, "13.0", "cuda:2"))
    assert (asked.level, "training.device=cuda:2, but torch sees 2 GPU(s)" in asked.what) == ("problem", True)


@pytest.mark.parametrize(
    ("wish", "accelerator", "processes", "level", "words"),
    [
        ("auto", "mps", 1, "ok", "Apple GPU (mps): one process trains on it, in fp32"),
        ("mps", "mps", 1, "ok", "Apple GPU (mps)"),
        ("auto", "mps", 2, "warning", "and this run has 2"),
        ("mps", "mps", 2, "problem", "and this run has 2"),
        ("mps", None, 1, "problem", "training.device=mps, but torch sees no Apple GPU"),
        ("auto", "xpu", 1, "warning", "of type xpu, which finetune does not use: training uses the CPU"),
        ("cpu", "mps", 2, "ok", "training uses the CPU"),
        ("cpu", "xpu", 1, "ok", "training uses the CPU"),
    ],
)
def test_accelerators_that_are_not_cudas(wish, accelerator, processes, level, words):
    options = {"has_driver": False, "cuda": None, "accelerator": accelerator, "processes": processes}
    [found] = judge_gpus(0, wish=wish, **options)
    assert (found.level, words in found.what) == (level, True)
    assert level == "ok" or "training.device=" in found.fix


@pytest.mark.parametrize(
    ("cores", "threads", "processes", "on_gpu", "level"),
    [
        (2.0, 1, 2, False, "ok"),
        (8.0, 4, 2, False, "ok"),
        (8.0, 8, 2, True, "ok"),
        (8.0, 8, 2, False, "warning"),
        (1.0, 1, 2, True, "warning"),
        (0.5, 1, 1, False, "warning"),
    ],
)
def test_processors_are_judged_by_the_threads_on_them(cores, threads, processes, on_gpu, level):
    found = judge_cores(cores, threads, processes, on_gpu=on_gpu)
    assert found.level == level
    assert f"processor cores: {cores:g}" in found.what


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so nccl is right here")
def test_nccl_without_a_gpu_is_a_problem():
    assert levels(check_backend(config_of())) == ["ok"]
    assert levels(check_backend(config_of("parallel.backend=nccl"))) == ["problem"]


@pytest.mark.parametrize(("backend", "used"), [("auto", "gloo"), ("gloo", "gloo"), ("nccl", "nccl")])
def test_ranks_that_share_a_gpu_use_nccl_only_if_asked(monkeypatch, backend, used):
    for module, name in ((torch.cuda, "is_available"), (torch.distributed, "is_nccl_available")):
        monkeypatch.setattr(module, name, lambda: True)
    (found,) = check_backend(config_of("parallel.share_gpus=true", f"parallel.backend={backend}"))
    assert found.what.startswith(used)


def test_a_low_limit_of_open_files_and_small_shared_memory_are_warnings():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        found = only_bad(check_limits(config_of()))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (found.level, "at most 256 open files" in found.what) == ("warning", True)
    docker = 64 * 2**20
    assert [judge_shared_memory(docker, workers).level for workers in (0, 4)] == ["ok", "warning"]
    assert judge_shared_memory(2**30, 4).level == "ok"


# Folders


def folder_findings(tmp_path: Path, *words: str) -> list[Finding]:
    return check_folders(config_of(f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path}", *words))


def test_folders_that_can_be_used_are_ok_and_stay_as_they_are(tmp_path):
    assert levels(folder_findings(tmp_path)) == ["ok", "ok", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_an_output_dir_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", Path("/proc/run")):
        found = folder_findings(tmp_path, f"output_dir={path}")
        assert any(f"output_dir={path} cannot be written" in each.what for each in found if each.level == "problem")


def test_an_output_dir_that_holds_a_run_or_is_in_memory_is_a_warning(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    found = only_bad(folder_findings(tmp_path))
    assert (found.level, "holds a run already" in found.what) == ("warning", True)
    assert set(levels(folder_findings(tmp_path, "resume=auto"))) == {"ok"}
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("this machine has no memory file system at /dev/shm")
    in_memory = only_bad(folder_findings(tmp_path, "output_dir=/dev/shm/finetune-doctor-test/run"))
    assert (in_memory.level, "is in memory (tmpfs)" in in_memory.what) == ("warning", True)


def test_a_cache_that_cannot_be_used_is_a_problem(tmp_path):
    found = only_bad(folder_findings(tmp_path, "data.cache_dir=/proc/cache"))
    assert (found.level, "data.cache_dir=/proc/cache cannot be used" in found.what) == ("problem", True)


def test_rows_that_are_not_there_and_packages_that_their_address_needs_are_problems(tmp_path):
    gone = only_bad(folder_findings(tmp_path, "data.path=gone.jsonl"))
    assert (gone.level, gone.fix) == ("problem", "Correct the path")
    assert gone.what == "data.path is gone.jsonl, but there is no such file or folder"
    package = only_bad(folder_findings(tmp_path, "data.path=s3://bucket/rows.jsonl"))
    assert package.what.endswith("which needs a package that is not installed (Install s3fs to access S3)")
    assert package.fix == "Install it into this environment"
    assert set(levels(folder_findings(tmp_path, "data=orders"))) == {"ok"}


def test_a_model_that_is_not_here_is_found(tmp_path, monkeypatch):
    gone = only_bad(folder_findings(tmp_path, f"model.path={tmp_path / 'gone'}"))
    assert (gone.level, "no such folder" in gone.what) == ("problem", True)
    offline = only_bad(folder_findings(tmp_path, "model.path=microsoft/phi-4"))
    assert (offline.level, "HF_HUB_OFFLINE is set" in offline.what) == ("problem", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    point_to(monkeypatch, f"http://127.0.0.1:{free_port()}")
    cut_off = only_bad(folder_findings(tmp_path, "model.path=microsoft/phi-4"))
    assert (cut_off.level, "cannot be reached" in cut_off.what) == ("problem", True)
    assert cut_off.fix.startswith(
        "run `hf download microsoft/phi-4 --local-dir phi-4` on a machine that reaches the hub"
    )
    with running_hub() as hub:
        hub.folders["microsoft/phi-4"] = tmp_path
        point_to(monkeypatch, hub.address)
        to_load = only_bad(folder_findings(tmp_path, "model.path=microsoft/phi-4"))
    assert (to_load.level, to_load.fix) == ("warning", "run `hf download microsoft/phi-4` beforehand")


def test_what_full_fine_tuning_writes_is_counted(tmp_path):
    space = folder_findings(tmp_path, "model=phi_tiny", "training.method=full")[1]
    assert "this run takes about" in space.what
    assert "this run takes" not in folder_findings(tmp_path, "model=phi_tiny")[1].what


def test_a_damaged_weight_file_is_a_problem(tmp_path):
    base = write_base(tmp_path / "base")
    (base / "model.safetensors").write_bytes(b"cut off")
    found = only_bad(folder_findings(tmp_path, f"model.path={base}", "training.method=full"))
    assert (found.level, found.fix[:13]) == ("problem", "copy or downl")
    assert found.what.startswith(f"the weight file {base / 'model.safetensors'} cannot be read: ")


@pytest.mark.parametrize(
    ("free", "needed", "level"),
    [
        (10e9, None, "ok"),
        (1e9, None, "warning"),
        (1e7, None, "problem"),
        (10e9, 9e9, "ok"),
        (10e9, 11e9, "problem"),
        (1e9, 2e8, "ok"),
    ],
)
def test_free_space_is_judged_by_what_is_needed(free, needed, level):
    assert judge_space(int(free), needed and int(needed), "/runs").level == level


def test_the_file_system_is_that_of_the_longest_mount_point_and_of_the_last_mount_there(monkeypatch):
    mounts = [("/", "ext4"), ("/home", "xfs"), ("/home/my data", "lustre"), ("/home", "nfs4")]
    partitions = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: partitions)
    paths = ("/tmp", "/home/x", "/home/my data/run", "/homeless")
    assert [file_system(Path(path)) for path in paths] == ["ext4", "nfs4", "lustre", "ext4"]
    partitions.clear()
    assert file_system(Path("/tmp")) == "a file system of unknown type"


def test_a_token_is_seen_where_the_folder_is_shared_and_not_elsewhere(tmp_path):
    token = write_token(tmp_path / "not" / "there" / "yet")
    assert token is not None
    assert token.parent == existing_folder(tmp_path / "not") == tmp_path
    assert sees_token(token)
    token.unlink()
    assert not sees_token(tmp_path / "other" / token.name)
    assert write_token(Path("/proc/run")) is None


def test_no_token_stays_where_a_rank_is_lost(tmp_path, monkeypatch):
    def fail(value):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("finetune.diagnose.world_checks.gather", fail)
    with pytest.raises(RuntimeError):
        _is_shared(ProcessContext(True, 0, 0, 2, torch.device("cpu")), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_process_is_not_taken_for_a_broken_one(tmp_path):
    held = try_file_lock(tmp_path / "lock")
    assert held is not None
    with held:
        assert set(levels(folder_findings(tmp_path))) == {"ok"}


# Several processes


@pytest.mark.launch
@pytest.mark.warm
def test_under_torchrun_it_forms_the_world_and_reports_once(tmp_path):
    words = ["-m", "finetune", "doctor", "quickstart", f"data.cache_dir={tmp_path / 'cache'}"]
    done = run_launched("torchrun", words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("This process") == 1
    for part in ("started by torchrun: rank 0 of 2", "torchrun's agent answers", "2 ranks came together"):
        assert done.stdout.count(part) == 1, done.stdout
    for part in ("rank 0 on ", "rank 1 on ", "to rank 0 and back", "give the right sum on every rank", "all ranks see"):
        assert part in done.stdout
    for size in (1, 16, 64):
        assert f"all-reduce of {size} MB: " in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.launch
@pytest.mark.warm
def test_what_only_another_rank_finds_is_in_the_report_with_its_rank(tmp_path):
    port = free_port()
    variables = rank_variables(1, port)
    other = start(*DOCTOR, "--json", f"data.cache_dir={tmp_path}", "parallel.rank=0", cwd=tmp_path, **variables)
    try:
        code, output = doctor(tmp_path, "--json", f"data.cache_dir={tmp_path}", **rank_variables(0, port))
        assert other.communicate(timeout=240)[0] == ""
    finally:
        other.kill()
    found = [finding["what"] for finding in json.loads(output)["findings"] if finding["level"] == "problem"]
    contradiction = "parallel.rank is 0 (command line) but spawn started this process with RANK=1, WORLD_SIZE=2"
    assert found == [f"rank 1 on {socket.gethostname()}: {contradiction}"], output
    assert code == other.returncode == 2


@pytest.mark.launch
@pytest.mark.warm
def test_a_rank_that_never_comes_is_named_in_time(tmp_path):
    started = time.monotonic()
    code, output = doctor(tmp_path, "parallel.timeout_minutes=0.05", **rank_variables(0, free_port()))
    assert time.monotonic() - started < 3 + 10 + START_UP_SECONDS
    assert code == 2
    before, _, world = output.partition("World\n")
    assert "port " in before, "this rank's own findings are printed before the world is tried"
    assert "problem" in world
    assert "rank 1 of 2 did not join" in world, output
    assert "fix: look at the output of the ranks" in world


@pytest.mark.launch
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
    assert "stopped answering while it was measured" in output
    assert "1" in output[output.index("measured: ") :].split("fix:")[0], output


@pytest.mark.launch
def test_a_slow_rank_is_named(tmp_path):
    """Rank 1 is stopped for three quarters of the time, as by other work on its core."""
    port = free_port()
    words = [*DOCTOR, f"data.cache_dir={tmp_path}", "--json"]
    ranks = [start(*words, cwd=tmp_path, **rank_variables(rank, port)) for rank in (0, 1)]
    until = time.monotonic() + 120
    try:
        rank_1 = psutil.Process(ranks[1].pid)
        while not any(each.raddr and each.raddr.port == port for each in rank_1.net_connections("tcp")):
            assert ranks[1].poll() is None, ranks[1].communicate()[1]
            assert time.monotonic() < until
            time.sleep(0.01)  # it imports, which would take four times as long
        while ranks[0].poll() is None and time.monotonic() < until:
            ranks[1].send_signal(signal.SIGSTOP)
            time.sleep(0.06)
            ranks[1].send_signal(signal.SIGCONT)
            time.sleep(0.02)
        output, errors = ranks[0].communicate(timeout=240)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert output, errors
    slow = [each for each in json.loads(output)["findings"] if "is slow: it needs" in each["what"]]
    assert [each["what"].split(" on ")[0] for each in slow] == ["rank 1"], output
    assert "it waits for its processor" in slow[0]["what"]


NO_NODES = reason_against() or (None if shutil.which("tc") else "tc not found; apt-get install iproute2")
HIDES_ON_NODE_1 = 'test %n = 0 || mount -t tmpfs none "$1"; shift; exec "$@"'


CHECKS_THE_ADDRESS = """
from finetune.config.compose import compose
from finetune.distributed.environment import read_environment
from finetune.diagnose.launch_checks import check_address
environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node0"}
for finding in check_address(read_environment(environ), compose([], complete=False), environ):
    print(finding.level, finding.what, finding.fix)
"""


@pytest.mark.launch
@pytest.mark.skipif(NO_NODES is not None, reason=str(NO_NODES))
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("own_name", "level"), [("address", "ok"), ("loopback", "warning")])
def test_a_name_that_torchrun_would_give_others_in_vain_is_found_on_two_nodes(own_name, level):
    """As Debian and Ubuntu set it up: a machine's own name means 127.0.1.1 to itself."""
    with two_nodes(own_name) as nodes:
        _, (_, output) = nodes.run([sys.executable, "-c", CHECKS_THE_ADDRESS])
    assert output.startswith(level), output
    assert ("--local_addr" in output) == (level == "warning")


@pytest.mark.launch
@pytest.mark.warm
@pytest.mark.skipif(NO_NODES is not None, reason=str(NO_NODES))
def test_a_slow_network_and_a_folder_that_is_not_shared_are_found_on_two_nodes(tmp_path):
    words = ["-m", "finetune", "doctor", f"output_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path}", "resume=auto"]
    with two_nodes() as nodes:
        limit = ["rate", "300mbit", "burst", "256kbit", "latency", "400ms"]
        shape = ["tc", "-netns", nodes.nodes[0].namespace, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit]
        subprocess.run(shape, check=True)
        hidden = ["unshare", "--mount", "sh", "-c", HIDES_ON_NODE_1, "sh", tmp_path, *torchrun(1), *words]
        (_, output), (_, other) = nodes.run(hidden)
    assert "started by torchrun: rank 0 of 2, local rank 0 of 1, on node0" in output
    assert "rank 1 on node1: output_dir=" in output  # a finding of rank 1's own
    assert "problem  rank 1 on node1 cannot see rank 0's output_dir" in output
    assert "warning  the network is slow: 0.03" in output  # 300 Mbit/s are 0.0375 GB/s
    assert "World" not in other


# What figures mean


def test_a_rank_that_computes_slower_is_named_with_its_reason():
    assert list(judge_compute([measured(0), measured(1, compute_seconds=0.014)])) == []
    (busy,) = judge_compute([measured(0), measured(1), measured(2, compute_seconds=0.031)])
    assert busy.what == "rank 2 on node2 is slow: it needs 3.1x the median (it waits for its processor)"
    assert "top on node2" in busy.fix
    (old,) = judge_compute([measured(0), measured(1, compute_seconds=0.03, compute_cpu_seconds=0.03)])
    assert "computes slower" in old.what
    (gpu,) = judge_compute([measured(0, device="cuda:0"), measured(1, device="cuda:1", compute_seconds=0.05)])
    assert "cuda:1" in gpu.fix


def test_a_slow_link_is_named_against_the_others_and_when_it_is_the_only_one():
    near = [measured(rank) for rank in range(4)]
    assert list(judge_links(near)) == []
    assert list(judge_links([*near, measured(4, round_trip_seconds=4e-3)])) == []
    (far,) = judge_links([*near, measured(4, round_trip_seconds=6e-3)])
    assert "the link of rank 4 on node4 is slow: to rank 0 and back takes 6 ms" in far.what
    assert len(list(judge_links([measured(0), measured(1, round_trip_seconds=0.06)]))) == 1
    assert list(judge_links([measured(0), measured(1, round_trip_seconds=0.02)])) == []


def test_clocks_sums_and_folders_of_ranks_are_judged():
    right = [measured(0), measured(1)]
    assert list(judge_clocks(right)) == []
    assert (
        "rank 1 on node1 differs from rank 0's by -3.5 s"
        in next(judge_clocks([*right[:1], right[1]._replace(clock_offset_seconds=-3.5)])).what
    )
    assert judge_sums(right).level == "ok"
    assert judge_sums([right[0], measured(1, has_right_sum=False)]).level == "problem"
    assert judge_shared_folder(right, is_needed=True).level == "ok"
    blind = [right[0], measured(1, sees_output_dir=False)]
    assert [judge_shared_folder(blind, is_needed=needed).level for needed in (False, True)] == ["warning", "problem"]
    unwritten = [measured(rank, sees_output_dir=None) for rank in (0, 1)]
    assert not any("output_dir" in found.what for found in judge_ranks(unwritten, needs_shared_folder=True))
    assert set(levels(judge_ranks(right, needs_shared_folder=True))) == {"ok"}


def test_bandwidth_is_that_of_nccl_tests_and_a_slow_network_is_a_warning():
    each = Bandwidth(num_bytes=64_000_000, seconds=0.016, world_size=4)
    assert each.algorithm_gigabytes == pytest.approx(4.0)
    assert each.bus_gigabytes == pytest.approx(6.0)  # x 2 (n-1)/n
    assert set(levels(judge_bandwidth(1e-4, [each]))) == {"ok"}
    slow = only_bad(judge_bandwidth(1e-4, [each._replace(seconds=2.0)]))
    assert (slow.level, "0.048 GB/s" in slow.what) == ("warning", True)
