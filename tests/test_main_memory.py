"""Main memory: of the machine, and by the limits of the cgroups that a container or a batch system made."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from finetune.main_memory import MainMemory, read_main_memory
from finetune.training.memory.choice import free_memory

MB = 1 << 20
_FILES = {
    2: ("memory.max", "memory.current", ""),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


def write_cgroup(folder: Path, version: int, *, limit: int | str, used: int = 0, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_file, usage_file, prefix = _FILES[version]
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{used}\n")
    own = "inactive_file 1\n" if prefix else ""  # version 1: without the cgroups below
    (folder / "memory.stat").write_text(f"anon 5\n{own}{prefix}inactive_file {inactive}\n{prefix}active_file {MB}\n")


def memory_below(tmp_path: Path, membership: str) -> MainMemory:
    (tmp_path / "cgroup").write_text(membership)
    return read_main_memory(tmp_path / "fs", tmp_path / "cgroup")


@pytest.mark.parametrize(
    ("version", "mount", "membership", "unlimited"),
    [
        (2, "fs", "0::/job_1/step_0\n", "max"),
        (1, "fs/memory", "9:name=systemd:/\n4:hugetlb,memory:/job_1/step_0\n1:cpu:/other\n0::/\n", 2**63 - 4096),
    ],
)
def test_the_least_memory_of_a_cgroup_and_its_parents_counts(tmp_path, version, mount, membership, unlimited) -> None:
    step = tmp_path / mount / "job_1/step_0"
    for folder in (step, step.parent, step.parent.parent):
        write_cgroup(folder, version, limit=unlimited, used=MB)
    assert memory_below(tmp_path, membership).total == psutil.virtual_memory().total
    write_cgroup(step, version, limit=80 * MB, used=50 * MB, inactive=30 * MB)  # 31 MB of page cache can be taken back
    assert memory_below(tmp_path, membership) == (80 * MB, 61 * MB)
    write_cgroup(step.parent, version, limit=90 * MB, used=70 * MB)
    assert memory_below(tmp_path, membership) == (80 * MB, 21 * MB)
    write_cgroup(step.parent, version, limit=90 * MB, used=95 * MB)
    assert memory_below(tmp_path, membership) == (80 * MB, 0)


@pytest.mark.parametrize(("version", "mount", "controllers"), [(2, "fs", ""), (1, "fs/memory", "memory")])
def test_in_a_container_the_mount_may_begin_at_its_own_cgroup(tmp_path, version, mount, controllers) -> None:
    write_cgroup(tmp_path / mount, version, limit=64 * MB, used=9 * MB)
    assert memory_below(tmp_path, f"0:{controllers}:/docker/4711\n") == (64 * MB, 56 * MB)


def test_without_cgroups_the_memory_is_the_machines(tmp_path) -> None:
    memory = read_main_memory(tmp_path, tmp_path / "missing")
    assert memory.total == psutil.virtual_memory().total
    assert memory.available == pytest.approx(psutil.virtual_memory().available, rel=0.5)


def test_a_limit_bounds_the_memory_that_a_run_counts_as_free(monkeypatch) -> None:
    memory = MainMemory(100 * MB, 60 * MB)
    monkeypatch.setattr("finetune.training.memory.choice.read_main_memory", lambda: memory)
    assert free_memory(torch.device("cpu"), num_sharing=3) == 20 * MB
