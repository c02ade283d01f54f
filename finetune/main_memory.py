"""Read how much main memory this process may use, and how often the kernel has killed a process for it.

A container (`docker run --memory`, Kubernetes) and a batch system (`sbatch --mem`) limit the memory of a cgroup. When a
process needs more, the kernel kills it. psutil and /proc/meminfo only know the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
"""In version 2 and in version 1 of cgroups: the files with the limit and the usage, and the page cache's names in
memory.stat."""


class MainMemory(NamedTuple):
    """Main memory in bytes, without swap."""

    total: int
    available: int


def read_main_memory(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> MainMemory:
    """Return the memory of the machine, or of the cgroup of this process that leaves the least.

    The page cache of a cgroup is available: the kernel takes it back before it kills a process. /proc/meminfo counts
    the page cache of the machine in the same way.
    """
    import psutil

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    for folder in _cgroups(root, membership):
        for limit_file, usage_file, cache_names in _FILES:
            with suppress(OSError, ValueError):  # another version, or no limit: `max`
                limit = int((folder / limit_file).read_text())
                used = int((folder / usage_file).read_text())
                lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used -= sum(int(number) for name, number in lines if name in cache_names)
                total, available = min(total, limit), max(0, min(available, limit - used))
    return MainMemory(total, available)


def _cgroups(root: Path, membership: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups with memory files, and of their parents, which limit it as well."""
    with suppress(OSError, ValueError):  # no Linux, or a name that is not UTF-8
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            # In a container, the mount may begin at the container's own cgroup, and `path` at one outside of it.
            mount = root / "memory" if controllers else root
            folder = mount / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount) and each.is_dir())


def memory_kills() -> dict[str, int]:
    """Return how often this kernel has killed a process for memory, by the id of its boot; empty if it does not say."""
    with suppress(OSError, ValueError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return {boot: int(Path("/proc/vmstat").read_text(encoding="ascii").partition("\noom_kill ")[2].split()[0])}
    return {}
