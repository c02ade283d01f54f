import subprocess
import sys

import pytest

from finetune.distributed.environment import (
    LAUNCH_VARIABLES,
    is_batch_script_body,
    is_cpu_requested,
    read_environment,
    requested_engine,
    requested_precision,
)
from finetune.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "none",
}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
INTEL_MPI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [("torchrun", TORCHRUN), ("accelerate", ACCELERATE), ("mpi", OPEN_MPI), ("mpi", INTEL_MPI), ("slurm", SRUN)],
)
def test_each_launcher_says_which_process_this_is(launcher, environ):
    read = read_environment(environ)
    assert read.launcher == launcher
    assert (read.rank, read.world_size, read.local_rank, read.local_world_size) == (3, 4, 1, 2)


def test_rank_variables_without_a_known_launcher_are_a_spawn():
    read = read_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID"))
    assert (read.launcher, read.rank, read.master_addr, read.master_port) == ("spawn", 3, "node7", 1234)


def test_an_empty_environment_is_one_process():
    read = read_environment({})
    assert (read.launcher, read.rank, read.local_rank, read.world_size, read.local_world_size) == ("none", 0, 0, 1, 1)


def test_accelerate_launch_of_one_process_sets_no_rank():
    read = read_environment({"ACCELERATE_MIXED_PRECISION": "no"})
    assert (read.launcher, read.world_size) == ("accelerate", 1)


def test_torchrun_inside_srun_wins_over_slurm_and_mpi():
    read = read_environment({**SRUN, **OPEN_MPI, **TORCHRUN, "RANK": "0", "SLURM_PROCID": "1"})
    assert (read.launcher, read.rank, read.master_addr) == ("torchrun", 0, "node7")


def test_mpirun_inside_a_slurm_job_wins_over_slurm():
    # mpirun starts one daemon per node through srun: what SLURM_PROCID counts there is nodes.
    for mpi in (OPEN_MPI, INTEL_MPI):
        read = read_environment({**SRUN, **mpi, "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
        assert (read.launcher, read.rank, read.world_size) == ("mpi", 3, 4)


def test_srun_with_pmi2_is_slurm():
    read = read_environment({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"})
    assert (read.launcher, read.rank, read.local_rank) == ("slurm", 3, 1)


def test_the_body_of_a_batch_script_is_one_process():
    body = without(SRUN, "SLURM_STEP_ID") | {"SLURM_PROCID": "0"}
    assert read_environment(body).world_size == 1
    assert is_batch_script_body(body)
    assert not is_batch_script_body(SRUN)
    assert not is_batch_script_body({})
    assert not is_batch_script_body({**body, "SLURM_NTASKS": "1"})


def test_an_interactive_step_of_one_task_is_one_process_whatever_the_job_asked_for():
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    read = read_environment({**SRUN, **shell, "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert (read.rank, read.world_size) == (0, 1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_half_a_launch_is_refused_and_lists_what_is_found_and_missing(missing):
    environ = without(TORCHRUN, missing)
    with pytest.raises(LaunchError) as caught:
        read_environment(environ)
    found, _, rest = str(caught.value).partition("; missing ")
    assert rest.startswith(missing)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        assert (f" {name}={TORCHRUN[name]}" in found) == (name != missing)


def test_half_an_mpi_or_slurm_launch_is_refused():
    with pytest.raises(LaunchError, match=r"PMI_SIZE=4.*missing OMPI_COMM_WORLD_RANK or PMI_RANK"):
        read_environment(without(INTEL_MPI, "PMI_RANK"))
    with pytest.raises(LaunchError, match="missing SLURM_LOCALID"):
        read_environment(without(SRUN, "SLURM_LOCALID"))


@pytest.mark.parametrize(
    "change",
    [{"RANK": "4"}, {"LOCAL_RANK": "2"}, {"LOCAL_WORLD_SIZE": "5"}, {"WORLD_SIZE": "0"}],
)
def test_contradictions_are_refused_and_shown(change):
    environ = {**TORCHRUN, **change}
    with pytest.raises(LaunchError, match="contradict") as caught:
        read_environment(environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        assert f"{name}={environ[name]}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "-1"), ("RANK", ""), ("WORLD_SIZE", "two"), ("MASTER_PORT", "http")]
)
def test_what_is_no_number_is_refused_by_name(name, value):
    with pytest.raises(LaunchError, match=f"{name} is '{value}'"):
        read_environment({**TORCHRUN, name: value})


@pytest.mark.parametrize("port", ["0", "65536"])
def test_a_port_out_of_range_is_refused(port):
    with pytest.raises(LaunchError, match=f"MASTER_PORT is {port}"):
        read_environment({**TORCHRUN, "MASTER_PORT": port})


def test_one_process_needs_no_local_rank():
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}).local_rank == 0


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("c[1-2]n[5-6]", "c1n5"),
        ("n[1-2]-ib,m[3-4]-eth", "n1-ib"),
        ("node[001-004,007]", "node001"),
        ("node[007,001-004]", "node007"),
        ("alpha,beta", "alpha"),
        ("alpha", "alpha"),
        ("gpu-3-[1,4],gpu-4-1", "gpu-3-1"),
    ],
)
def test_rank_0_of_a_slurm_step_is_on_the_first_host(nodelist, first):
    assert read_environment({**SRUN, "SLURM_STEP_NODELIST": nodelist}).master_addr == first


@pytest.mark.parametrize("nodelist", ["node[001-004", "node]1["])
def test_a_node_list_that_cannot_be_read_is_refused(nodelist):
    with pytest.raises(LaunchError, match="cannot be read"):
        read_environment({**SRUN, "SLURM_STEP_NODELIST": nodelist})


def test_a_master_address_that_is_set_wins_over_the_node_list():
    read = read_environment({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert (read.master_addr, read.master_port) == ("10.0.0.1", 4321)


def test_the_port_of_a_slurm_step_follows_from_job_and_step():
    def port(job, step, procid="3"):
        steps = {**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": procid}
        return read_environment(steps).master_port

    assert port("77", "2", "0") == port("77", "2", "3"), "every rank must find the same port"
    assert len({port(str(job), str(step)) for job in range(1000, 1010) for step in range(10)}) == 100
    assert all(20000 <= port(str(job), "0") < 32000 for job in (1, 999, 123456789))


def test_processes_on_a_slurm_node_are_counted_node_by_node():
    uneven = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x1),1", "SLURM_NTASKS": "3", "SLURM_PROCID": "2"}
    assert read_environment({**uneven, "SLURM_LOCALID": "0"}).local_world_size == 1


def test_as_variables_reads_back_as_the_same_process():
    read = read_environment(SRUN)
    variables = read.as_variables()
    assert tuple(variables) == LAUNCH_VARIABLES
    again = read_environment(variables)
    assert again.as_variables() == variables


def test_wishes_of_accelerate_are_read():
    assert is_cpu_requested({"ACCELERATE_USE_CPU": "True"})
    assert not is_cpu_requested({"ACCELERATE_USE_CPU": "False"})
    assert requested_engine({"ACCELERATE_USE_FSDP": "true"}) == "FSDP"
    assert requested_engine({"ACCELERATE_USE_DEEPSPEED": "true"}) == "DEEPSPEED"
    assert requested_engine({"ACCELERATE_USE_FSDP": "false"}) is None
    assert requested_precision({"ACCELERATE_MIXED_PRECISION": "bf16"}) == "bf16"
    assert requested_precision(ACCELERATE) is None


def test_reading_the_environment_needs_no_torch():
    code = "import sys, finetune.distributed.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
