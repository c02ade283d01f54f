"""The launcher's environment, read once into a value. The only module that knows a launch variable by name.

Three families of variables are known: RANK / WORLD_SIZE / LOCAL_RANK (torchrun, accelerate, our own spawn), OMPI_* and
PMI_* (MPI), and SLURM_*. The first family that is present is taken whole and never compared with another: `srun
torchrun …` and `mpirun` inside a Slurm job are normal, and there RANK differs from SLURM_PROCID by design.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from finetune.errors import LaunchError

Launcher = Literal["torchrun", "accelerate", "spawn", "mpi", "slurm", "none"]

DEFAULT_MASTER_ADDR = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torch.distributed and Accelerate read; `initialize_ddp` writes those that a launcher left out."""


@dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """What the launcher said about this process."""

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int

    def as_variables(self) -> dict[str, str]:
        """The same facts under the names that torch.distributed and Accelerate read."""
        values = (
            self.rank,
            self.world_size,
            self.local_rank,
            self.local_world_size,
            self.master_addr,
            self.master_port,
        )
        return {name: str(value) for name, value in zip(LAUNCH_VARIABLES, values, strict=True)}


@dataclass(frozen=True)
class _Family:
    """The names under which one kind of launcher passes the same four facts, each with alternatives."""

    name: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


_TORCH = _Family("torch", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_MPI = _Family(
    "MPI",
    ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
_SLURM = _Family(
    "Slurm", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), ("SLURM_LOCALID",), ()
)


def read_environment(environ: Mapping[str, str]) -> LaunchEnvironment:
    """Read what the launcher said.

    Raises:
        LaunchError: variables of the launcher's family are missing, malformed or contradict each other.
    """
    if any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return _read_family(environ, _TORCH, _torch_launcher(environ))
    is_slurm_step = "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ
    is_mpi = any(name in environ for name in (*_MPI.rank, *_MPI.world_size))
    # `srun --mpi=pmi2` sets PMI_RANK too, but no local rank; mpirun sets both.
    if is_mpi and not (is_slurm_step and _number(environ, _MPI.local_rank) is None):
        return _read_family(environ, _MPI, "mpi")
    if is_slurm_step:
        return _read_family(environ, _SLURM, "slurm")
    # Without SLURM_STEP_ID this is the body of a batch script: one process, whatever SLURM_NTASKS says.
    return LaunchEnvironment(
        # `accelerate launch` of one process sets its own settings and no rank.
        launcher="accelerate" if _is_from_accelerate(environ) else "none",
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        master_addr=environ.get("MASTER_ADDR") or DEFAULT_MASTER_ADDR,
        master_port=_port(environ, DEFAULT_MASTER_PORT),
    )


def with_place(environ: Mapping[str, str], rank: int, worldsize: int) -> dict[str, str]:
    """Rank and world size as a launcher would set them, with what the environment says about node and address.

    Raises:
        LaunchError: a launcher gave this process another place.
    """
    given = {"RANK": str(rank), "WORLD_SIZE": str(worldsize)}
    other = [f"{name}={environ[name]}" for name in given if environ.get(name, given[name]) != given[name]]
    if other:
        raise LaunchError(
            f"rank={rank} and worldsize={worldsize} were given, but the environment says {', '.join(other)}. "
            "Give none where a launcher started the process, or unset these variables."
        )
    beside = {name: environ[name] for name in LAUNCH_VARIABLES if name in environ}
    return {"LOCAL_RANK": str(rank), **beside, **given}


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """True where torchrun's agent already holds a store at the address."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_first_process(environ: Mapping[str, str]) -> bool:
    """Whether this process is rank 0 or alone, as far as the environment can be read."""
    try:
        return read_environment(environ).rank == 0
    except LaunchError:
        return True


def is_batch_script_body(environ: Mapping[str, str]) -> bool:
    """True in the body of an sbatch script that asked for several tasks but was not started through srun."""
    tasks = environ.get("SLURM_NTASKS", "1")
    in_step = "SLURM_STEP_ID" in environ
    return "SLURM_JOB_ID" in environ and not in_step and tasks.isdigit() and int(tasks) > 1


def is_cpu_requested(environ: Mapping[str, str]) -> bool:
    """True where `accelerate launch --cpu` asked for the CPU."""
    return environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")


def requested_engine(environ: Mapping[str, str]) -> str | None:
    """The engine that an accelerate config file asked for in place of plain data parallelism, by its name there."""
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("1", "true", "yes"):
            return name
    return None


def requested_precision(environ: Mapping[str, str]) -> str | None:
    """The mixed precision that `accelerate launch` was asked for; it exports `no` where it was not."""
    asked = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return None if asked == "no" else asked


def _is_from_accelerate(environ: Mapping[str, str]) -> bool:
    return "ACCELERATE_MIXED_PRECISION" in environ or "ACCELERATE_DYNAMO_BACKEND" in environ


def _torch_launcher(environ: Mapping[str, str]) -> Launcher:
    if _is_from_accelerate(environ):
        return "accelerate"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "spawn"


def _read_family(environ: Mapping[str, str], family: _Family, launcher: Launcher) -> LaunchEnvironment:
    rank = _number(environ, family.rank)
    world_size = _number(environ, family.world_size)
    local_rank = _number(environ, family.local_rank)
    local_world_size = _number(environ, family.local_world_size)
    if local_rank is None and world_size == 1:
        local_rank = 0
    if rank is None or world_size is None or local_rank is None:
        raise _incomplete(environ, family)
    if local_world_size is None:
        local_world_size = _slurm_tasks_here(environ) if family is _SLURM else None
    if local_world_size is None:
        local_world_size = world_size if local_rank == rank else max(1, local_rank + 1)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise LaunchError(
            f"The launch variables contradict each other: {_found(environ, family)}. Expected 0 <= rank < "
            "world size and 0 <= local rank < processes on this node <= world size. Unset them, "
            "or start again through the launcher."
        )
    return LaunchEnvironment(
        launcher=launcher,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        master_addr=environ.get("MASTER_ADDR") or _default_address(environ, family),
        master_port=_port(environ, _default_port(environ, family)),
    )


def _names(family: _Family) -> list[str]:
    return [*family.rank, *family.world_size, *family.local_rank, *family.local_world_size]


def _found(environ: Mapping[str, str], family: _Family) -> str:
    return ", ".join(f"{name}={environ[name]}" for name in _names(family) if name in environ)


def _incomplete(environ: Mapping[str, str], family: _Family) -> LaunchError:
    needed = (family.rank, family.world_size, family.local_rank)
    missing = [" or ".join(names) for names in needed if not any(name in environ for name in names)]
    return LaunchError(
        f"The environment is only half set for a launch through {family.name} variables: found "
        f"{_found(environ, family)}; missing {', '.join(missing)}. Start through torchrun, accelerate "
        "launch, srun or mpirun, which set them all, or unset them to train in one process."
    )


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if name in environ:
            if not re.fullmatch(r"\d+", environ[name]):
                raise LaunchError(
                    f"{name} is {environ[name]!r}; expected a whole number. Start again through the launcher."
                )
            return int(environ[name])
    return None


def _port(environ: Mapping[str, str], default: int) -> int:
    port = _number(environ, ("MASTER_PORT",))
    if port is None:
        return default
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT is {port}; expected a port from 1 to 65535.")
    return port


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """This node's number of tasks: SLURM_STEP_TASKS_PER_NODE reads like ``2(x3),1``, node after node."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    node = _number(environ, ("SLURM_NODEID",))
    if text is None or node is None:
        return None
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else None


def _default_address(environ: Mapping[str, str], family: _Family) -> str:
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if family is _SLURM and nodelist:
        return _first_host_from_slurm_nodelist(nodelist)
    return DEFAULT_MASTER_ADDR


def _default_port(environ: Mapping[str, str], family: _Family) -> int:
    """Jobs and steps that share a node get different ports; every rank computes the same one."""
    if family is not _SLURM:
        return DEFAULT_MASTER_PORT
    job = int(re.sub(r"\D", "", environ.get("SLURM_JOB_ID", "")) or 0)
    step = int(re.sub(r"\D", "", environ.get("SLURM_STEP_ID", "")) or 0)
    return 20000 + (job * 37 + step) % 12000


def _first_host_from_slurm_nodelist(nodelist: str) -> str:
    """The first host of a Slurm node list.

    A list is names between commas; a name may hold several bracket groups, each a list of numbers and ranges:
    ``n[1-2]-ib,m[3-4]-eth`` begins with ``n1-ib`` and ``c[1-2]n[5-6]`` with ``c1n5``. Leading zeros count.
    """
    depth = 0
    first = []
    for character in nodelist:
        if character == "," and depth == 0:
            break
        depth += (character == "[") - (character == "]")
        first.append(character)
    host = re.sub(r"\[([^\]]*)\]", lambda group: re.split(r"[,-]", group[1])[0], "".join(first)).strip()
    if not host or depth != 0 or "[" in host or "]" in host:
        raise LaunchError(f"The Slurm node list {nodelist!r} cannot be read. Set MASTER_ADDR to the first host's name.")
    return host
