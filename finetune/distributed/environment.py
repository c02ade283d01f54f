"""Read a process's place in its launch from the launcher's environment variables.

Only this module knows these variables by name. The settings of accelerate are in `accelerate_variables`.

Each family of launchers passes rank and sizes under names of its own (`LauncherVariables`). Only the first family that
is present counts: `srun torchrun …` and `mpirun` inside a Slurm job are normal, and there RANK differs from
SLURM_PROCID by design.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from finetune.distributed.launcher_variables import LauncherVariables, read_number
from finetune.distributed.slurm_notation import _first_host_from_slurm_nodelist, tasks_on_node
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
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    launch_id: str = ""
    """The same for all processes of this launch, and for no other launch; empty if the launcher has no such id."""
    is_one_machine: bool = False
    """Whether the launcher says that all processes of this launch are on this machine."""

    def as_variables(self) -> dict[str, str]:
        """Return this place under the names that torch.distributed and Accelerate read."""
        sizes = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        values = (*sizes, self.master_addr, self.master_port)
        return {name: str(value) for name, value in zip(LAUNCH_VARIABLES, values, strict=True)}


_TORCH = LauncherVariables("torch", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = LauncherVariables(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MVAPICH = LauncherVariables(
    "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
# MPICH, Intel MPI (both with Hydra) and others that speak PMI.
_PMI = LauncherVariables(
    "PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE"
)
_SLURM = LauncherVariables("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS", "SLURM_LOCALID")
_MPI = (_OPEN_MPI, _MVAPICH, _PMI)
# Slurm numbers its own steps (batch, extern, interactive, pending) down from 0xFFFFFFFF.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

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
        LaunchError: the launcher's variables are missing, malformed or contradict each other.
    """
    family = _family_of_launcher(environ)
    if family is not None:
        return _read_place(environ, family)
    return LaunchEnvironment(
        # `accelerate launch` of one process sets its own settings and no rank.
        launcher="accelerate" if _is_from_accelerate(environ) else "none",
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        master_addr=environ.get("MASTER_ADDR") or DEFAULT_MASTER_ADDR,
        master_port=_port(environ, DEFAULT_MASTER_PORT),
        is_one_machine=True,
    )


def with_place(environ: Mapping[str, str], rank: int, worldsize: int) -> dict[str, str]:
    """Return rank and world size as a launcher would set them, with node and address from the environment.

    Raises:
        LaunchError: a launcher gave this process another place.
    """
    given = {"RANK": str(rank), "WORLD_SIZE": str(worldsize)}
    other = [f"{name}={environ[name]}" for name in given if environ.get(name, given[name]) != given[name]]
    if other:
        raise LaunchError(
            f"rank={rank} and worldsize={worldsize} were given, but the environment says {', '.join(other)}. "
            "Give neither if a launcher started the process, or unset these variables."
        )
    beside = {name: environ[name] for name in LAUNCH_VARIABLES if name in environ}
    return {"LOCAL_RANK": str(rank), **beside, **given}


def variables_of_spawn(rank: int, world_size: int, address: str, port: int, run_id: str) -> dict[str, str]:
    """Return the variables of a process of our own spawn, which keeps the store as torchrun's agent does."""
    values = (rank, world_size, rank, world_size, address, port)
    place = {name: str(value) for name, value in zip(LAUNCH_VARIABLES, values, strict=True)}
    return {**place, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent or our own spawn already keeps a store at the address."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def given_address(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Return the address and port of rank 0 that a launcher or the user set; None if finetune chooses a default."""
    return environ.get("MASTER_ADDR") or None, read_number(environ, "MASTER_PORT")


def is_first_process(environ: Mapping[str, str]) -> bool:
    """Return whether this process is rank 0 or alone; True if the environment cannot be read."""
    try:
        return read_environment(environ).rank == 0
    except LaunchError:
        return True


def speaks_for_a_node(environ: Mapping[str, str]) -> bool:
    """Return whether this is the first process of one of several nodes: other nodes may print on other screens."""
    try:
        place = read_environment(environ)
    except LaunchError:
        return True
    return place.local_rank == 0 and place.local_world_size < place.world_size


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


def is_address_missing(environ: Mapping[str, str], environment: LaunchEnvironment) -> bool:
    """Return whether processes of other nodes cannot know where rank 0 listens: no variable says so, nor a default."""
    family = _family_of_launcher(environ)
    if family is None or environ.get("MASTER_ADDR") or environment.master_addr != DEFAULT_MASTER_ADDR:
        return False
    here = read_number(environ, family.local_world_size)
    return here is not None and here < environment.world_size


def is_batch_script_body(environ: Mapping[str, str]) -> bool:
    """Return whether Slurm gave a job several tasks, but this process was started alone, outside of srun.

    It is then in the body of an sbatch script, or in a shell that salloc opened. torchrun and mpirun start several
    processes there, so the answer is False under them.
    """
    if "SLURM_JOB_ID" not in environ or _family_of_launcher(environ) is not None:
        return False
    counts = (environ.get(name, "") for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"))
    total, per_node, nodes = (int(count) if re.fullmatch(r"[0-9]{1,9}", count) else None for count in counts)
    # Without `--ntasks`, older versions of Slurm say only how many tasks each node is to have.
    tasks = (per_node or 0) * (nodes or 1) if total is None else total
    return tasks > 1


def is_gpu_choice_given(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher or the user chose the GPUs that this process sees, perhaps others for each process."""
    return any(environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the names or numbers of the CUDA GPUs that this process was given; empty names if it sees all."""
    return environ.get("CUDA_VISIBLE_DEVICES", "").split(",")


def is_started_by_accelerate_alone(environ: Mapping[str, str]) -> bool:
    """Return whether this is the only process of an `accelerate launch`, also if srun started that launch."""
    return _is_from_accelerate(environ) and read_environment(environ).world_size == 1


def _is_from_accelerate(environ: Mapping[str, str]) -> bool:
    return "ACCELERATE_MIXED_PRECISION" in environ or "ACCELERATE_DYNAMO_BACKEND" in environ


def _family_of_launcher(environ: Mapping[str, str]) -> LauncherVariables | None:
    if _TORCH.are_present(environ):
        return _TORCH
    is_slurm_step = _is_slurm_step(environ)
    for family in _MPI:
        # srun with a PMI plugin sets PMI_RANK too, but not the local rank that every mpirun sets.
        is_from_srun = is_slurm_step and family.local_rank.split()[0] not in environ
        if family.are_present(environ) and not is_from_srun:
            return family
    return _SLURM if is_slurm_step else None


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process.

    A batch script's body and the shell that salloc opens are one process, whatever SLURM_NTASKS says there. They have
    no step id, or a reserved one: a name such as ``batch``, or 0xFFFFFFF0 and above.
    """
    step = environ.get("SLURM_STEP_ID", "")
    is_step = re.fullmatch(r"[0-9]{1,12}", step) is not None and int(step) < _FIRST_SPECIAL_STEP
    return is_step and not _is_step_inherited(environ)


def _is_step_inherited(environ: Mapping[str, str]) -> bool:
    """Return whether the step's variables came with the environment of a job that was submitted inside the step.

    A real task lists as many ranks on its node (SLURM_GTIDS) as its step has tasks there.
    """
    here, ranks_here = _slurm_tasks_here(environ), environ.get("SLURM_GTIDS")
    return None not in (here, ranks_here) and len(str(ranks_here).split(",")) != here


def _launcher(environ: Mapping[str, str], family: LauncherVariables) -> Launcher:
    if family is _SLURM:
        return "slurm"
    if family is not _TORCH:
        return "mpi"
    if _is_from_accelerate(environ):
        return "accelerate"
    run_id = environ.get("TORCHELASTIC_RUN_ID")
    return "spawn" if run_id is None or run_id.startswith(SPAWN_RUN_ID_PREFIX) else "torchrun"


def _launch_id(environ: Mapping[str, str], family: LauncherVariables, *, is_one_node: bool) -> str:
    if family is _SLURM:
        job, step = environ.get("SLURM_JOB_ID", "?"), environ.get("SLURM_STEP_ID", "?")
        return f"{job}.{step}/attempt-{environ.get('SLURM_RESTART_COUNT', '0')}"
    if family is not _TORCH:
        return environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "none")
    # Each node's agent counts only the failures of its own workers: over several nodes the counts differ.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT") if is_one_node else None
    parts = [*([] if run_id == "none" else [run_id]), *([] if attempt is None else [f"attempt-{attempt}"])]
    return "/".join(parts)


def _refuse_unknown_first_node(environ: Mapping[str, str], family: LauncherVariables) -> None:
    """With `--distribution=arbitrary` rank 0 may be on any node, and the sorted node list does not say on which."""
    node = environ.get("SLURMD_NODENAME", "NODE")
    is_elsewhere = read_number(environ, family.rank) == 0 and (read_number(environ, "SLURM_NODEID") or 0) > 0
    if family is _SLURM and is_elsewhere and not environ.get("MASTER_ADDR"):
        raise LaunchError(
            f"rank 0 is not on the first node of this step (SLURM_PROCID=0, SLURM_NODEID={environ['SLURM_NODEID']}), "
            f"where the other ranks look for it. Export MASTER_ADDR={node} before srun."
        )


def _read_place(environ: Mapping[str, str], family: LauncherVariables) -> LaunchEnvironment:
    _refuse_unknown_first_node(environ, family)
    here = _slurm_tasks_here(environ) if family is _SLURM else read_number(environ, family.local_world_size)
    place = family.read(environ, processes_here=here)
    is_one_node = place["local_world_size"] == place["world_size"]
    return LaunchEnvironment(
        launcher=_launcher(environ, family),
        **place,
        master_addr=environ.get("MASTER_ADDR") or _default_address(environ, family, is_one_node=is_one_node),
        master_port=_port(environ, _default_port(environ, family)),
        launch_id=_launch_id(environ, family, is_one_node=is_one_node),
        is_one_machine=here == place["world_size"],
    )


def _port(environ: Mapping[str, str], default: int) -> int:
    port = read_number(environ, "MASTER_PORT")
    # `accelerate launch --cpu` hands on `main_process_port: 0`, any free one, to its one process, which needs none.
    if port is None or (port == 0 and _is_from_accelerate(environ) and _family_of_launcher(environ) is None):
        return default
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT is {port}; expected a port from 1 to 65535.")
    return port


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    node = read_number(environ, "SLURM_NODEID")
    return None if counts is None or node is None else tasks_on_node(counts, node)


def _default_address(environ: Mapping[str, str], family: LauncherVariables, *, is_one_node: bool) -> str:
    """Return the first host that Slurm names. mpirun starts rank 0 there too, in a Slurm job of several nodes."""
    nodelist = environ.get("SLURM_STEP_NODELIST") if family is _SLURM else None
    nodelist = nodelist or environ.get("SLURM_JOB_NODELIST")
    if nodelist and (family is _SLURM or (family in _MPI and not is_one_node)):
        return _first_host_from_slurm_nodelist(nodelist)
    return DEFAULT_MASTER_ADDR


def _default_port(environ: Mapping[str, str], family: LauncherVariables) -> int:
    """Return a port that differs between the jobs and steps on a node. Every rank computes the same port."""
    if family is not _SLURM:
        return DEFAULT_MASTER_PORT
    job = int(re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or 0)
    step = int(re.sub(r"\D", "", environ.get("SLURM_STEP_ID", "")) or 0)
    return 20000 + (job * 37 + step) % 12000
