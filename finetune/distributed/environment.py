"""Read a process's place in its launch from the launcher's environment variables.

Only this module knows these variables by name. The settings of accelerate are in `accelerate_settings`.

Each family of launchers passes rank and sizes under names of its own (`_Family`). Only the first family that is
present counts: `srun torchrun …` and `mpirun` inside a Slurm job are normal, and there RANK differs from SLURM_PROCID
by design.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from finetune.errors import LaunchError
from finetune.signals import after_fork_in_child

Launcher = Literal["torchrun", "accelerate", "spawn", "mpi", "slurm", "none"]

DEFAULT_MASTER_ADDR = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
SPAWN_RUN_ID_PREFIX = "finetune-spawn-"
"""The run id of our own local spawn begins so. It sets torchrun's variables, but nobody typed torchrun."""
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
"""Names the network interface that gloo listens on."""
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""torch.distributed and Accelerate read these; `initialize_ddp` writes those that a launcher left out."""

_parent_pid = os.getppid()
"""From the start of this process: a launcher may be gone before anybody asks for it."""


def _note_parent() -> None:
    global _parent_pid
    _parent_pid = os.getppid()


after_fork_in_child(_note_parent)


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """This process's place in its launch, as the launcher's variables describe it."""

    launcher: Launcher
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str
    master_port: int
    launch_id: str = ""
    """Tells this launch from another one at the same address, if the launcher has an id for it."""
    is_one_machine: bool = False
    """Whether the launcher says that all processes of this launch are on this machine."""
    is_address_missing: bool = False
    """Whether the launcher says that there are several machines, and nothing says where rank 0 is."""

    @property
    def may_spawn(self) -> bool:
        """Whether this process may start the processes of `parallel.num_processes`: no launcher has started several.

        A single task of Slurm may: in the shell of `srun --pty bash`, a second srun would wait for the first to end.
        """
        return self.launcher == "none" or (self.launcher == "slurm" and self.world_size == 1)

    def as_variables(self) -> dict[str, str]:
        """Return this place under the names that torch.distributed and Accelerate read."""
        sizes = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return _as_launch_variables(*sizes, self.master_addr, self.master_port)


@dataclass(frozen=True)
class _Family:
    """The environment variables of a family of launchers. Where a text lists several, the first that is set counts."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""

    @property
    def names(self) -> list[str]:
        return f"{self.rank} {self.world_size} {self.local_rank} {self.local_world_size}".split()

    def is_present(self, environ: Mapping[str, str]) -> bool:
        """Return whether a variable is set that says which process this is."""
        return any(name in environ for name in f"{self.rank} {self.world_size} {self.local_rank}".split())


_OF_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_TORCH = _Family("torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = (
    _Family("Open MPI", *(f"OMPI_COMM_WORLD_{number}" for number in _OF_WORLD)),
    _Family("MVAPICH", *(f"MV2_COMM_WORLD_{number}" for number in _OF_WORLD)),
    # MPICH, Intel MPI (both with Hydra) and others that speak PMI.
    _Family("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"),
)
_SLURM = _Family("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS", "SLURM_LOCALID")

WORLD_VARIABLES: tuple[str, ...] = (
    *_TORCH.names,
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *(name for family in _MPI for name in family.names),
)
"""All variables from which torch (2.13) or Accelerate (1.15) would conclude that there are several processes.

They are hidden if one process of a failed launch goes on alone. Neither library reads Slurm's own variables.
"""


def read_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Read this process's place in its launch.

    Raises:
        LaunchError: the launcher's variables are missing or contradict each other.
    """
    family = _family_of_launcher(environ)
    given_addr = environ.get("MASTER_ADDR")
    if family is None:
        return LaunchEnvironment(
            # `accelerate launch` of one process sets its own settings and no rank.
            launcher="accelerate" if _is_from_accelerate(environ) else "none",
            master_addr=given_addr or DEFAULT_MASTER_ADDR,
            master_port=_port(environ, DEFAULT_MASTER_PORT),
            is_one_machine=True,
        )
    here = _slurm_tasks_here(environ) if family is _SLURM else read_number(environ, family.local_world_size)
    place = _read_place(environ, family, here)
    is_one_node = place["local_world_size"] == place["world_size"]
    launcher, launch_id = _launcher(environ, family)
    first_host = None if given_addr else _first_host(environ, family, place["rank"], is_one_node=is_one_node)
    return LaunchEnvironment(
        launcher=launcher,
        **place,
        master_addr=given_addr or first_host or DEFAULT_MASTER_ADDR,
        master_port=_port(environ, _slurm_port(environ) if family is _SLURM else DEFAULT_MASTER_PORT),
        launch_id=launch_id,
        is_one_machine=here == place["world_size"],
        is_address_missing=not (given_addr or first_host) and here is not None and here < place["world_size"],
    )


def with_place(environ: Mapping[str, str], rank: int | None, worldsize: int | None) -> Mapping[str, str]:
    """Return the given rank and world size as a launcher would set them.

    Raises:
        LaunchError: one of the two is missing, or a launcher has set others.
    """
    if rank is None and worldsize is None:
        return environ
    if rank is None or worldsize is None:
        raise LaunchError(f"rank={rank} and worldsize={worldsize} belong together: give both or neither.")
    place = {"RANK": str(rank), "WORLD_SIZE": str(worldsize)}
    contradictions = [f"{name}={environ[name]}" for name in place if environ.get(name, place[name]) != place[name]]
    if contradictions:
        raise LaunchError(
            f"rank={rank} and worldsize={worldsize} were given, but the environment says {', '.join(contradictions)}. "
            "Give neither if a launcher started the process, or unset these variables."
        )
    beside = {name: environ[name] for name in LAUNCH_VARIABLES if name in environ}
    return {"LOCAL_RANK": str(rank), **beside, **place}


def variables_of_spawn(rank: int, world_size: int, address: str, port: int, run_id: str) -> dict[str, str]:
    """Return the variables of a process of our own spawn, which keeps the store as torchrun's agent does."""
    place = _as_launch_variables(rank, world_size, rank, world_size, address, port)
    return {**place, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent or our own spawn already keeps a store at the address."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def given_address(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the address and port of rank 0 that a launcher or the user set; None if finetune chooses a default."""
    return environ.get("MASTER_ADDR") or None, read_number(environ, "MASTER_PORT")


def is_first_process(environ: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0 or alone; True if the environment cannot be read."""
    with suppress(LaunchError):
        return read_environment(environ).rank == 0
    return True


def speaks_for_a_node(environ: Mapping[str, str]) -> bool:
    """Return whether this is the first process of one of several nodes: other nodes may print on other screens."""
    with suppress(LaunchError):
        place = read_environment(environ)
        return place.local_rank == 0 and place.local_world_size < place.world_size
    return True


def launcher_pid(environ: Mapping[str, str], environment: LaunchEnvironment) -> int | None:
    """Return the launcher's process, with which this worker must end; None if this process may outlive its parent.

    A launcher is torch's elastic agent (torchrun, `accelerate launch` of several processes), our own spawn, or the
    script that called torch.multiprocessing.spawn. A plain run must outlive its shell (`nohup finetune train &`), and
    so must a process with a RANK that was exported by hand. srun and mpirun end their tasks themselves.
    """
    if environment.launcher in ("mpi", "slurm", "none"):
        return None
    is_worker = "TORCHELASTIC_RUN_ID" in environ or multiprocessing.parent_process() is not None
    return _parent_pid if is_worker else None


def is_batch_script_body(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm gave a job several tasks, but this process was started alone, outside of srun.

    It is then in the body of an sbatch script, or in a shell that salloc opened. torchrun and mpirun start several
    processes there, so the answer is False under them.
    """
    if "SLURM_JOB_ID" not in environ or _family_of_launcher(environ) is not None:
        return False
    counts = (environ.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"))
    total, per_node, nodes = (int(count) if _NUMBER.fullmatch(count) else None for count in counts)
    # Without `--ntasks`, older versions of Slurm say only how many tasks each node is to have.
    tasks = (per_node or 0) * (nodes or 1) if total is None else total
    return tasks > 1


def is_started_by_accelerate_alone(environ: Mapping[str, str]) -> bool:
    """Return whether this is the only process of an `accelerate launch`, also if srun started that launch."""
    return _is_from_accelerate(environ) and read_environment(environ).world_size == 1


def has_accelerate_settings(environ: Mapping[str, str]) -> bool:
    """Return whether there is a setting of accelerate, which `accelerate_settings` reads."""
    return any(name.startswith("ACCELERATE_") for name in environ)


_NUMBER = re.compile(r"[0-9]{1,9}")


def read_number(environ: Mapping[str, str], names: str) -> int | None:
    """Return the whole number under the first of these names (between spaces) that is set, or raise LaunchError."""
    name = next((name for name in names.split() if name in environ), None)
    if name is None:
        return None
    if not _NUMBER.fullmatch(environ[name]):
        raise LaunchError(f"{name} is {environ[name]!r}; expected a whole number. Start again through the launcher.")
    return int(environ[name])


def _as_launch_variables(*values: int | str) -> dict[str, str]:
    return {name: str(value) for name, value in zip(LAUNCH_VARIABLES, values, strict=True)}


def _is_from_accelerate(environ: Mapping[str, str]) -> bool:
    return "ACCELERATE_MIXED_PRECISION" in environ or "ACCELERATE_DYNAMO_BACKEND" in environ


def _family_of_launcher(environ: Mapping[str, str]) -> _Family | None:
    if _TORCH.is_present(environ):
        return _TORCH
    is_slurm_step = _is_slurm_step(environ)
    for family in _MPI:
        # srun with a PMI plugin sets PMI_RANK too, but not the local rank that every mpirun sets.
        is_from_srun = is_slurm_step and family.local_rank.split()[0] not in environ
        if family.is_present(environ) and not is_from_srun:
            return family
    return _SLURM if is_slurm_step else None


def _read_place(environ: Mapping[str, str], family: _Family, here: int | None) -> dict[str, int]:
    """Read rank, local_rank, world_size and local_world_size.

    A world of one needs no local rank. If the launcher does not say how many processes are `here`, on this node, the
    answer is all of them if local rank and rank are equal, else the smallest number that fits the local rank.

    Raises:
        LaunchError: variables are missing, malformed or contradict each other.
    """
    rank, world_size = read_number(environ, family.rank), read_number(environ, family.world_size)
    local_rank = read_number(environ, family.local_rank)
    if local_rank is None and world_size == 1:
        local_rank = 0
    variables = ", ".join(f"{name}={environ[name]}" for name in family.names if name in environ) or "none of them"
    if rank is None or world_size is None or local_rank is None:
        needed = (family.rank, family.world_size, family.local_rank)
        missing = [names.replace(" ", " or ") for names in needed if not any(name in environ for name in names.split())]
        raise LaunchError(
            f"The environment is incomplete for a launch through {family.name} variables: found {variables}; missing "
            f"{', '.join(missing)}. Start through torchrun, accelerate launch, srun or mpirun, which set them all, or "
            "unset them to train in one process."
        )
    if here is None:
        here = world_size if local_rank == rank else local_rank + 1
    if not (rank < world_size and local_rank < here <= world_size):
        raise LaunchError(
            f"The launch variables contradict each other: {variables}, {here} processes on this node. Expected 0 <= "
            "rank < world size and 0 <= local rank < processes on this node <= world size. Unset them, or start again "
            "through the launcher."
        )
    return {"rank": rank, "local_rank": local_rank, "world_size": world_size, "local_world_size": here}


def _launcher(environ: Mapping[str, str], family: _Family) -> tuple[Launcher, str]:
    """Return the launcher, and its id of this launch."""
    if family is _SLURM:
        return "slurm", f"{environ.get('SLURM_JOB_ID', '?')}.{environ.get('SLURM_STEP_ID', '?')}"
    if family is not _TORCH:
        return "mpi", environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    run_id = environ.get("TORCHELASTIC_RUN_ID", SPAWN_RUN_ID_PREFIX)
    if _is_from_accelerate(environ):
        return "accelerate", run_id
    return "spawn" if run_id.startswith(SPAWN_RUN_ID_PREFIX) else "torchrun", run_id


def _port(environ: Mapping[str, str], default: int) -> int:
    port = read_number(environ, "MASTER_PORT")
    # `accelerate launch --cpu` hands on `main_process_port: 0`, any free one, to its one process, which needs none.
    if port is None or (port == 0 and _is_from_accelerate(environ) and _family_of_launcher(environ) is None):
        return default
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT is {port}; expected a port from 1 to 65535.")
    return port


# --- Slurm ---------------------------------------------------------------------------------------------------------

# Slurm numbers its own steps (batch, extern, interactive, pending) down from 0xFFFFFFFF.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_HOST = re.compile(r"(?:[^\[\],\s]|\[[0-9]{1,18}(?:[-,][0-9]{1,18})*\])+(?=,|$)")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process.

    A batch script's body and the shell that salloc opens are one process, whatever SLURM_NTASKS says there. They have
    no step id, or a reserved one: a name such as ``batch``, or 0xFFFFFFF0 and above. A job that was submitted inside a
    step inherits the step's variables, but lists fewer ranks on its node (SLURM_GTIDS) than the step has tasks there.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if re.fullmatch(r"[0-9]{1,12}", step) is None or int(step) >= _FIRST_SPECIAL_STEP:
        return False
    here, ranks_here = _slurm_tasks_here(environ), environ.get("SLURM_GTIDS")
    return here is None or ranks_here is None or len(ranks_here.split(",")) == here


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return this node's number of tasks in Slurm's counts per node: ``2(x3),1`` is 2, 2, 2, 1; None if not given."""
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    node = read_number(environ, "SLURM_NODEID")
    if counts is None or node is None:
        return None
    num_nodes = 0
    for part in counts.split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            return None
        num_nodes += int(match[2] or 1)
        if node < num_nodes:
            return int(match[1])
    return None


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Return a port that differs between the jobs and steps on a node. Every rank computes the same port."""
    job, step = (int(re.sub(r"\D", "", environ.get(name, "")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return 20000 + (job * 37 + step) % 12000


def _first_host(environ: Mapping[str, str], family: _Family, rank: int, *, is_one_node: bool) -> str | None:
    """Return the first host that Slurm names. mpirun starts rank 0 there, too.

    Raises:
        LaunchError: rank 0 is on another node (`--distribution=arbitrary`).
    """
    step_nodes = environ.get("SLURM_STEP_NODELIST") if family is _SLURM else None
    nodelist = step_nodes or environ.get("SLURM_JOB_NODELIST")
    if family is _SLURM and rank == 0 and (read_number(environ, "SLURM_NODEID") or 0) > 0:
        raise LaunchError(
            f"rank 0 is not on the first node of this step (SLURM_PROCID=0, SLURM_NODEID={environ['SLURM_NODEID']}), "
            f"where the other ranks look for it. Export MASTER_ADDR={environ.get('SLURMD_NODENAME', 'NODE')} before "
            "srun."
        )
    is_asked = family is _SLURM or (family in _MPI and not is_one_node)
    return _first_host_from_slurm_nodelist(nodelist) if nodelist and is_asked else None


def _first_host_from_slurm_nodelist(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``n1-ib`` of ``n[1-2]-ib,m3``.

    Raises:
        LaunchError: the list does not begin with a host.
    """
    match = _HOST.match(nodelist.strip())
    if match is None:
        raise LaunchError(
            f"The Slurm node list {nodelist[:200]!r} cannot be read; expected names such as node7, node[01-04,07] or "
            "c[1-2]n[5-6] between commas. Set MASTER_ADDR to the first host's name."
        )
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])
