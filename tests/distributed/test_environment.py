import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import hostlist
import pytest

from finetune.config.schema import Config
from finetune.distributed.environment import (
    DEFAULT_MASTER_ADDR,
    DEFAULT_MASTER_PORT,
    _first_host_from_slurm_nodelist,
    given_address,
    has_agent_store,
    is_batch_script_body,
    is_first_process,
    is_started_by_accelerate_alone,
    read_environment,
    speaks_for_a_node,
    with_place,
)
from finetune.distributed.launch import refuse_another_launch
from finetune.errors import LaunchError
from tests.distributed.launcher_variables import (
    ACCELERATE,
    ACCELERATE_DEFAULTS,
    BATCH_BODY,
    HYDRA,
    MPIRUN_STEP,
    MVAPICH,
    OPEN_MPI,
    SALLOC_SHELL,
    SRUN,
    SRUN_ONE_TASK,
    SRUN_PMI2,
    TORCHRUN,
    without,
)


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [
        ("torchrun", TORCHRUN),
        ("accelerate", ACCELERATE),
        ("mpi", OPEN_MPI),
        ("mpi", HYDRA),
        ("mpi", MVAPICH),
        ("slurm", SRUN),
    ],
)
def test_each_launcher_says_which_process_this_is(launcher, environ):
    read = read_environment(environ)
    assert read.launcher == launcher
    assert (read.rank, read.world_size, read.local_rank, read.local_world_size) == (3, 4, 1, 2)


def test_without_a_launcher_of_several_processes_it_is_a_spawn_or_one_process():
    read = read_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID"))
    assert (read.launcher, read.rank, read.master_addr, read.master_port) == ("spawn", 3, "node7", 1234)
    for environ, launcher in (({}, "none"), ({"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate")):
        read = read_environment(environ)
        assert read.launcher == launcher
        assert (read.rank, read.local_rank, read.world_size, read.local_world_size) == (0, 0, 1, 1)
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}).local_rank == 0, "one process needs no local rank"


def test_torchrun_inside_srun_wins_over_slurm_and_mpi():
    read = read_environment({**SRUN, **OPEN_MPI, **TORCHRUN, "RANK": "0", "SLURM_PROCID": "1"})
    assert (read.launcher, read.rank, read.master_addr) == ("torchrun", 0, "node7")


def test_mpirun_inside_a_slurm_job_wins_over_slurm():
    # mpirun starts one daemon per node through srun: what SLURM_PROCID counts there is nodes.
    for mpi in (OPEN_MPI, HYDRA, MVAPICH):
        read = read_environment({**MPIRUN_STEP, **mpi})
        assert (read.launcher, read.rank, read.world_size) == ("mpi", 3, 4)


def test_srun_with_a_pmi_plugin_is_slurm():
    read = read_environment({**SRUN_PMI2, "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"})
    assert (read.launcher, read.rank, read.local_rank, read.world_size) == ("slurm", 1, 1, 2)


@pytest.mark.parametrize("body", [BATCH_BODY, SALLOC_SHELL], ids=["sbatch", "salloc"])
def test_outside_of_srun_a_slurm_job_is_one_process(body):
    read = read_environment(body)
    assert (read.launcher, read.rank, read.world_size) == ("none", 0, 1)
    assert is_batch_script_body(body)
    assert not is_batch_script_body(body | {"SLURM_NTASKS": "1"})
    assert not is_batch_script_body(body | TORCHRUN), "torchrun in the body starts processes of its own"
    assert not is_batch_script_body(body | OPEN_MPI)


def test_the_tasks_that_a_job_asked_for_are_counted_without_their_total_too():
    per_node = without(BATCH_BODY, "SLURM_NTASKS", "SLURM_NPROCS") | {"SLURM_NNODES": "2"}
    assert is_batch_script_body(per_node | {"SLURM_NTASKS_PER_NODE": "1"})
    assert not is_batch_script_body(per_node)  # nobody asked for tasks: how many fit on the nodes says nothing
    assert not is_batch_script_body(SRUN)
    assert not is_batch_script_body({})
    assert not is_batch_script_body(per_node | {"SLURM_NTASKS": "many"})


@pytest.mark.parametrize("step", ["batch", "4294967290", "4294967291"])
def test_the_steps_that_slurm_keeps_for_itself_are_one_process(step):
    # 0xFFFFFFFA is the shell that salloc opens on a node, 0xFFFFFFFB the batch script.
    shell = {**BATCH_BODY, "SLURM_STEP_ID": step}
    read = read_environment(shell)
    assert (read.launcher, read.world_size) == ("none", 1)
    assert is_batch_script_body(shell)
    assert read_environment({**shell, **OPEN_MPI}).launcher == "mpi"


def test_an_interactive_step_of_one_task_is_one_process_whatever_the_job_asked_for():
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    read = read_environment({**SRUN, **shell, "SLURM_STEP_TASKS_PER_NODE": "1"})
    assert (read.rank, read.world_size) == (0, 1)


def test_half_a_launch_is_refused_and_never_completed_from_another_family():
    half_mpi = without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE")
    for environ, missing in (
        (without(TORCHRUN, "LOCAL_RANK"), "found RANK=3, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2; missing LOCAL_RANK"),
        (without(HYDRA, "PMI_RANK"), "PMI_SIZE=4.*missing PMI_RANK"),
        (without(SRUN, "SLURM_LOCALID"), "missing SLURM_LOCALID"),
        ({**half_mpi, **HYDRA, **SRUN}, "missing OMPI_COMM_WORLD_SIZE"),
        ({**without(TORCHRUN, "WORLD_SIZE"), **OPEN_MPI, **SRUN}, "missing WORLD_SIZE"),
    ):
        with pytest.raises(LaunchError, match=missing):
            read_environment(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "3,1"}, "SLURM_LOCALID=1, 1 processes on this node"),
        ({**TORCHRUN, "RANK": "4"}, "contradict.*RANK=4, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, "contradict.*LOCAL_WORLD_SIZE=5"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'"),
        ({**TORCHRUN, "RANK": "1" * 5000}, "RANK is '1111"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT is 65536"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT is 0"),
        ({**ACCELERATE, "MASTER_PORT": "0"}, "MASTER_PORT is 0"),
    ],
)
def test_contradictions_and_what_is_no_number_are_refused_by_name(environ, said):
    with pytest.raises(LaunchError, match=said):
        read_environment(environ)


def test_rank_0_of_a_slurm_step_is_on_the_first_host_of_the_step():
    step = {**SRUN, "SLURM_JOB_NODELIST": "a[1-9]", "SLURM_STEP_NODELIST": "n[2-3]-ib,m[3-4]-eth"}
    assert read_environment(step).master_addr == "n2-ib"
    assert read_environment(without(step, "SLURM_STEP_NODELIST")).master_addr == "a1"
    with pytest.raises(LaunchError, match="cannot be read"):
        read_environment({**SRUN, "SLURM_STEP_NODELIST": "node[001-004"})


def test_mpirun_over_the_nodes_of_a_slurm_job_begins_on_its_first_host():
    inside = {**OPEN_MPI, "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[07-08]"}
    assert read_environment(inside).master_addr == "gpu07"
    one_node = {**inside, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert read_environment(one_node).master_addr == DEFAULT_MASTER_ADDR


@pytest.mark.parametrize(
    ("environ", "is_missing"),
    [
        (OPEN_MPI, True),
        (without(TORCHRUN, "MASTER_ADDR"), True),
        ({**OPEN_MPI, "MASTER_ADDR": "127.0.0.1"}, False),  # two nodes that are one host
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        (SRUN, False),
        ({**OPEN_MPI, "SLURM_JOB_NODELIST": "gpu[07-08]"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, False),  # nobody said how many are on this node
        ({}, False),
    ],
)
def test_a_launch_over_several_nodes_needs_an_address(environ, is_missing):
    read = read_environment(environ)
    assert read.is_address_missing == is_missing
    refusal = pytest.raises(LaunchError, match=f"{read.launcher} started 4 .* nothing says where rank 0 is")
    with refusal if is_missing else nullcontext():
        refuse_another_launch(Config(), read)
    refuse_another_launch(Config.model_validate({"parallel": {"master_addr": "node1"}}), read)


def test_one_task_of_slurm_may_start_the_processes_of_its_node():
    two = Config.model_validate({"parallel": {"num_processes": 2}})
    for environ in ({}, SRUN_ONE_TASK):
        read = read_environment(environ)
        assert read.may_spawn
        refuse_another_launch(two, read)
    for environ in (SRUN, OPEN_MPI, TORCHRUN, {"RANK": "0", "WORLD_SIZE": "1"}):
        read = read_environment(environ)
        assert not read.may_spawn
        with pytest.raises(LaunchError, match=r"parallel.num_processes is 2 .* but .* started this process"):
            refuse_another_launch(two, replace(read, is_address_missing=False))


def test_address_and_port_may_default_and_count_as_given_where_either_is_set():
    read = read_environment(without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"))
    assert (read.master_addr, read.master_port) == (DEFAULT_MASTER_ADDR, DEFAULT_MASTER_PORT)
    assert given_address({"MASTER_PORT": "1234"}) == (None, 1234)
    assert given_address({"MASTER_ADDR": "node7"}) == ("node7", None)
    assert given_address({"RANK": "0", "MASTER_ADDR": ""}) == (None, None)


def test_the_port_of_a_slurm_step_follows_from_job_and_step():
    def port(job, step, procid="3"):
        steps = {**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "SLURM_PROCID": procid, "SLURM_NODEID": "0"}
        return read_environment(steps).master_port

    assert port("77", "2", "0") == port("77", "2", "3"), "every rank must find the same port"
    assert len({port(str(job), str(step)) for job in range(1000, 1010) for step in range(10)}) == 100
    assert all(20000 <= port(str(job), "0") < 32000 for job in (1, 999, 123456789))


# --- Slurm's notations ---------------------------------------------------------------------------------------------


def random_nodelist(choose):
    """One to four names, each with up to two groups of numbers and ranges: ``gpu-[01-04,007]-ib,node[3]``."""
    names = []
    for _ in range(choose.randint(1, 4)):
        name = choose.choice(("n", "node", "gpu-", "c1-", "rack2_", "a.b-", "x"))
        for _ in range(choose.choice((0, 1, 1, 1, 2))):
            parts = []
            for _ in range(choose.randint(1, 3)):
                first, width = choose.randint(0, 120), choose.choice((0, 0, 2, 3, 5))
                last = "" if choose.random() < 0.4 else f"-{first + choose.randint(0, 4):0{width}d}"
                parts.append(f"{first:0{width}d}{last}")
            name += f"[{','.join(parts)}]" + choose.choice(("", "-ib", "-eth0", ".cluster", "b"))
        names.append(name)
    return ",".join(names)


def test_random_node_lists_are_read_as_python_hostlist_reads_them():
    choose = random.Random(20250115)
    for _ in range(1000):
        nodelist = random_nodelist(choose)
        hosts = hostlist.expand_hostlist(nodelist, allow_duplicates=True)
        assert _first_host_from_slurm_nodelist(nodelist) == hosts[0], nodelist


@pytest.mark.parametrize("nodelist", ["", "a b", "n[1-2", "n[]", "n[a-b]", "n[[1]]", "n[" + "1," * 60_000])
def test_a_malformed_node_list_is_refused_with_what_to_do(nodelist):
    with pytest.raises(LaunchError, match=r"cannot be read.*Set MASTER_ADDR") as caught:
        _first_host_from_slurm_nodelist(nodelist)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("counts", "of_each_node"),
    [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2])],
)
def test_tasks_are_counted_node_by_node(counts, of_each_node):
    one = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "7", "MASTER_ADDR": "node1"}
    for node, tasks in enumerate(of_each_node):
        step = {**one, "SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": counts}
        assert read_environment(step).local_world_size == tasks
    for unreadable in ("x", "2(3)", "-1"):
        read = read_environment({**one, "SLURM_STEP_TASKS_PER_NODE": unreadable})
        assert (read.local_world_size, read.is_one_machine) == (7, False)


@pytest.mark.process
def test_reading_the_environment_needs_no_torch():
    code = "import sys, finetune.distributed.environment; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_job_that_was_submitted_from_inside_a_step_is_no_task_of_it():
    # Slurm 22.05: `srun -n2 sbatch job.sh`; the body inherits SLURM_STEP_*, and lists one rank where the step had two.
    body = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
    assert read_environment(body).world_size == 1
    task = {**SRUN, "SLURM_GTIDS": "2,3"}
    assert read_environment(task).world_size == 4


def test_rank_0_on_another_node_than_the_first_must_be_told_to_the_others():
    arbitrary = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURMD_NODENAME": "gpu08"}
    with pytest.raises(LaunchError, match="Export MASTER_ADDR=gpu08"):
        read_environment(arbitrary)
    assert read_environment({**arbitrary, "MASTER_ADDR": "gpu08"}).master_addr == "gpu08"


def test_the_first_process_of_each_of_several_nodes_speaks_for_it():
    assert speaks_for_a_node({**TORCHRUN, "RANK": "2", "LOCAL_RANK": "0"})
    assert not speaks_for_a_node({**TORCHRUN, "RANK": "3", "LOCAL_RANK": "1"})
    assert not speaks_for_a_node({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


def test_only_rank_0_is_the_first_process():
    assert not is_first_process(TORCHRUN)
    assert is_first_process({**TORCHRUN, "RANK": "0"})
    assert is_first_process({})
    assert is_first_process({**TORCHRUN, "RANK": "x"}), "whoever cannot know it speaks"


def test_accelerate_starts_one_process_or_says_which_this_is():
    assert is_started_by_accelerate_alone(ACCELERATE_DEFAULTS)
    assert not is_started_by_accelerate_alone(ACCELERATE)
    assert not is_started_by_accelerate_alone({})


def test_a_launcher_may_say_that_it_keeps_no_store():
    """torchrun sets the variable to False for its static rendezvous."""
    assert has_agent_store(TORCHRUN)
    assert not has_agent_store({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"})


def test_a_local_rank_that_is_set_counts_beside_a_rank_that_is_given():
    assert with_place({}, 3, 4)["LOCAL_RANK"] == "3"
    assert with_place({"LOCAL_RANK": "1"}, 3, 4)["LOCAL_RANK"] == "1"
